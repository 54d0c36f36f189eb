"""Extreme but valid calls: huge windows, scales of 0 and below, empty batches, huge keys, NaN queries, empty rows.

In Triton's interpreter the same tests run on the fused kernels.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from affine_attention import attention, attention_weights, count_visible_keys, decode_attention
from affine_attention.ops import weights as weight_functions
from affine_attention.ops.fused import INTERPRETED
from affine_attention.ops.fused.plan import WEIGHTS as FUSED_WEIGHTS
from affine_attention.ops.validation import check_visibility
from affine_attention.testing import Case, make_inputs, run, run_oracle
from tests.interpreter import run_in_the_interpreter

IMPLS = ("fused",) if INTERPRETED else ("reference", "composed")
NAN, INF = float("nan"), float("inf")
WINDOWS, SCALES = [2**30, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 + 3, 2**70, 10**400], [0, -0.5, -1e-60]
HUGE = [1e38, -1e38, 3.4e38]
HEADS, GROUPS = 4, 2
if INTERPRETED:  # about a second per call
    WINDOWS, HUGE = [2**70], [1e38]
    HEADS, GROUPS = 2, 1
else:
    SCALES += [0.0, -0.0, -1, 1e-60, 1e-46, -1e-320]
NAMES = ("query", "key", "value", "alpha", "beta", "sink", "gate")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already in the interpreter")
def test_the_fused_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run_in_the_interpreter(str(Path(__file__)))


def every_input(batch=2, heads=HEADS, groups=GROUPS, queries=40, keys=40, dim=16, dtype=torch.float32, seed=0):
    """All seven tensors of a call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": draw(batch, heads, queries, dim),
        "key": draw(batch, groups, keys, dim),
        "value": draw(batch, groups, keys, dim),
        "alpha": draw(batch, heads, queries).sigmoid(),
        "beta": draw(batch, heads, queries) / keys,
        "sink": draw(heads),
        "gate": draw(batch, heads, queries, dim).sigmoid(),
    }


def with_gradients(tensors, impl, grad_out=None, **settings):
    """The output and the gradient of every tensor."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out = attention(**leaves, **settings, impl=impl)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out) if grad_out is None else grad_out)
    return {"out": out.detach(), **{f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def assert_all_close(result, truth, rtol=1e-4, atol=1e-4):
    for name, expected in truth.items():
        torch.testing.assert_close(
            result[name].double(), expected.double(), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


# Windows


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries", [7] if INTERPRETED else [33, 7])
def test_a_window_larger_than_the_call_is_no_window(window, impl, is_causal, queries):
    tensors = every_input(batch=1, queries=queries, keys=33)
    ids = torch.arange(33)[None] // 20
    for visible in ({}, {"segment_ids": (ids[:, -queries:], ids)}):
        free = attention(**tensors, **visible, is_causal=is_causal, impl=impl)
        torch.testing.assert_close(attention(**tensors, **visible, is_causal=is_causal, window=window, impl=impl), free)


@pytest.mark.parametrize("window", [2**30, 2**63 - 1, 2**63, 2**70])
def test_every_function_accepts_any_window(window):
    x = torch.randn(1, 2, 5, 8)
    assert check_visibility(x, x, mask=None, is_causal=True, window=window, segment_ids=None).window == 10
    assert count_visible_keys(x, x, is_causal=True, window=window).flatten().tolist() == [1, 2, 3, 4, 5]
    weights = attention_weights(x, x, is_causal=True)
    assert torch.equal(attention_weights(x, x, is_causal=True, window=window), weights)
    lengths = torch.tensor([4])
    free = decode_attention(x, x, x, lengths=lengths)
    assert torch.equal(decode_attention(x, x, x, lengths=lengths, window=window), free)


# Scales


@pytest.mark.parametrize("softmax_scale", SCALES)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("visibility", ["full", "causal", "causal+window", "causal+padding", "causal+segments"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_finite_scale_is_right(softmax_scale, impl, visibility, dtype):
    if impl == "fused" and (dtype == torch.float64 or visibility != "causal+window"):
        pytest.skip("the kernels need fp32, and one visibility is enough in the interpreter")
    inputs = make_inputs(Case("affine_gated", visibility, queries=19, keys=23, dtype=dtype))
    tensors = {name: x for name, x in inputs.tensors.items() if x is not None}
    settings = inputs.visible | {"softmax_scale": softmax_scale, "grad_out": inputs.grad_out}
    result = with_gradients(tensors, impl, **settings)
    wide = {name: x.double() for name, x in tensors.items()}
    truth = with_gradients(wide, "reference", **settings | {"grad_out": inputs.grad_out.double()})
    tight = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {}
    assert_all_close(result, truth, **tight)


@pytest.mark.skipif(INTERPRETED, reason="composed on the CPU")
def test_a_scale_below_zero_compiles():
    torch._dynamo.reset()
    x = torch.randn(1, 2, 9, 8)
    compiled = torch.compile(
        lambda x: attention(x, x, x, is_causal=True, softmax_scale=-0.5), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), attention(x, x, x, is_causal=True, softmax_scale=-0.5, impl="reference"))


# A batch of 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("queries", [40] if INTERPRETED else [7, 40])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "segments", "padding", "mask"])
def test_an_empty_batch_gives_an_empty_result_and_gradients(impl, queries, kind):
    visible = {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": 3},
        "segments": {"segment_ids": torch.zeros(0, queries, dtype=torch.long)},
        "padding": {"mask": torch.ones(0, queries, dtype=torch.bool)},
        "mask": {"mask": torch.ones(0, 1, queries, queries, dtype=torch.bool)},
    }[kind]
    if impl == "fused" and kind == "mask":
        pytest.skip("the kernels do not support a dense mask")
    tensors = every_input(batch=0, queries=queries, keys=queries)
    result = with_gradients(tensors, impl, **visible)
    assert result["out"].shape == tensors["query"].shape
    for name in NAMES:
        assert result[f"grad_{name}"].shape == tensors[name].shape
        assert not result[f"grad_{name}"].any()


# Huge keys that a row does not see

HIDDEN = 5


def masked_key(kind, keys=40):
    """(visibility, rows that do not see key HIDDEN)."""
    others = [row for row in range(keys) if row != HIDDEN]
    mask = (torch.arange(keys) != HIDDEN).expand(2, keys)
    return {
        "padding": ({"mask": mask}, list(range(keys))),
        "causal+padding": ({"is_causal": True, "mask": mask}, list(range(keys))),
        "mask": ({"mask": mask[:, None, None].expand(2, 1, keys, keys)}, list(range(keys))),
        "causal": ({"is_causal": True}, list(range(HIDDEN))),
        "window": ({"window": 2}, [row for row in others if abs(row - HIDDEN) >= 2]),
        "causal+window": ({"is_causal": True, "window": 2}, [row for row in others if row != HIDDEN + 1]),
        "segments": ({"segment_ids": (~mask).long()}, others),
        "causal+segments": ({"segment_ids": (~mask).long(), "is_causal": True}, others),
    }[kind]


KINDS = ("padding", "causal+padding", "mask", "causal", "window", "causal+window", "segments", "causal+segments")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softmax_scale", [None, -1.0])
def test_a_huge_key_does_not_reach_rows_that_do_not_see_it(impl, huge, kind, softmax_scale):
    if impl == "fused" and (kind == "mask" or softmax_scale):
        pytest.skip("the kernels do not support a dense mask, and one scale is enough in the interpreter")
    visible, rows = masked_key(kind)
    tensors = every_input()
    tensors["query"] *= 10
    clean = attention(**tensors, **visible, softmax_scale=softmax_scale, impl=impl)
    for name in ("key", "value"):
        tensors[name][:, :, HIDDEN] = huge
    out = attention(**tensors, **visible, softmax_scale=softmax_scale, impl=impl)
    torch.testing.assert_close(out[:, :, rows], clean[:, :, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["padding", "causal+padding", "mask", "window", "segments"])
def test_a_huge_key_that_no_row_sees_does_not_reach_the_gradients(impl, dtype, kind):
    if impl == "fused" and (kind == "mask" or dtype == torch.bfloat16):
        pytest.skip("the kernels do not support a dense mask, and one dtype is enough in the interpreter")
    tensors = every_input(queries=20, dtype=dtype)
    ids = torch.zeros(2, 40, dtype=torch.long)
    ids[:, HIDDEN] = 1
    visible = (
        {
            "window": {"is_causal": True, "window": 12},  # the first query is at key 20
            "segments": {"segment_ids": (ids[:, :1].expand(2, 20), ids)},
            "mask": {"mask": (ids == 0)[:, None, None].expand(2, 1, 20, 40)},
        }.get(kind)
        or masked_key(kind)[0]
    )
    clean = with_gradients(tensors, impl, **visible)
    for name in ("key", "value"):
        tensors[name][:, :, HIDDEN] = 1e38
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert_all_close(with_gradients(tensors, impl, **visible), clean, tolerance, tolerance)


def weighted_gradients(call, tensors, rows):
    """The output of some rows, and the gradient of every tensor for a loss over these rows."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out = call(leaves)
    weight = torch.zeros_like(out)
    weight[:, :, rows] = 1
    grads = torch.autograd.grad(out, list(leaves.values()), weight)
    return {"out": out.detach()[:, :, rows], **{f"grad_{n}": g for n, g in zip(leaves, grads, strict=True)}}


def without_reading_values(kind, huge, device, impl, compiled, dtype=torch.float32):
    """(result with a huge key and value, result without) of a call that cannot read its values first."""
    visible, rows = masked_key(kind)
    visible = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in visible.items()}
    tensors = {name: x.to(device) for name, x in every_input(dtype=dtype).items()}
    tensors["query"] *= 10

    def call(given):
        return attention(**given, **visible, impl=impl)

    clean = weighted_gradients(call, tensors, rows)
    for name in ("key", "value"):
        tensors[name][:, :, HIDDEN] = huge
    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True, backend="eager") if compiled else call  # traced, and quickly compiled
    return weighted_gradients(run, tensors, rows), clean


@pytest.mark.skipif(INTERPRETED, reason="composed on the CPU")
@pytest.mark.parametrize("kind", ["causal+padding", "mask", "causal+window", "segments"])
def test_a_huge_key_in_a_compiled_graph_does_not_reach_rows_that_do_not_see_it(kind):
    assert_all_close(*without_reading_values(kind, 1e38, "cpu", "composed", compiled=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["composed", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_huge_key_on_a_gpu_does_not_reach_rows_that_do_not_see_it(kind, impl, dtype, compiled):
    result, clean = without_reading_values(kind, 1e38, "cuda", impl, compiled, dtype)
    if impl == "auto" and kind not in ("padding", "causal+padding", "mask"):
        clean = {"out": clean["out"]}  # some row sees the key; in the fused kernels its overflow reaches the gradients
    tolerance = 1e-2 if dtype == torch.float32 else 0.1
    assert_all_close(result, clean, tolerance, tolerance)


@pytest.mark.skipif(INTERPRETED, reason="composed on the CPU")
def test_a_key_that_may_overflow_is_nan_in_the_rows_of_a_graph_that_see_it():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: attention(q, k, k, is_causal=True), fullgraph=True, backend="aot_eager")
    key = torch.randn(1, 2, 9, 8)
    for size, rows in ((2.0**79, []), (2.0**81, [5, 6, 7, 8])):
        key[0, 1, 5, 3] = size
        assert compiled(torch.randn(1, 2, 9, 8), key).isnan().all(-1).nonzero().tolist() == [
            [0, 1, row] for row in rows
        ]


# NaN queries


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("keys", [*range(1, 10), 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_nan_query_is_nan_in_exactly_its_row(impl, keys, dtype):
    if impl == "fused" and (dtype != torch.float32 or keys != 3):
        pytest.skip("one dtype and one length are enough in the interpreter")
    tensors = every_input(queries=7, keys=keys, dtype=dtype)
    tensors["query"][1, 1, 6, 3] = NAN
    expected = torch.zeros(2, HEADS, 7, 16, dtype=torch.bool)
    expected[1, 1, 6] = True
    ids = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, keys, dtype=torch.long)
    padding = {"mask": torch.ones(2, keys, dtype=torch.bool)}
    for visible in ({}, {"is_causal": True}, {"is_causal": True, "window": 2}, {"segment_ids": ids}, padding):
        for sink in (tensors["sink"],) if INTERPRETED else (tensors["sink"], None):
            out = attention(**tensors | {"sink": sink}, **visible, impl=impl)
            assert torch.equal(out.isnan(), expected), visible


@pytest.mark.skipif(INTERPRETED, reason="composed on the CPU")
def test_a_nan_query_is_nan_in_a_compiled_graph_too():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: attention(q, k, k, is_causal=True), fullgraph=True, backend="aot_eager")
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    query[0, 1, 1] = NAN
    assert compiled(query, key).isnan().all(-1).nonzero().tolist() == [[0, 1, 1]]


# Rows that see no key


EMPTY_KINDS = ["padding", "short", "window", "segments", "mask", "no keys"]


def with_empty_rows(kind):
    """The number of keys, the visibility and the rows that see no key, of a call with 40 queries."""
    empty = 3
    keys = {"short": 37, "window": 20, "no keys": 0}.get(kind, 40)
    first = torch.arange(40) < empty
    visible = {
        "padding": {"is_causal": True, "mask": (~first).expand(2, 40)},
        "short": {"is_causal": True},
        "window": {"window": 18},  # the first query is at position -20
        "segments": {"segment_ids": (first.long().expand(2, 40), torch.zeros(2, 40, dtype=torch.long))},
        "mask": {"mask": (~first)[:, None].expand(2, 1, 40, 40)},
        "no keys": {},
    }[kind]
    return keys, visible, slice(0, 40 if kind == "no keys" else empty)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", EMPTY_KINDS[:4] if INTERPRETED else EMPTY_KINDS)
@pytest.mark.parametrize("weights", FUSED_WEIGHTS if INTERPRETED else weight_functions.NAMES)
@pytest.mark.parametrize("broken", ["query", "alpha", *(() if INTERPRETED else ("beta", "gate"))])
def test_a_broken_row_that_sees_no_key_changes_nothing(impl, kind, weights, broken):
    keys, visible, rows = with_empty_rows(kind)
    names = ("query", "key", "value", *(() if broken == "query" else (broken,)))
    tensors = {name: x for name, x in every_input(keys=keys).items() if name in names}
    grad_out = torch.randn(2, HEADS, 40, 16)
    clean = with_gradients(tensors, impl, grad_out, **visible, weights=weights)
    tensors[broken][:, :, rows] = NAN
    found = with_gradients(tensors, impl, grad_out, **visible, weights=weights)
    for name, expected in clean.items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "fused"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", EMPTY_KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_see_no_key_are_zero_whatever_their_coefficients(impl, bad, kind, compiled):
    if compiled and (impl != "composed" or not math.isnan(bad)):
        pytest.skip("one compiled run of each kind is enough")
    keys, visible, rows = with_empty_rows(kind)
    tensors = every_input(keys=keys)
    tensors["sink"] = torch.randn(2, HEADS, 40)
    grad_out = torch.randn(2, HEADS, 40, 16)
    clean = with_gradients(tensors, impl, grad_out, **visible)
    for name in ("query", "alpha", "beta", "sink", "gate"):
        tensors[name][:, :, rows] = bad
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(lambda given: attention(**given, **visible), fullgraph=True, backend="aot_eager")
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        out = call(leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
        result = {"out": out, **{f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}}
    else:
        result = with_gradients(tensors, impl, grad_out, **visible)
    assert_all_close(result, clean)
    for name in ("out", "grad_query", "grad_alpha", "grad_beta", "grad_sink", "grad_gate"):
        assert not result[name][:, :, rows].any(), f"{name} must be exactly 0"


@pytest.mark.skipif(INTERPRETED, reason="only the reference has weights")
def test_weights_of_rows_that_see_no_key_are_zero():
    x = torch.randn(1, 2, 5, 8)
    bad = torch.full((1, 2, 5), NAN)
    mask = torch.zeros(1, 5, dtype=torch.bool)
    assert not attention_weights(x * NAN, x, alpha=bad, beta=bad, mask=mask).any()


# Meta tensors


@pytest.mark.skipif(INTERPRETED, reason="the kernels need memory")
@pytest.mark.parametrize("visibility", ["full", "causal", "causal+window", "causal+segments+padding", "mask"])
@pytest.mark.parametrize("impl", ["auto", "reference", "composed"])
def test_meta_tensors_give_shapes_forward_and_backward(visibility, impl):
    inputs = make_inputs(Case("affine_gated", visibility))
    leaves = {n: x.to("meta").requires_grad_() for n, x in inputs.tensors.items() if x is not None}

    def to_meta(x):
        if isinstance(x, tuple):
            return tuple(map(to_meta, x))
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    visible = {name: to_meta(x) for name, x in inputs.visible.items()}
    with torch.autocast("cpu", enabled=False):
        out = attention(**leaves, **visible, impl=impl)
    assert out.device.type == "meta"
    assert out.shape == leaves["query"].shape
    for x, grad in zip(leaves.values(), torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        assert grad.shape == x.shape


@pytest.mark.skipif(INTERPRETED, reason="compares composed with the oracle")
def test_ordinary_calls_equal_the_oracle():
    inputs = make_inputs(Case("affine_gated", "causal+padding", dtype=torch.float64))
    assert_all_close(run(inputs, "composed"), run_oracle(inputs), 1e-10, 1e-10)
