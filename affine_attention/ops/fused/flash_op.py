"""Registers the fused kernels with torch.library: schema, shapes without data, and the gradient.

The visibility of a call crosses as plain tensors and numbers. Triton is imported by the bodies, not by this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import device_of

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? alpha, Tensor? beta, Tensor? sink, Tensor? gate, "
    "Tensor? query_segments, Tensor? key_segments, Tensor? key_mask, bool is_causal, int? window, float softmax_scale"
)
# In the order of the gradients that the backward operator returns.
_DIFFERENTIABLE = ("query", "key", "value", "alpha", "beta", "sink", "gate")


def _keeps_softmax(alpha: Tensor | None, beta: Tensor | None, gate: Tensor | None, needs_backward: bool) -> bool:
    """Whether the softmax output is a tensor of its own: only if it differs from the output and is needed."""
    return needs_backward and not (alpha is None and beta is None and gate is None)


@torch.library.custom_op(
    "affine_attention::flash_forward",
    mutates_args=(),
    schema=f"({_INPUTS}, bool needs_backward) -> (Tensor, Tensor, Tensor)",
)
def flash_forward(
    query, key, value, alpha, beta, sink, gate, query_segments, key_segments, key_mask, is_causal, window,
    softmax_scale, needs_backward,
):  # fmt: skip
    """The output, the softmax output (empty where it is not kept or equals the output), and lse in log2."""
    if query.numel() == 0 or key.shape[2] == 0:
        out, softmax_out, lse = _empty_outputs(query, alpha, beta, gate, needs_backward)
        return out.zero_(), softmax_out.zero_(), lse.fill_(-torch.inf)
    from .forward import launch_forward
    from .launch import Call, align, make_rule

    with device_of(query):
        rule = make_rule(query.shape[2], key.shape[2], is_causal, window, query_segments, key_segments, key_mask)
        out, kept, lse = launch_forward(
            Call(query, key, value, rule, softmax_scale),
            alpha=alpha, beta=beta, sink=None if sink is None else sink.contiguous(),
            gate=None if gate is None else align(gate),
            keep_softmax=_keeps_softmax(alpha, beta, gate, needs_backward),
            like=query,
        )  # fmt: skip
    # Empty stands for None, which an operator cannot return.
    return out, query.new_empty(0) if kept is None else kept, lse


def _empty_outputs(
    query: Tensor, alpha: Tensor | None, beta: Tensor | None, gate: Tensor | None, needs_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    keeps = _keeps_softmax(alpha, beta, gate, needs_backward)
    softmax_out = torch.empty_like(query) if keeps else query.new_empty(0)
    return torch.empty_like(query), softmax_out, query.new_empty(query.shape[:3], dtype=torch.float32)


@flash_forward.register_fake
def _(
    query, key, value, alpha, beta, sink, gate, query_segments, key_segments, key_mask, is_causal, window,
    softmax_scale, needs_backward,
):  # fmt: skip
    return _empty_outputs(query, alpha, beta, gate, needs_backward)


@torch.library.custom_op(
    "affine_attention::flash_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor softmax_out, Tensor lse, {_INPUTS}) -> Tensor[]",
)
def flash_backward(
    grad_out, softmax_out, lse, query, key, value, alpha, beta, sink, gate, query_segments, key_segments, key_mask,
    is_causal, window, softmax_scale,
):  # fmt: skip
    """The gradients of the inputs that are there, in the order of the schema."""
    inputs = dict(zip(_DIFFERENTIABLE, (query, key, value, alpha, beta, sink, gate), strict=True))
    like = _empty_grads(inputs)
    if query.numel() == 0 or key.shape[2] == 0:
        return [grad.zero_() for grad in like.values()]
    from .backward import launch_backward
    from .launch import Call, make_rule

    with device_of(query):
        rule = make_rule(query.shape[2], key.shape[2], is_causal, window, query_segments, key_segments, key_mask)
        launch_backward(
            Call(query, key, value, rule, softmax_scale), grad_out, softmax_out, lse,
            alpha=alpha, beta=beta, sink=None if sink is None else sink.contiguous(), gate=gate, grads=like,
        )  # fmt: skip
    return list(like.values())


def _empty_grads(inputs: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: torch.empty_like(x) for name, x in inputs.items() if x is not None}


@flash_backward.register_fake
def _(
    grad_out, softmax_out, lse, query, key, value, alpha, beta, sink, gate, query_segments, key_segments, key_mask,
    is_causal, window, softmax_scale,
):  # fmt: skip
    inputs = dict(zip(_DIFFERENTIABLE, (query, key, value, alpha, beta, sink, gate), strict=True))
    return list(_empty_grads(inputs).values())


def _setup_context(ctx, inputs, output) -> None:
    tensors, (is_causal, window, softmax_scale, _) = inputs[:10], inputs[10:]
    out, softmax_out, lse = output
    ctx.mark_non_differentiable(softmax_out, lse)
    # Where nothing scales the softmax output, it is the output: keep that, not a copy.
    ctx.save_for_backward(*tensors, out if softmax_out.numel() < out.numel() else softmax_out, lse)
    ctx.settings = (is_causal, window, softmax_scale)


def _backward(ctx, grad_out, _grad_softmax_out, _grad_lse):
    *tensors, softmax_out, lse = ctx.saved_tensors
    present = [name for name, x in zip(_DIFFERENTIABLE, tensors, strict=False) if x is not None]
    grads = dict(zip(present, flash_backward(grad_out, softmax_out, lse, *tensors, *ctx.settings), strict=True))
    # Three tensors of visibility, is_causal, window, softmax_scale, needs_backward: no gradient.
    return *(grads.get(name) for name in _DIFFERENTIABLE), *(None,) * 7


flash_forward.register_autograd(_backward, setup_context=_setup_context)
