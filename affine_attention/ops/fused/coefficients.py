"""Turns the scores of W_a into alpha and beta (Eq. 7 and 8) in one launch, and their gradients back in one launch.

PyTorch runs about ten small kernels forward and as many backward for the same numbers, and in eager mode the host needs
longer to launch them than the GPU to run them. The backward also sums alpha over real tokens for the running average
(Eq. 9), without atomics: every program writes its own partial sums, so equal inputs give bitwise equal sums.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import on_device
from .shared.launch import launch_kernel

ACTIVATIONS = ("linear_clipping", "sigmoid")
TILE = 2048  # scores per program
MIN_BLOCK_T = 16
NUM_WARPS = 4
# Lengths and strides change between calls; Triton would compile a variant for those that are 1 or multiples of 16.
FORWARD_NUMBERS = ["stride_sb", "stride_st", "num_tokens", "divisor"]
BACKWARD_NUMBERS = [*FORWARD_NUMBERS, "stride_mb", "stride_mt", "stride_ab", "stride_ah", "stride_at", "stride_bb",
                    "stride_bh", "stride_bt"]  # fmt: skip


def fused_coefficients(
    scores: Tensor,
    activation: str,
    running_alpha: Tensor | None = None,
    divisor: int | None = None,
    token_mask: Tensor | None = None,
    collected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """alpha and beta = (running_alpha - alpha) / divisor, each contiguous [B, H, T] in fp32.

    Args:
        scores: [B, T, H], the output of W_a in bf16, fp16 or fp32; not empty.
        activation: "linear_clipping" or "sigmoid".
        running_alpha: [H] fp32; None returns beta = None.
        divisor: N of Eq. 8; needed with running_alpha.
        token_mask: boolean [B, T], True for real tokens; only `collected` depends on it.
        collected: [H + 1] fp64 leaf. Its gradient is the sum of alpha over real tokens, per head, then their number.
    """
    check_arguments(scores, activation, running_alpha, divisor, token_mask)
    if scores.stride(2) != 1:
        scores = scores.contiguous()
    divide_by = 1.0 if divisor is None else float(divisor)
    if torch.is_grad_enabled() and (scores.requires_grad or collected is not None):
        return _Coefficients.apply(scores, running_alpha, collected, token_mask, divide_by, activation)
    return _forward(scores, running_alpha, divide_by, activation)


def check_arguments(
    inputs: Tensor, activation: str, running_alpha: Tensor | None, divisor: int | None, token_mask: Tensor | None
) -> None:
    """Raises where the arguments of a call with inputs [B, T, ...] do not go together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if running_alpha is not None and divisor is None:
        raise ValueError("divisor is missing: beta = (running_alpha - alpha) / divisor needs it (Eq. 8)")
    if token_mask is not None and token_mask.shape != inputs.shape[:2]:
        raise ValueError(f"token_mask must have shape [B, T] = {list(inputs.shape[:2])}, got {list(token_mask.shape)}")


class _Coefficients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        running_alpha: Tensor | None,
        collected: Tensor | None,
        token_mask: Tensor | None,
        divisor: float,
        activation: str,
    ) -> tuple[Tensor, Tensor | None]:
        # alpha does not tell a score on the boundary of the clipping from one beyond it, so the scores are saved.
        ctx.save_for_backward(scores, token_mask)
        ctx.divisor, ctx.activation = divisor, activation
        ctx.set_materialize_grads(False)
        return _forward(scores, running_alpha, divisor, activation)

    @staticmethod
    def backward(ctx: Any, grad_alpha: Tensor | None, grad_beta: Tensor | None):
        # Gradients are enabled under create_graph=True only; the guard against a second backward takes longer than
        # the launch.
        run = _guarded_gradients if torch.is_grad_enabled() else _gradients
        return run(ctx, grad_alpha, grad_beta)


def _gradients(ctx: Any, grad_alpha: Tensor | None, grad_beta: Tensor | None) -> tuple[Tensor | None, ...]:
    scores, token_mask = ctx.saved_tensors
    needs_scores, _, needs_sums, *_ = ctx.needs_input_grad
    batch, length, heads = scores.shape
    block_t, block_h, blocks = _tiling(length, heads)
    grad_scores = partial = mask = None
    if needs_scores and (grad_alpha is not None or grad_beta is not None):
        grad_scores = torch.empty((batch, length, heads), dtype=scores.dtype, device=scores.device)
    if needs_sums:
        partial = torch.empty((batch * blocks, heads + 1), dtype=torch.float64, device=scores.device)
        mask = None if token_mask is None else token_mask.view(torch.int8)
    _launch(
        coefficients_backward_kernel, batch * blocks, (scores, mask, grad_alpha, grad_beta, grad_scores, partial),
        (*scores.stride()[:2],
         *((0, 0) if mask is None else mask.stride()),
         *((0, 0, 0) if grad_alpha is None else grad_alpha.stride()),
         *((0, 0, 0) if grad_beta is None else grad_beta.stride()),
         length, ctx.divisor, heads, block_t, block_h, ctx.activation == "sigmoid"),
    )  # fmt: skip
    return grad_scores, None, None if partial is None else partial.sum(0), None, None, None


_guarded_gradients = once_differentiable(_gradients)


def _forward(
    scores: Tensor, running_alpha: Tensor | None, divisor: float, activation: str
) -> tuple[Tensor, Tensor | None]:
    batch, length, heads = scores.shape
    alpha = torch.empty((batch, heads, length), dtype=torch.float32, device=scores.device)
    beta = None if running_alpha is None else torch.empty_like(alpha)
    block_t, block_h, blocks = _tiling(length, heads)
    _launch(
        coefficients_kernel, batch * blocks, (scores, running_alpha, alpha, beta),
        (*scores.stride()[:2], length, divisor, heads, block_t, block_h, activation == "sigmoid"),
    )  # fmt: skip
    return alpha, beta


def _tiling(length: int, heads: int) -> tuple[int, int, int]:
    """(tokens per program, columns of a tile, programs per row of the batch)."""
    block_h = 1 << (heads - 1).bit_length()
    block_t = max(MIN_BLOCK_T, min(TILE // block_h, 1 << (length - 1).bit_length()))
    return block_t, block_h, (length + block_t - 1) // block_t


def _launch(kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
    """The only launch of this file; the first tensor is on the device to launch on.

    Without fp fusion: a fused multiply-add would put 0.1 * -5 + 0.5 below 0, where its gradient is 0 and PyTorch's 1.
    """
    first: Any = tensors[0]
    launch = functools.partial(
        launch_kernel, kernel, (programs,), tensors, numbers, num_warps=NUM_WARPS, enable_fp_fusion=False
    )
    on_device(first.get_device(), launch)


@triton.jit
def activate(score, SIGMOID: tl.constexpr):
    """(alpha, its derivative by the score); NaN stays NaN, and PyTorch's clamp has derivative 1 at 0 and at 1."""
    if SIGMOID:
        alpha = tl.div_rn(1.0, 1.0 + tl.exp(-score))
        slope = (1.0 - alpha) * alpha
    else:
        line = 0.1 * score + 0.5
        alpha = tl.where(line < 0.0, 0.0, tl.where(line > 1.0, 1.0, line))
        slope = tl.where((line >= 0.0) & (line <= 1.0), 0.1, 0.0)
    return alpha, slope


@triton.jit
def score_gradient(grad, slope, SIGMOID: tl.constexpr):
    """The gradient of a score from that of alpha, `grad`, and the derivative of alpha.

    Where the slope of the clipping is 0 the gradient is replaced and not multiplied, as in PyTorch: one that is not
    finite gives 0.
    """
    if SIGMOID:
        return grad * slope
    else:
        return tl.where(slope > 0.0, grad * 0.1, 0.0)


@triton.jit(do_not_specialize=FORWARD_NUMBERS)
def coefficients_kernel(
    scores, running_alpha, alpha, beta, stride_sb, stride_st, num_tokens, divisor,
    NUM_HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Eq. 7 and 8. One program owns BLOCK_T tokens of one row of the batch, all heads; writes alpha and beta."""
    blocks = tl.cdiv(num_tokens, BLOCK_T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    token = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    head = tl.arange(0, BLOCK_H)[None, :]
    real = (token < num_tokens) & (head < NUM_HEADS)
    score = tl.load(scores + row * stride_sb + token * stride_st + head, mask=real, other=0.0).to(tl.float32)
    value, _ = activate(score, SIGMOID)
    at = (row * NUM_HEADS + head) * num_tokens + token
    tl.store(alpha + at, value, mask=real)
    if beta is not None:
        average = tl.load(running_alpha + head, mask=head < NUM_HEADS, other=0.0)
        tl.store(beta + at, tl.div_rn(average - value, divisor), mask=real)


@triton.jit(do_not_specialize=BACKWARD_NUMBERS)
def coefficients_backward_kernel(
    scores, token_mask, grad_alpha, grad_beta, grad_scores, partial,
    stride_sb, stride_st, stride_mb, stride_mt, stride_ab, stride_ah, stride_at, stride_bb, stride_bh, stride_bt,
    num_tokens, divisor,
    NUM_HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """d score = (d alpha - d beta / N) phi'(score). One program owns BLOCK_T tokens of one row of the batch, all heads.

    Writes the gradient of its scores, and in fp64 its sums of alpha over real tokens and their number.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(num_tokens, BLOCK_T)
    row = program // blocks
    token = (program % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    head = tl.arange(0, BLOCK_H)[None, :]
    real = (token < num_tokens) & (head < NUM_HEADS)
    score = tl.load(scores + row * stride_sb + token * stride_st + head, mask=real, other=0.0).to(tl.float32)
    value, slope = activate(score, SIGMOID)
    if grad_scores is not None:
        grad = tl.zeros([BLOCK_T, BLOCK_H], dtype=tl.float32)
        if grad_alpha is not None:
            at = row * stride_ab + head * stride_ah + token * stride_at
            grad += tl.load(grad_alpha + at, mask=real, other=0.0)
        if grad_beta is not None:
            at = row * stride_bb + head * stride_bh + token * stride_bt
            grad -= tl.div_rn(tl.load(grad_beta + at, mask=real, other=0.0), divisor)
        grad = score_gradient(grad, slope, SIGMOID)
        at = (row * num_tokens + token) * NUM_HEADS + head
        tl.store(grad_scores + at, grad.to(grad_scores.dtype.element_ty), mask=real)
    if partial is not None:
        counted = token < num_tokens
        if token_mask is not None:
            marked = tl.load(token_mask + row * stride_mb + token * stride_mt, mask=counted, other=0)
            counted = counted & (marked != 0)
        # Padding may hold anything, NaN too: it is replaced, not multiplied by 0.
        total = tl.sum(tl.where(counted & (head < NUM_HEADS), value, 0.0).to(tl.float64), axis=0)
        to = partial + program * (NUM_HEADS + 1)
        column = tl.arange(0, BLOCK_H)
        tl.store(to + column, total, mask=column < NUM_HEADS)
        tl.store(to + NUM_HEADS, tl.sum(counted.to(tl.float64)))
