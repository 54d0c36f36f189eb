"""Says which fused kernel serves a call, by rules that were measured, and runs it. Triton is imported on first use.

Rules, in this order (docs/kernels.md has the measurements):
- decode: up to 16 queries and no gradient, against more keys than queries: one pass over the cache, split over keys;
- cudnn: plain causal or full attention in bf16 or fp16 on compute capability 9.0 and newer, where cuDNN between fused
  passes, or one kernel in the place of its forward or backward, is the fastest that was measured (not under
  torch.use_deterministic_algorithms: neither backward is);
- flash: every other call that the Triton kernels take (windows, segments, padding, T != S, fp32, older GPUs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..visibility import Visibility
from . import HAS_TRITON, INTERPRETED, capability_of

CUDNN_CAPABILITY = 90


def choose_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
) -> tuple[str | None, str]:
    """(the kernel, why), or (None, the reason why no fused kernel can serve the call)."""
    if query.device.type != "cuda" and not (INTERPRETED and query.device.type == "cpu"):
        return None, f"needs a CUDA GPU, got {query.device.type} tensors"
    if not HAS_TRITON:
        return None, "needs Triton, which is not installed"
    from . import cudnn, decode, flash

    call: dict[str, Any] = {"alpha": alpha, "beta": beta, "sink": sink, "gate": gate, "visibility": visibility}
    refusals = []
    if visibility.num_queries < visibility.num_keys:
        reason = decode.why_not(query, key, value, **call)
        if reason is None:
            return "decode", f"{visibility.num_queries} queries against {visibility.num_keys} keys, no gradient"
        refusals.append(f"decode {reason}")
    if query.device.type == "cuda" and capability_of(query) >= CUDNN_CAPABILITY:
        reason = cudnn.why_not(query, key, value, **call)
        if reason is None:
            return "cudnn", _why_cudnn(query, key, visibility, any(x is not None for x in (alpha, beta, sink, gate)))
        refusals.append(f"cudnn {reason}")
    reason = flash.why_not(query, key, value, **call)
    if reason is None:
        return "flash", "; ".join(refusals) or "the Triton kernels take it"
    return None, reason


def _why_cudnn(query: Tensor, key: Tensor, visibility: Visibility, has_mechanism: bool) -> str:
    # A compiled graph would be bound to the sizes that the question looks at, for a sentence that it never shows.
    if not torch.compiler.is_compiling():
        from .alone import forwards_alone
        from .alone_backward import fits_alone, why_not_here

        forward = has_mechanism and forwards_alone(query, key, visibility.is_causal, 1.0)
        fits = fits_alone(query, key, visibility.is_causal, 1.0)
        refusal = why_not_here() if fits else None
        if forward or fits:
            routes = ["one kernel" if alone else "cuDNN" for alone in (forward, fits and refusal is None)]
            told = "" if refusal is None else f" here (the backward in one kernel {refusal})"
            return f"a large causal call: {routes[0]} forward, {routes[1]} backward is the fastest measured{told}"
    return "plain causal or full attention: cuDNN between fused passes is the fastest measured"


def fused_attention(
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
    kernel: str,
    nonnegative_alpha: bool,
) -> Tensor:
    """Runs the kernel that `choose_fused` has named."""
    call: dict[str, Any] = {
        "alpha": alpha, "beta": beta, "sink": sink, "gate": gate,
        "visibility": visibility, "softmax_scale": softmax_scale,
    }  # fmt: skip
    if kernel == "decode":
        from .decode import decode_attention

        return decode_attention(query, key, value, **call)
    if kernel == "cudnn":
        from .cudnn import cudnn_attention

        return cudnn_attention(query, key, value, **call, nonnegative_alpha=nonnegative_alpha)
    assert kernel == "flash", kernel
    from .flash import flash_attention

    return flash_attention(query, key, value, **call)
