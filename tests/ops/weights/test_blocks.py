"""Attention with other weight functions: formulas, gradients, accuracy, and the properties of the operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from affine_attention import attention, attention_weights, decode_attention, explain
from affine_attention.ops.validation import check_visibility
from affine_attention.ops.weights import FUNCTIONS, NAMES
from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratio, make_inputs

from .formulas import FORMULAS, plain_attention

EXACT = {"rtol": 1e-9, "atol": 1e-9}
IMPLS = ("reference", "composed")
KINDS = ("full", "causal", "causal+window", "causal+segments", "causal+padding", "mask", "causal+head_mask")
names = pytest.mark.parametrize("name", FUNCTIONS)


def inputs_of(visibility="causal", mechanism="affine_gated", **changes):
    """Inputs of a small case, with the tensors that the mechanism has."""
    inputs = make_inputs(Case(mechanism, visibility, **({"dtype": torch.float64} | changes)))
    return {n: x for n, x in inputs.tensors.items() if x is not None}, inputs.visible, inputs.grad_out


def with_gradients(function, tensors, grad_out):
    leaves = {n: x.detach().clone().requires_grad_() for n, x in tensors.items()}
    out = function(leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def mask_of(tensors, visible):
    options = {"mask": None, "is_causal": False, "window": None, "segment_ids": None} | visible
    return check_visibility(tensors["query"], tensors["key"], **options).dense()


def test_every_function_has_a_formula_and_a_source():
    assert set(FORMULAS) == set(FUNCTIONS)
    assert all("arXiv" in each.source for each in FUNCTIONS.values())


@names
@pytest.mark.parametrize("visibility", KINDS)
def test_equals_the_formula_of_its_source_in_fp64(name, visibility):
    tensors, visible, grad_out = inputs_of(visibility, queries=9, keys=11, dim=6)
    seen = mask_of(tensors, visible)
    expected = with_gradients(lambda x: plain_attention(name, x, seen, 0.7), tensors, grad_out)
    for impl in IMPLS:
        found = with_gradients(
            lambda x, impl=impl: attention(**x, **visible, softmax_scale=0.7, weights=name, impl=impl),
            tensors,
            grad_out,
        )
        for each in expected:
            torch.testing.assert_close(found[each], expected[each], **EXACT, msg=lambda m, n=each: f"{n}: {m}")


def test_softplus_of_normalised_queries_and_keys_is_the_papers():
    query, key, value = (torch.randn(1, 2, 9, 16, dtype=torch.float64) for _ in range(3))
    counts = torch.arange(1, 10, dtype=torch.float64)[:, None]
    cosines = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    a = F.softplus(torch.log(torch.tensor(16.0)) * torch.log(counts) * cosines).tril()
    a = a / a.sum(-1, keepdim=True)
    offset = (counts > 3).double()
    a = torch.relu(a * counts - offset) ** 15
    expected = a / a.sum(-1, keepdim=True) @ value
    scale = float(torch.log(torch.tensor(16.0)))
    found = attention(F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, weights="softplus",
                      softmax_scale=scale, is_causal=True)  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@names
@pytest.mark.parametrize("visibility", ["causal", "causal+window+segments+padding", "head_mask"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (130, 257), (257, 130), (1, 40), (0, 5), (5, 0)])
def test_blocks_equal_the_reference_in_fp64(name, visibility, queries, keys):
    tensors, visible, grad_out = inputs_of(visibility, queries=queries, keys=keys, batch=1, dim=8)
    found, expected = (
        with_gradients(lambda x, i=impl: attention(**x, **visible, weights=name, impl=i), tensors, grad_out)
        for impl in ("composed", "reference")
    )
    for each in expected:
        torch.testing.assert_close(found[each], expected[each], **EXACT, msg=lambda m, n=each: f"{n}: {m}")


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_plain_pytorch(name, dtype):
    tensors, visible, grad_out = inputs_of("causal", batch=1, queries=65, keys=65, dtype=dtype)
    seen = mask_of(tensors, visible)
    wide = {n: x.double() for n, x in tensors.items()}
    truth = with_gradients(lambda x: plain_attention(name, x, seen, 0.25), wide, grad_out)
    plain = with_gradients(lambda x: plain_attention(name, x, seen, 0.25), tensors, grad_out)
    found = with_gradients(lambda x: attention(**x, **visible, weights=name), tensors, grad_out)
    for each, expected in truth.items():
        ratio = error_ratio(found[each], [plain[each], plain[each]], expected)
        assert ratio <= MAX_ERROR_RATIO, f"{each}: {ratio:.2f}"


@names
@pytest.mark.parametrize("visibility", ["causal", "segments+padding"])
def test_gradcheck(name, visibility):
    tensors, visible, _ = inputs_of(visibility, batch=1, heads=2, groups=1, queries=5, keys=7, dim=3)
    keys = list(tensors)

    def call(*leaves):
        return attention(**dict(zip(keys, leaves, strict=True)), **visible, weights=name)

    assert torch.autograd.gradcheck(call, tuple(x.clone().requires_grad_() for x in tensors.values()))


@names
@pytest.mark.parametrize("impl", IMPLS)
def test_later_positions_do_not_change_an_output(name, impl):
    tensors, visible, _ = inputs_of("causal", queries=140, keys=140)
    changed = {n: x.clone() for n, x in tensors.items()}
    for x in changed.values():
        x[:, :, 77:] = x[:, :, 77:] * -3 + 7
    before, after = (attention(**x, **visible, weights=name, impl=impl) for x in (tensors, changed))
    assert torch.equal(before[:, :, :77], after[:, :, :77])


@names
def test_packed_documents_are_independent_and_equal_each_alone(name):
    tensors, _, grad_out = inputs_of("causal", batch=1, queries=40, keys=40)
    ids = (torch.arange(40) >= 17).long()[None]
    packed = attention(**tensors, is_causal=True, segment_ids=ids, weights=name)
    for rows in (slice(0, 17), slice(17, 40)):
        alone = attention(**{n: x[:, :, rows] for n, x in tensors.items()}, is_causal=True, weights=name)
        torch.testing.assert_close(packed[:, :, rows], alone, **EXACT)
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    out = attention(**leaves, is_causal=True, segment_ids=ids, weights=name)
    for grad in torch.autograd.grad((out * grad_out)[:, :, :17].sum(), [leaves["key"], leaves["value"]]):
        assert not grad[:, :, 17:].any()


@names
def test_batch_and_padding_do_not_matter(name):
    tensors, _, _ = inputs_of("causal", queries=30, keys=30)
    both = attention(**tensors, is_causal=True, weights=name)
    alone = attention(**{n: x[1:] for n, x in tensors.items()}, is_causal=True, weights=name)
    torch.testing.assert_close(both[1:], alone, rtol=1e-12, atol=1e-12)
    padded = {n: F.pad(x, (0, 0, 6, 0) if x.dim() == 4 else (6, 0), value=5.0) for n, x in tensors.items()}
    mask = torch.arange(36).expand(2, 36) >= 6
    found = attention(**padded, is_causal=True, mask=mask, weights=name)
    torch.testing.assert_close(found[:, :, 6:], both, **EXACT)
    assert not found[:, :, :6].any()


@names
@pytest.mark.parametrize("chunk", [1, 4])
def test_decoding_equals_one_forward(name, chunk):
    tensors, _, _ = inputs_of("causal", queries=20, keys=20)
    whole = attention(**tensors, is_causal=True, weights=name)
    step = {n: x if n in ("key", "value") else x[:, :, 12 : 12 + chunk] for n, x in tensors.items()}
    lengths = torch.tensor([12 + chunk] * 2)
    found = decode_attention(**step, lengths=lengths, weights=name)
    torch.testing.assert_close(found, whole[:, :, 12 : 12 + chunk], **EXACT)
    last = {n: x if n in ("key", "value") else x[:, :, -chunk:] for n, x in tensors.items()}
    torch.testing.assert_close(decode_attention(**last, weights=name), whole[:, :, -chunk:], **EXACT)


@names
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_invisible_keys_and_empty_rows_have_no_effect(name, impl, bad):
    tensors, _, grad_out = inputs_of("causal", queries=30, keys=30)
    mask = (torch.arange(30).expand(2, 30) >= 5) & (torch.arange(30) < 25)
    results = []
    for filling in (1.0, bad):
        given = {n: x.clone() for n, x in tensors.items()}
        for each in ("key", "value"):
            given[each][:, :, :5] = given[each][:, :, 25:] = filling
        for each in ("query", "alpha", "beta", "gate"):
            given[each][:, :, :5] = filling
        results.append(with_gradients(
            lambda x: attention(**x, is_causal=True, mask=mask, weights=name, impl=impl), given, grad_out))  # fmt: skip
    assert not results[1]["out"][:, :, :5].any()
    for each in results[0]:
        torch.testing.assert_close(results[1][each], results[0][each], rtol=1e-12, atol=1e-12)


@names
def test_a_nonfinite_value_reaches_the_rows_that_see_it(name):
    tensors, _, _ = inputs_of("causal", mechanism="affine", queries=30, keys=30)
    tensors["value"][0, 0, 21] = torch.nan
    out = attention(**tensors, is_causal=True, weights=name)
    assert out[0, 0].isnan().all(-1).tolist() == [row >= 21 for row in range(30)]
    assert out[1].isfinite().all()


@names
def test_grouped_heads_equal_repeated_heads(name):
    tensors, visible, _ = inputs_of("causal+head_mask", queries=20, keys=20)
    repeated = tensors | {n: tensors[n].repeat_interleave(2, 1) for n in ("key", "value")}
    outs = [attention(**x, **visible, weights=name) for x in (tensors, repeated)]
    torch.testing.assert_close(*outs, **EXACT)


@names
def test_weights_times_values_is_the_output(name):
    tensors, visible, _ = inputs_of("causal+padding", mechanism="affine", groups=4)
    rows = {n: tensors[n] for n in ("alpha", "beta")}
    weights = attention_weights(tensors["query"], tensors["key"], **rows, **visible, weights=name)
    torch.testing.assert_close(weights @ tensors["value"], attention(**tensors, **visible, weights=name), **EXACT)


@names
def test_exclusion_and_norm_apply_to_it(name):
    tensors, visible, grad_out = inputs_of("causal", queries=20, keys=20)
    extra = {"exclusion": torch.rand(2, 4, 20, dtype=torch.float64), "norm_weight": torch.rand(16, dtype=torch.float64)}
    found, expected = (
        with_gradients(lambda x, i=impl: attention(**x, **visible, weights=name, impl=i), tensors | extra, grad_out)
        for impl in ("composed", "reference")
    )
    for each in expected:
        torch.testing.assert_close(found[each], expected[each], rtol=1e-7, atol=1e-7)


@names
def test_compiles_into_one_graph(name):
    tensors, visible, grad_out = inputs_of("causal", dtype=torch.float32, queries=40, keys=40)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attention(**x, **visible, weights=name), fullgraph=True, backend="aot_eager")
    eager = with_gradients(lambda x: attention(**x, **visible, weights=name), tensors, grad_out)
    for each, x in with_gradients(compiled, tensors, grad_out).items():
        torch.testing.assert_close(x, eager[each])


@names
def test_meta_tensors_give_shapes(name):
    tensors, visible, _ = inputs_of("causal", dtype=torch.float32)
    leaves = {n: x.to("meta").requires_grad_() for n, x in tensors.items()}
    out = attention(**leaves, **visible, weights=name)
    assert out.is_meta
    for x, grad in zip(leaves.values(), torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        assert grad.shape == x.shape


@names
def test_no_quadratic_memory(name):
    """The weights of 8192 x 8192 pairs take 256 MiB in fp32."""
    from benchmarks.measure import peak_memory

    tensors, visible, grad_out = inputs_of("causal", "affine", batch=1, heads=1, groups=1, queries=8192, keys=8192,
                                           dim=16, dtype=torch.float32)  # fmt: skip
    peak = peak_memory(lambda: with_gradients(lambda x: attention(**x, **visible, weights=name), tensors, grad_out))
    assert peak < 100 * 2**20, f"{peak / 2**20:.0f} MiB"


def test_names_and_refusals():
    tensors, visible, _ = inputs_of("causal", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weights must be one of 'softmax', 'signed'.*did you mean 'sigmoid'"):
        attention(**tensors, **visible, weights="sigmoids")
    for function in (attention, explain):
        with pytest.raises(ValueError, match=r"sink must be None with weights='sigmoid', got a tensor of shape \[4\]"):
            function(**tensors, **visible, sink=torch.zeros(4), weights="sigmoid")
    with pytest.raises(ValueError, match="sink must be None with weights='signed'"):
        attention_weights(tensors["query"], tensors["key"], sink=torch.zeros(4), weights="signed")
    with pytest.raises(ValueError, match='impl="fused" needs a CUDA GPU'):
        attention(**tensors, **visible, weights="signed", impl="fused")
    assert NAMES == ("softmax", "signed", "sigmoid", "softplus", "normalized")


def test_negative_alpha_makes_a_difference_of_two_maps():
    """Differential attention: the difference of two softmax maps is two calls, the second with a negative alpha."""
    tensors, _, _ = inputs_of("causal", mechanism="softmax", queries=20, keys=20, groups=4)
    other = {n: torch.randn_like(tensors[n]) for n in ("query", "key")}
    factor = torch.rand(2, 4, 20, dtype=torch.float64)
    maps = [attention_weights(x["query"], x["key"], is_causal=True) for x in (tensors, other)]
    expected = (maps[0] - factor[..., None] * maps[1]) @ tensors["value"]
    first = attention(**tensors, is_causal=True)
    second = attention(**(tensors | other), alpha=-factor, is_causal=True)
    torch.testing.assert_close(first + second, expected, **EXACT)
