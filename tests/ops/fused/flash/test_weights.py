"""Signed and sigmoid weights on the flash kernels against fp64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from affine_attention import attention, explain
from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratio, make_inputs

from ....interpreter import run_in_the_interpreter

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
outside = pytest.mark.skipif(INTERPRETED, reason="starts its own process")
names = pytest.mark.parametrize("name", ["signed", "sigmoid"])
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


def inputs_of(visibility, mechanism="affine_gated", **changes):
    inputs = make_inputs(Case(mechanism, visibility, **({"device": DEVICE} | changes)))
    return {n: x for n, x in inputs.tensors.items() if x is not None}, inputs.visible, inputs.grad_out


def run(tensors, visible, grad_out, **options):
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    out = attention(**leaves, **visible, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype), materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def plain(name, tensors, visible, grad_out):
    """The formula with T x S weights, in the dtype of the inputs but for the weight function."""
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    query, key, value = (leaves[n] for n in ("query", "key", "value"))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    seen = attention_mask(tensors, visible)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).float()
    if name == "signed":
        size = scores.abs().masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0)
        weights = torch.sign(scores) * torch.softmax(size, -1)
    else:
        weights = torch.sigmoid(scores - torch.log(seen.sum(-1, keepdim=True).clamp(min=1)))
    weights = weights.to(query.dtype)
    if "alpha" in leaves:
        weights = weights * leaves["alpha"].to(query.dtype)[..., None]
    if "beta" in leaves:
        weights = weights + leaves["beta"].to(query.dtype)[..., None]
    out = weights.masked_fill(~seen, 0) @ value
    out = out * leaves["gate"] if "gate" in leaves else out
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def attention_mask(tensors, visible):
    from affine_attention.ops.validation import check_visibility

    options = {"mask": None, "is_causal": False, "window": None, "segment_ids": None} | visible
    return check_visibility(tensors["query"], tensors["key"], **options).dense()


@needs_triton
@names
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("visibility", "mechanism", "lengths"),
    [
        ("causal", "affine_gated", (70, 70)),
        ("causal", "softmax", (65, 65)),
        ("causal", "gated", (70, 37)),
        ("full", "affine", (37, 53)),
        ("window+segments+padding", "affine_gated", (70, 75)),
    ],
)
def test_output_and_every_gradient(name, visibility, mechanism, lengths, dtype):
    if INTERPRETED and dtype != torch.float32 and lengths != (65, 65):
        pytest.skip("fp16 in the interpreter: one case, for time")
    queries, keys = lengths
    given = inputs_of(visibility, mechanism, queries=queries, keys=keys, dtype=dtype, batch=1, heads=2, groups=1)
    found = run(*given, weights=name, impl="fused")
    wide = ({n: x.double() for n, x in given[0].items()}, given[1], given[2].double())
    truth = run(*wide, weights=name, impl="reference")
    baseline = plain(name, *given)
    for each, expected in truth.items():
        ratio = error_ratio(found[each], [baseline[each], baseline[each]], expected)
        assert ratio <= MAX_ERROR_RATIO, f"{each}: {ratio:.2f}"


@needs_triton
@names
@pytest.mark.parametrize("softmax_scale", [-0.4, 0.0])
def test_scales_that_are_not_positive(name, softmax_scale):
    given = inputs_of("causal", queries=33, keys=33, batch=1, heads=2, groups=1)
    found = run(*given, weights=name, softmax_scale=softmax_scale, impl="fused")
    wide = ({n: x.double() for n, x in given[0].items()}, given[1], given[2].double())
    expected = run(*wide, weights=name, softmax_scale=softmax_scale, impl="reference")
    for each in expected:
        torch.testing.assert_close(found[each].double(), expected[each], rtol=1e-4, atol=1e-5)


@needs_triton
@names
def test_nonfinite_padding_and_empty_rows_have_no_effect(name):
    tensors, _, grad_out = inputs_of("causal", queries=40, keys=40, batch=1, heads=2, groups=1)
    mask = (torch.arange(40, device=DEVICE) >= 9).expand(1, 40)
    clean = run(tensors, {"is_causal": True, "mask": mask}, grad_out, weights=name, impl="fused")
    for each in ("key", "value", "alpha", "beta", "gate"):
        tensors[each] = tensors[each].clone()
        tensors[each][:, :, :9] = torch.nan
    found = run(tensors, {"is_causal": True, "mask": mask}, grad_out, weights=name, impl="fused")
    assert not found["out"][:, :, :9].any()
    for each in clean:
        assert torch.equal(found[each], clean[each]), each


def with_graphs(function):
    """The function compiled in one graph, and the operators of ours that its forward and backward graphs hold."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    held = []

    def keep(graph, inputs):
        held.append([str(n.target) for n in graph.graph.nodes if str(n.target).startswith("affine_attention")])
        return make_boxed_func(graph.forward)

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)), held


@needs_triton
@names
@pytest.mark.parametrize("visibility", ["causal", "causal+window", "causal+segments", "causal+padding"])
def test_a_compiled_graph_holds_one_operator_each_for_forward_and_backward(name, visibility):
    tensors, visible, grad_out = inputs_of(visibility, queries=40, keys=40, batch=2, heads=2, groups=1)
    compiled, held = with_graphs(lambda **given: attention(**given, weights=name))
    eager = run(tensors, visible, grad_out, weights=name, impl="fused")
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    out = compiled(**leaves, **visible)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    assert held == [["affine_attention.forward.default"], ["affine_attention.backward.default"]]
    for each, found in {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}.items():
        assert torch.equal(found, eager[each]), each


@needs_triton
@names
def test_a_compiled_graph_without_gradients_and_with_any_scale(name):
    tensors, visible, _ = inputs_of("causal+window", queries=40, keys=40, batch=1, heads=2, groups=1)
    for scale in (-0.4, 0.0, 0.3):
        compiled, held = with_graphs(lambda s=scale, **given: attention(**given, weights=name, softmax_scale=s))
        expected = attention(**tensors, **visible, weights=name, softmax_scale=scale, impl="fused")
        assert torch.equal(compiled(**tensors, **visible), expected)
        assert held == [["affine_attention.forward.default"]]


@needs_triton
@names
def test_registration(name):
    tensors, _, _ = inputs_of("causal", queries=20, keys=20, batch=1, heads=2, groups=1)
    bias = torch.zeros(1, 2, 20, device=DEVICE) if name == "sigmoid" else None
    given = [tensors[n] for n in ("query", "key", "value", "alpha", "beta")]
    arguments = (*given, bias, tensors["gate"], None, None, None, True, None, 0.3, False, name)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.affine_attention.forward.default, (*arguments, True), test_utils=utils)
    out, core, lse, state = torch.ops.affine_attention.forward(*arguments, True)
    backward = (torch.ones_like(out), core, lse, state, *arguments, False)
    torch.library.opcheck(torch.ops.affine_attention.backward.default, backward, test_utils=utils)


@needs_triton
@names
def test_explain_says_which_kernels(name):
    tensors, visible, _ = inputs_of("causal", queries=20, keys=20)
    choice = explain(**tensors, **visible, weights=name)
    assert (choice.impl, choice.kernels) == ("fused", ("flash",))
    other = explain(**tensors, **visible, weights="softplus")
    assert other.impl == "composed"
    assert "has kernels for weights='softmax', 'signed', 'sigmoid', got 'softplus'" in str(other)


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
