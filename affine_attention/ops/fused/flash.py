"""Serves a call with the fused Triton kernels, or says why they cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from ..visibility import Visibility
from . import HAS_TRITON, INTERPRETED, capability_of
from .flash_op import flash_forward

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = 80


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
) -> str | None:
    """The reason why the fused kernels cannot serve this call, None when they can."""
    if not HAS_TRITON:
        return "needs Triton, which is not installed"
    if query.device.type != "cuda" and not (INTERPRETED and query.device.type == "cpu"):
        return f"needs a CUDA GPU, got {query.device.type} tensors"
    if query.device.type == "cuda" and capability_of(query) < MIN_CAPABILITY:
        return f"needs a GPU of compute capability 8.0 or newer, got {capability_of(query) / 10}"
    if query.dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32, got {str(query.dtype).removeprefix('torch.')}"
    if not query.dtype == key.dtype == value.dtype:
        return f"needs query, key and value of one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {query.shape[-1]}"
    if value.shape[-1] != query.shape[-1]:
        return f"needs values of the head dim of the queries, got {value.shape[-1]} and {query.shape[-1]}"
    if visibility.pair_mask is not None:
        return "does not take a dense mask [B, 1|H, T, S]; causal, window, segment_ids and a [B, S] mask are served"
    return None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
    softmax_scale: float,
) -> Tensor:
    """The equation for calls that `why_not` has nothing against: the output [B, H, T, D] in the dtype of query."""
    if softmax_scale <= 0:
        # The kernels take the row maximum before they scale, which holds for a positive scale only.
        query, softmax_scale = (query * 0, 1.0) if softmax_scale == 0 else (-query, -softmax_scale)
    if gate is not None:
        gate = gate.to(query.dtype)
    inputs = (query, key, value, alpha, beta, sink, gate)
    needs_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    out, _, _ = flash_forward(
        *inputs,
        visibility.query_segments,
        visibility.key_segments,
        visibility.key_mask,
        visibility.is_causal,
        visibility.window,
        softmax_scale,
        needs_backward,
    )
    return out
