"""alpha, beta and their gradients from one launch each, against PyTorch's formula: interpreted, and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.nn import scaling
from affine_attention.nn.coefficients import ALPHA_RULES
from affine_attention.nn.scaling import AffineScale, _CollectAlpha

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attention.ops.fused import coefficients  # noqa: E402
from affine_attention.ops.fused.coefficients import fused_coefficients  # noqa: E402

from ...interpreter import run_in_the_interpreter  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
outside = pytest.mark.skipif(INTERPRETED, reason="starts a process of its own")
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])  # the interpreter truncates to bf16
# PyTorch divides by a Python number exactly on the CPU; on a GPU it multiplies by the reciprocal, exact for 2^n.
DIVISORS = [2048, 7] if INTERPRETED else [2048, 64]
SHAPES = [(2, 33, 4), (1, 1, 9), (3, 200, 12), (1, 700, 1), (2, 5, 40)]
EPS32 = torch.finfo(torch.float32).eps


def make(shape, dtype, seed=0):
    """Scores with both sides of the clipping in them, a running average and gradients of alpha and beta."""
    generator = torch.Generator().manual_seed(seed)
    batch, length, heads = shape
    scores = (6 * torch.randn(shape, generator=generator)).to(dtype)
    running_alpha = torch.rand(heads, generator=generator)
    grads = [torch.randn(batch, heads, length, generator=generator) for _ in range(2)]
    return scores.to(DEVICE), running_alpha.to(DEVICE), [grad.to(DEVICE) for grad in grads]


def formula(scores, activation, running_alpha=None, divisor=None, token_mask=None, collected=None):
    """PyTorch's operations, as AffineScale runs them without the kernels."""
    alpha = ALPHA_RULES[activation].function(scores.float(), 0.5)
    if collected is not None:
        alpha = _CollectAlpha.apply(alpha, token_mask, collected)
    alpha = alpha.transpose(1, 2)
    return alpha, None if running_alpha is None else (running_alpha[:, None] - alpha) / divisor


def both(scores, activation, running_alpha, divisor, grads, token_mask=None):
    """(alpha, beta, gradient of scores, gradient of collected) of the kernels and of the formula."""
    results = []
    for function in (fused_coefficients, formula):
        leaf = scores.detach().requires_grad_()
        collected = torch.zeros(scores.shape[2] + 1, dtype=torch.float64, device=scores.device, requires_grad=True)
        alpha, beta = function(leaf, activation, running_alpha, divisor, token_mask, collected)
        outputs = [x for x in (alpha, beta) if x is not None]
        torch.autograd.backward(outputs, grads[: len(outputs)])
        results.append((alpha.detach(), None if beta is None else beta.detach(), leaf.grad, collected.grad))
    return results


def assert_same(mine, right, activation, dtype):
    """Bitwise for linear clipping; exp is rounded differently, so a sigmoid may differ by a few units in the last."""
    for index, (x, y) in enumerate(zip(mine, right, strict=True)):
        if y is None:
            assert x is None
            continue
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if index == 3:  # fp64 sums, in another order; each sigmoid in them may differ by a few units of 1
            linear = activation == "linear_clipping"
            torch.testing.assert_close(x, y, rtol=1e-12 if linear else 4 * EPS32, atol=0 if linear else 4 * EPS32)
        elif activation == "linear_clipping":
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            eps = torch.finfo(dtype).eps if index == 2 else EPS32
            torch.testing.assert_close(x, y, rtol=4 * eps, atol=4 * EPS32)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["linear_clipping", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape, activation, dtype):
    scores, running_alpha, grads = make(shape, dtype)
    for divisor in DIVISORS:
        mine, right = both(scores, activation, running_alpha, divisor, grads)
        assert_same(mine, right, activation, dtype)
        assert mine[0].is_contiguous()
        assert mine[1].is_contiguous()
    mine, right = both(scores, activation, None, None, grads)
    assert_same(mine, right, activation, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_on_the_boundaries_of_the_clipping_are_those_of_torch(dtype):
    edges = [-5.0, 5.0, 0.0, -5.03125, 5.03125, -4.96875, 4.96875, torch.inf, -torch.inf, torch.nan, 1e4, -1e4]
    scores = torch.tensor(edges, device=DEVICE).to(dtype).view(1, 3, 4)
    grads = [torch.randn(1, 4, 3, device=DEVICE) for _ in range(2)]
    mine, right = both(scores, "linear_clipping", torch.rand(4, device=DEVICE), 64, grads)
    assert_same(mine[:3], right[:3], "linear_clipping", dtype)
    flat = mine[2].flatten()
    assert (flat[[0, 1]] != 0).all(), "alpha of exactly 0 and 1 has a gradient"
    assert not flat[[3, 4]].any()
    assert mine[3].isnan().any()


@needs_triton
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_any_strides(layout):
    shape = (2, 21, 6)
    scores, running_alpha, grads = make(shape, torch.float32)
    if layout == "transposed":
        scores = scores.transpose(1, 2).contiguous().transpose(1, 2)
        grads = [grad.transpose(0, 2).contiguous().transpose(0, 2) for grad in grads]
    elif layout == "sliced":
        scores = torch.cat([scores, scores], 2)[:, :, 3:9]
        grads = [torch.cat([grad, grad], 2)[:, :, ::2] for grad in grads]
    else:
        scores = scores[:1, :1].expand(shape)
        grads = [grad[:, :1, :1].expand(2, 6, 21) for grad in grads]  # what .sum().backward() gives
    mine, right = both(scores, "linear_clipping", running_alpha, 64, grads)
    assert_same(mine, right, "linear_clipping", torch.float32)


@needs_triton
def test_padding_is_replaced_and_not_counted():
    scores, running_alpha, grads = make((3, 40, 5), torch.float32)
    mask = torch.rand(3, 80, device=DEVICE)[:, 40:] < 0.6
    mask[2] = False
    scores[~mask] = torch.nan
    mine, right = both(scores, "linear_clipping", running_alpha, 64, grads, mask)
    assert_same(mine, right, "linear_clipping", torch.float32)
    assert mine[3][-1] == mask.sum()
    assert mine[3].isfinite().all()


@needs_triton
@pytest.mark.parametrize("which", ["alpha", "beta"])
def test_one_of_two_gradients(which):
    scores, running_alpha, grads = make((2, 9, 3), torch.float32)
    results = []
    for function in (fused_coefficients, formula):
        leaf = scores.clone().requires_grad_()
        alpha, beta = function(leaf, "linear_clipping", running_alpha, 64)
        (alpha if which == "alpha" else beta).backward(grads[0])
        results.append(leaf.grad)
    assert torch.equal(*results)


@needs_triton
def test_frozen_scores_are_still_collected():
    scores, running_alpha, _ = make((2, 9, 3), torch.float32)
    collected = torch.zeros(4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    alpha, beta = fused_coefficients(scores, "sigmoid", running_alpha, 64, None, collected)
    (alpha * beta).sum().backward()
    assert collected.grad[-1] == 18
    torch.testing.assert_close(collected.grad[:-1], torch.sigmoid(scores).sum((0, 1), dtype=torch.float64))


@needs_triton
def test_without_gradients_nothing_is_saved():
    scores, running_alpha, _ = make((1, 4, 3), torch.float32)
    with torch.no_grad():
        alpha, beta = fused_coefficients(scores.requires_grad_(), "linear_clipping", running_alpha, 64)
    assert not alpha.requires_grad
    assert beta.grad_fn is None


@needs_triton
def test_one_launch_each_way(monkeypatch):
    launched = []
    launch = coefficients._launch

    def count(kernel, *rest):
        launched.append(kernel)
        launch(kernel, *rest)

    monkeypatch.setattr(coefficients, "_launch", count)
    scores, running_alpha, grads = make((2, 300, 4), torch.float32)
    collected = torch.zeros(5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    outputs = fused_coefficients(scores.requires_grad_(), "linear_clipping", running_alpha, 64, None, collected)
    torch.autograd.backward(outputs, grads)
    assert launched == [coefficients.coefficients_kernel, coefficients.coefficients_backward_kernel]


class OtherLinear(nn.Linear):
    """A linear layer with a forward of its own: projection.py leaves it to the kernels here."""

    def forward(self, x):
        return super().forward(x)


class Layer(nn.Module):
    """AffineScale with another projection, in activation checkpoints or not."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale = AffineScale(Mechanism.named("affine", running_alpha_start=0.3), 16, 4)
        self.scale.proj = OtherLinear(16, 4, bias=False)
        nn.init.normal_(self.scale.proj.weight, std=1.0)
        self.checkpointed = checkpointed

    def forward(self, hidden, mask=None):
        if self.checkpointed:
            return torch.utils.checkpoint.checkpoint(self.scale, hidden, 64, mask, use_reentrant=False)
        return self.scale(hidden, 64, mask)


def train(layer, use_kernels, monkeypatch, parts=1):
    """Runs one step; returns (alpha, beta, gradients, running average)."""
    monkeypatch.setattr(scaling, "_can_fuse", lambda scores: use_kernels)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 50, 16, generator=generator).to(DEVICE).requires_grad_()
    mask = (torch.rand(4, 50, generator=generator) < 0.7).to(DEVICE)
    outputs = []
    for x, m in zip(hidden.chunk(parts), mask.chunk(parts), strict=True):
        alpha, beta = layer(x, m)
        (alpha * torch.arange(50, device=DEVICE) + 30 * beta.sin()).sum().backward()
        outputs.append((alpha, beta))
    commit_running_alpha(layer)
    alpha, beta = (torch.cat(x).detach() for x in zip(*outputs, strict=True))
    return alpha, beta, layer.scale.proj.weight.grad, hidden.grad, layer.scale.running_alpha


@needs_triton
def test_the_module_with_and_without_the_kernels(monkeypatch):
    mine, right = (train(Layer().to(DEVICE), use, monkeypatch) for use in (True, False))
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert torch.equal(mine[0], right[0])
    assert torch.equal(mine[-1], right[-1])


@needs_triton
def test_checkpointing_is_bitwise_the_same(monkeypatch):
    plain, checkpointed = (train(Layer(x).to(DEVICE), True, monkeypatch) for x in (False, True))
    for x, y in zip(plain, checkpointed, strict=True):
        assert torch.equal(x, y)


@needs_triton
def test_micro_batches_equal_one_batch(monkeypatch):
    whole, split = (train(Layer().to(DEVICE), True, monkeypatch, parts)[-1] for parts in (1, 4))
    torch.testing.assert_close(whole, split, rtol=1e-6, atol=1e-7)


@needs_triton
def test_which_calls_take_the_kernels():
    x = torch.zeros(1, 2, 3, device=DEVICE)
    assert scaling._can_fuse(x)
    assert scaling._can_fuse(x.bfloat16())
    assert not scaling._can_fuse(x.double())
    assert not scaling._can_fuse(x[:, :0])
    scale = AffineScale(Mechanism.named("affine"), 16, 4).to(DEVICE)
    scale.proj = OtherLinear(16, 4, bias=False, device=DEVICE)
    hidden = torch.randn(2, 3, 16, device=DEVICE)
    assert "_Coefficients" in type(scale(hidden, 64)[0].grad_fn).__name__
    by_row, _ = scale(hidden, torch.full((2, 1, 3), 64, device=DEVICE))
    assert "_Coefficients" not in type(by_row.grad_fn).__name__, "a divisor per query takes the formula"


@needs_triton
def test_words_for_wrong_calls():
    x = torch.zeros(1, 2, 3, device=DEVICE)
    with pytest.raises(ValueError, match="activation must be one of 'linear_clipping', 'sigmoid', got 'relu'"):
        fused_coefficients(x, "relu")
    with pytest.raises(ValueError, match="divisor is missing"):
        fused_coefficients(x, "sigmoid", torch.zeros(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"token_mask must have shape \[B, T\] = \[1, 2\], got \[1, 5\]"):
        fused_coefficients(x, "sigmoid", token_mask=torch.ones(1, 5, dtype=torch.bool, device=DEVICE))


@needs_triton
def test_a_second_backward_is_an_error():
    scores = torch.zeros(1, 2, 3, device=DEVICE, requires_grad=True)
    alpha, _ = fused_coefficients(scores, "sigmoid")
    (grad,) = torch.autograd.grad(alpha.square().sum(), [scores], create_graph=True)
    torch.testing.assert_close(grad, torch.full_like(grad, 0.25))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@outside
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("activation", ["linear_clipping", "sigmoid"])
def test_compiles_for_gpus_that_are_not_here(capability, activation):
    constants = {"NUM_HEADS": 9, "BLOCK_T": 128, "BLOCK_H": 16, "SIGMOID": activation == "sigmoid"}
    types = {"scores": "*bf16", "grad_scores": "*bf16", "token_mask": "*i8", "partial": "*fp64", "divisor": "fp32",
             **dict.fromkeys(("alpha", "beta", "running_alpha", "grad_alpha", "grad_beta"), "*fp32")}  # fmt: skip
    options = {"num_warps": coefficients.NUM_WARPS, "enable_fp_fusion": False}
    for kernel in (coefficients.coefficients_kernel, coefficients.coefficients_backward_kernel):
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
        values = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
        source = ASTSource(kernel, signature, constexprs=values)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert "cubin" in compiled.asm
        if activation == "linear_clipping":
            assert "fma.rn.f32" not in compiled.asm["ptx"], "0.1 * score + 0.5 must round twice, as in PyTorch"


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
