"""Properties of the operator, tested with Hypothesis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from affine_attention import attention, attention_weights, count_visible_keys
from affine_attention.testing import EXTRAS, Case, make_inputs

IMPLS = ("reference", "composed")
MECHANISMS = ("softmax", "off_by_one", "sink", "gated", "affine", "affine_gated", "head_gated", "affine_no_bias")
TIGHT = {"rtol": 1e-9, "atol": 1e-9}
# No deadline, so that a loaded machine does not fail the tests.
law = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw, visibilities=("full", "causal", "causal+window", "causal+segments", "causal+padding"), square=False):
    groups = draw(st.sampled_from([1, 2]))
    keys = draw(st.integers(1, 40) | st.sampled_from([257, 300]))
    return Case(
        draw(st.sampled_from(MECHANISMS)),
        draw(st.sampled_from(visibilities)),
        draw(st.integers(1, 3)),
        groups * draw(st.integers(1, 3)),
        groups,
        keys if square else draw(st.integers(1, 40)),
        keys,
        draw(st.sampled_from([1, 3, 8])),
        torch.float64,
        seed=draw(st.integers(0, 10**6)),
        extra=draw(st.sampled_from(("", *EXTRAS))),
    )


def parts(inputs, *, grad=False):
    leaves = inputs.leaves() if grad else {n: x for n, x in inputs.tensors.items() if x is not None}
    return leaves


def call(tensors, visible, impl):
    return attention(**tensors, **visible, impl=impl)


@law
@given(cases())
def test_row_sums_are_alpha_times_the_share_without_sink_plus_n_beta(case):
    inputs = make_inputs(case)
    tensors = parts(inputs)
    rows = {name: tensors[name] for name in ("alpha", "beta", "sink") if name in tensors}
    weights = attention_weights(tensors["query"], tensors["key"], **rows, **inputs.visible)
    counts = count_visible_keys(tensors["query"], tensors["key"], **inputs.visible)
    sink = {"sink": tensors["sink"]} if "sink" in tensors else {}
    share = attention_weights(tensors["query"], tensors["key"], **sink, **inputs.visible).sum(-1)
    if not sink:
        torch.testing.assert_close(share, (counts > 0).double().expand_as(share), **TIGHT)
    expected = tensors.get("alpha", 1.0) * share + counts * tensors.get("beta", 0.0)
    torch.testing.assert_close(weights.sum(-1), expected.expand_as(share), **TIGHT)


@law
@given(cases(("causal", "causal+window", "causal+segments", "causal+padding"), square=True), st.data())
def test_later_positions_do_not_change_an_output_bitwise(case, data):
    inputs = make_inputs(case)
    position = data.draw(st.integers(0, case.keys - 1))
    tensors = parts(inputs)
    changed = {name: x.clone() for name, x in tensors.items()}
    for x in changed.values():
        if x.dim() >= 3:
            x[:, :, position + 1 :] = x[:, :, position + 1 :] * -3 + 7
    for impl in IMPLS:
        before, after = call(tensors, inputs.visible, impl), call(changed, inputs.visible, impl)
        assert torch.equal(before[:, :, : position + 1], after[:, :, : position + 1])


@law
@given(cases(("causal+segments", "segments"), square=True), st.data())
def test_packed_documents_are_independent(case, data):
    inputs = make_inputs(case)
    ids = inputs.visible["segment_ids"][0]
    first = ids == ids[:, :1]
    for impl in IMPLS:
        results = []
        for factor in (1.0, 50.0):
            leaves = {}
            for name, x in parts(inputs).items():
                if x.dim() >= 3:
                    keep = first[:, None, :, None] if x.dim() == 4 else first[:, None]
                    x = torch.where(keep, x, x * factor)
                leaves[name] = x.detach().requires_grad_()
            out = call(leaves, inputs.visible, impl)
            loss = (out * inputs.grad_out * first[:, None, :, None]).sum()
            results.append((out, *torch.autograd.grad(loss, [leaves["query"], leaves["key"], leaves["value"]])))
        rows = first[:, None, :, None]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a * rows, b * rows, **TIGHT)
        for grad in results[1][1:]:
            assert torch.equal(grad * ~rows, torch.zeros_like(grad)), "a gradient reached another document"


@law
@given(cases(("causal",), square=True), st.integers(1, 9))
def test_left_padding_shifts_the_output(case, shift):
    inputs = make_inputs(case)
    tensors = parts(inputs)
    padded = {
        name: x if x.dim() < 3 else F.pad(x, (0, 0, shift, 0) if x.dim() == 4 else (shift, 0), value=5.0)
        for name, x in tensors.items()
    }
    mask = torch.arange(case.keys + shift).expand(case.batch, -1) >= shift
    for impl in IMPLS:
        plain = call(tensors, inputs.visible, impl)
        shifted = call(padded, inputs.visible | {"mask": mask}, impl)
        torch.testing.assert_close(shifted[:, :, shift:], plain, **TIGHT)
        assert torch.equal(shifted[:, :, :shift], torch.zeros_like(shifted[:, :, :shift]))


@law
@given(cases(), st.randoms())
def test_rows_of_a_batch_do_not_depend_on_their_order(case, random):
    inputs = make_inputs(case)
    order = list(range(case.batch))
    random.shuffle(order)
    tensors = {name: x if x.dim() < 3 else x[order] for name, x in parts(inputs).items()}
    visible = {
        name: tuple(t[order] for t in x) if isinstance(x, tuple) else x[order] if isinstance(x, torch.Tensor) else x
        for name, x in inputs.visible.items()
    }
    for impl in IMPLS:
        straight = call(parts(inputs), inputs.visible, impl)
        torch.testing.assert_close(call(tensors, visible, impl), straight[order], rtol=1e-12, atol=1e-12)


@law
@given(cases(("causal", "causal+window", "causal+padding", "causal+segments"), square=True), st.data())
def test_decoding_step_by_step_equals_one_forward(case, data):
    inputs = make_inputs(case)
    tensors = parts(inputs)
    chunk = data.draw(st.integers(1, 5))
    start = data.draw(st.integers(0, case.keys - 1))
    for impl in IMPLS:
        whole = call(tensors, inputs.visible, impl)
        for first in range(start, min(start + 3 * chunk, case.keys), chunk):
            last = min(first + chunk, case.keys)
            step = {
                name: x if x.dim() < 3 else x[:, :, :last] if name in ("key", "value") else x[:, :, first:last]
                for name, x in tensors.items()
            }
            visible = dict(inputs.visible)
            if "mask" in visible:
                visible["mask"] = visible["mask"][:, :last]
            if "segment_ids" in visible:
                ids = visible["segment_ids"][0]
                visible["segment_ids"] = (ids[:, first:last], ids[:, :last])
            torch.testing.assert_close(call(step, visible, impl), whole[:, :, first:last], **TIGHT)


@law
@given(cases(("full", "causal", "mask", "head_mask"), square=True))
def test_alpha_one_and_beta_zero_is_pytorchs_attention(case):
    inputs = make_inputs(case)
    query, key, value = (inputs.tensors[name] for name in ("query", "key", "value"))
    mask = inputs.visible.get("mask")
    if mask is not None:
        mask[..., 0] = True
    repeats = case.heads // case.groups
    expected = F.scaled_dot_product_attention(
        query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), attn_mask=mask,
        is_causal=inputs.visible.get("is_causal", False),
    )  # fmt: skip
    ones = torch.ones(query.shape[:3], dtype=query.dtype)
    for impl in IMPLS:
        out = attention(query, key, value, alpha=ones, beta=ones * 0, **inputs.visible, impl=impl)
        torch.testing.assert_close(out, expected, **TIGHT)


@law
@given(cases())
def test_a_sink_of_minus_infinity_is_softmax_and_of_zero_off_by_one(case):
    inputs = make_inputs(case)
    tensors = parts(inputs)
    tensors.pop("sink", None)
    heads = torch.zeros(case.heads, dtype=torch.float64)
    for impl in IMPLS:
        softmax = call(tensors, inputs.visible, impl)
        torch.testing.assert_close(call(tensors | {"sink": heads - torch.inf}, inputs.visible, impl), softmax, **TIGHT)
    scores = tensors["query"] @ tensors["key"].repeat_interleave(case.heads // case.groups, 1).mT / case.dim**0.5
    visible = attention_weights(tensors["query"], tensors["key"], **inputs.visible) > 0
    exp = torch.exp(scores) * visible
    weights = attention_weights(tensors["query"], tensors["key"], sink=heads, **inputs.visible)
    torch.testing.assert_close(weights, exp / (exp.sum(-1, keepdim=True) + 1), **TIGHT)


@law
@given(cases())
def test_grouped_heads_equal_repeated_heads(case):
    inputs = make_inputs(case)
    tensors = parts(inputs)
    repeats = case.heads // case.groups
    repeated = tensors | {name: tensors[name].repeat_interleave(repeats, 1) for name in ("key", "value")}
    for impl in IMPLS:
        torch.testing.assert_close(call(repeated, inputs.visible, impl), call(tensors, inputs.visible, impl), **TIGHT)


@law
@given(cases(("causal+padding", "mask", "causal+window+segments+padding")))
def test_a_row_that_sees_no_key_is_zero_with_zero_gradients(case):
    inputs = make_inputs(case)
    leaves = parts(inputs, grad=True)
    nothing = count_visible_keys(leaves["query"], leaves["key"], **inputs.visible) == 0
    nothing = nothing.expand(case.batch, case.heads, case.queries)
    for impl in IMPLS:
        out = call(leaves, inputs.visible, impl)
        assert torch.equal(out[nothing], torch.zeros_like(out[nothing]))
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad_out)
        for name, grad in zip(leaves, grads, strict=True):
            assert torch.isfinite(grad).all(), name
            if grad.shape[:3] == nothing.shape and name not in ("key", "value"):
                assert torch.equal(grad[nothing], torch.zeros_like(grad[nothing])), name
