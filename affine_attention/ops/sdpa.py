"""PyTorch's attention kernels as (forward, backward) pairs that expose the log-sum-exp.

`F.scaled_dot_product_attention` does not return the log-sum-exp. The ATen kernels behind it do, and their backward
takes `out` and `lse` as inputs: it computes the weights exp(s - lse) and delta = rowsum(grad * out). Given `out` and
`lse` of a larger softmax (with a sink, or with more keys in another tile), it returns the exact gradients of that one.

A kernel gets an optional bias (0 or -inf, broadcastable to [B, H, T, S]), and `is_causal` only for square tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import pad

from .dtypes import row_dtype

aten = torch.ops.aten
MATH_BLOCK = 256  # query rows per step of the plain kernel
# PyTorch 2.11 keeps one compiled cuDNN backward per shape, strides of query, key and value, and dropout. The strides of
# the output and its gradient are compiled in, too, but they are no part of the key: a call with another layout than the
# first one gets wrong gradients without an error. -0.0 differs from the 0.0 of F.scaled_dot_product_attention in the
# key only, and our calls always pass both tensors in cuDNN's layout of the output (docs/decisions/0080).
OWN_CUDNN_BACKWARD = -0.0


@dataclass(frozen=True)
class Kernel:
    """One attention kernel of PyTorch: which calls it supports, its forward and its backward."""

    name: str

    def why_not(self, query: Tensor, key: Tensor, has_bias: bool, is_causal: bool) -> str | None:
        """The reason why this kernel does not support the call, or None if it does."""
        raise NotImplementedError

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, softmax_scale: float
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns out [B, H, T, D], lse [B, H, T] and the auxiliary values `aux` for `backward`."""
        raise NotImplementedError

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        aux: Any,
        bias: Tensor | None,
        is_causal: bool,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        raise NotImplementedError


class CpuFlash(Kernel):
    """The blocked CPU kernel: supports GQA, fp64 to fp16, and a bias together with is_causal."""

    def why_not(self, query, key, has_bias, is_causal):
        return None if query.device.type == "cpu" else f"needs cpu tensors, got {query.device.type}"

    def forward(self, query, key, value, bias, is_causal, softmax_scale):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=softmax_scale
        )
        return out, lse, None

    def backward(self, grad_out, query, key, value, out, lse, aux, bias, is_causal, softmax_scale):
        groups, repeats = key.shape[1], query.shape[1] // key.shape[1]
        if repeats > 1 and query.dtype != row_dtype(query.dtype):
            # The kernel adds the query heads of a group in half precision, which rounds dK and dV once per head.
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=softmax_scale
        )
        return dq, _sum_repeats(dk, groups), _sum_repeats(dv, groups)


class CudnnAttention(Kernel):
    """The cuDNN kernel, the fastest on Hopper."""

    def why_not(self, query, key, has_bias, is_causal):
        if has_bias:
            return "is used only without a mask"
        if not _cuda_allows(can_use_cudnn_attention, query, key, is_causal):
            return "does not support this device, dtype or head dim"
        return None

    def forward(self, query, key, value, bias, is_causal, softmax_scale):
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=softmax_scale
        )
        return out, lse.reshape(lse.shape[:3]), (seed, offset, cum_q, cum_k, max_q, max_k, lse.shape)

    def backward(self, grad_out, query, key, value, out, lse, aux, bias, is_causal, softmax_scale):
        seed, offset, cum_q, cum_k, max_q, max_k, lse_shape = aux
        grad_out, out = (in_layout_of(query, x) for x in (grad_out, out))
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, query, key, value, out, lse.reshape(lse_shape), seed, offset, None, cum_q, cum_k, max_q, max_k,
            OWN_CUDNN_BACKWARD, is_causal, scale=softmax_scale,
        )  # fmt: skip


class CudaFlash(Kernel):
    """PyTorch's build of FlashAttention."""

    def why_not(self, query, key, has_bias, is_causal):
        if has_bias:
            return "does not support a mask"
        if not _cuda_allows(can_use_flash_attention, query, key, is_causal):
            return "does not support this device, dtype or head dim"
        return None

    def forward(self, query, key, value, bias, is_causal, softmax_scale):
        out, lse, cum_q, cum_k, max_q, max_k, rng, unused, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=softmax_scale
        )
        return out, lse, (cum_q, cum_k, max_q, max_k, rng, unused)

    def backward(self, grad_out, query, key, value, out, lse, aux, bias, is_causal, softmax_scale):
        cum_q, cum_k, max_q, max_k, rng, unused = aux
        return aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, rng, unused,
            scale=softmax_scale,
        )  # fmt: skip


class CudaEfficient(Kernel):
    """The memory-efficient kernel: supports a bias and fp32; needs repeated key-value heads and padded rows."""

    def why_not(self, query, key, has_bias, is_causal):
        repeated = key[:, :1].expand(-1, query.shape[1], -1, -1)
        if not _cuda_allows(can_use_efficient_attention, query, repeated, is_causal):
            return "does not support this device or dtype"
        return None

    def forward(self, query, key, value, bias, is_causal, softmax_scale):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, _full_bias(bias, query, key), True, 0.0, is_causal, scale=softmax_scale
        )
        return out, lse[:, :, : query.shape[2]], (seed, offset, lse.shape[2])

    def backward(self, grad_out, query, key, value, out, lse, aux, bias, is_causal, softmax_scale):
        seed, offset, rows = aux
        groups, repeats = key.shape[1], query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        lse = pad(lse, (0, rows - lse.shape[2]), value=torch.inf)
        # In half precision the kernel computes delta itself and assumes that `out` is [B, T, H, D] in memory, whatever
        # its strides: with any other layout the gradients of query and key are silently wrong.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, key, value, _full_bias(bias, query, key), out, lse, seed, offset, 0.0,
            [True, True, True, False], is_causal, scale=softmax_scale,
        )  # fmt: skip
        return dq, _sum_repeats(dk, groups), _sum_repeats(dv, groups)


class Plain(Kernel):
    """Matrix multiplications and an explicit softmax, MATH_BLOCK rows at a time, for every device and dtype."""

    def why_not(self, query, key, has_bias, is_causal):
        return None

    def forward(self, query, key, value, bias, is_causal, softmax_scale):
        value = value.to(row_dtype(query.dtype)).repeat_interleave(query.shape[1] // value.shape[1], 1)
        outs, lses = [], []
        for scores, _ in self._blocks(query, key, bias, is_causal, softmax_scale):
            lse = torch.logsumexp(scores, dim=-1)
            outs.append(torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]) @ value)
            lses.append(lse)
        return torch.cat(outs, 2).to(query.dtype), torch.cat(lses, 2), None

    def backward(self, grad_out, query, key, value, out, lse, aux, bias, is_causal, softmax_scale):
        dtype, groups = row_dtype(query.dtype), key.shape[1]
        repeats = query.shape[1] // groups
        value_BHSD = value.to(dtype).repeat_interleave(repeats, 1)
        key_BHSD = key.to(dtype).repeat_interleave(repeats, 1)
        delta_BHT = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
        dq, dk, dv = [], torch.zeros_like(key_BHSD), torch.zeros_like(value_BHSD)
        for scores, rows in self._blocks(query, key, bias, is_causal, softmax_scale):
            weights = torch.exp(scores - lse[:, :, rows, None])
            grad = grad_out[:, :, rows].to(dtype)
            dv = dv + weights.mT @ grad
            ds = weights * (grad @ value_BHSD.mT - delta_BHT[:, :, rows, None]) * softmax_scale
            ds = ds.masked_fill(weights == 0, 0)  # grad @ value may be inf for a masked key
            dq.append(ds @ key_BHSD)
            dk = dk + ds.mT @ query[:, :, rows].to(dtype)
        grads = torch.cat(dq, 2), _sum_repeats(dk, groups), _sum_repeats(dv, groups)
        return tuple(grad.to(query.dtype) for grad in grads)

    @staticmethod
    def _blocks(query, key, bias, is_causal, softmax_scale):
        dtype = row_dtype(query.dtype)
        key_BHDS = key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], 1).mT
        column = torch.arange(key.shape[2], device=key.device)
        for first in range(0, query.shape[2], MATH_BLOCK):
            rows = slice(first, min(first + MATH_BLOCK, query.shape[2]))
            scores = query[:, :, rows].to(dtype) @ key_BHDS * softmax_scale
            if bias is not None:
                # Replace instead of add: the score of a masked key may be +inf, and inf - inf is NaN.
                hidden = (bias if bias.shape[2] == 1 else bias[:, :, rows]) == -torch.inf
                scores = scores.masked_fill(hidden, -torch.inf)
            if is_causal:
                row = torch.arange(rows.start, rows.stop, device=key.device)[:, None]
                scores = scores.masked_fill(column > row, -torch.inf)
            yield scores, rows


CPU_KERNELS: tuple[Kernel, ...] = (CpuFlash("cpu_flash"),)
CUDA_KERNELS: tuple[Kernel, ...] = (CudnnAttention("cudnn"), CudaFlash("flash"), CudaEfficient("efficient"))
PLAIN: Kernel = Plain("plain")


def choose_kernel(query: Tensor, key: Tensor, has_bias: bool, is_causal: bool) -> tuple[Kernel, str]:
    """Returns the first kernel that supports the call, fastest first as measured, and the reason for the choice."""
    candidates = {"cpu": CPU_KERNELS, "cuda": CUDA_KERNELS}.get(query.device.type, ())
    refusals: list[str] = []
    for kernel in candidates:
        reason = kernel.why_not(query, key, has_bias, is_causal)
        if reason is None:
            return kernel, "; ".join(refusals) or "first choice on this device"
        refusals.append(f"{kernel.name} {reason}")
    return PLAIN, "; ".join(refusals) or f"no fused kernel for device {query.device.type}"


def _cuda_allows(rule: Callable[..., bool], query: Tensor, key: Tensor, is_causal: bool) -> bool:
    if torch.compiler.is_compiling():
        # PyTorch's check cannot be traced, so use the memory-efficient kernel, which has the fewest restrictions.
        return rule is can_use_efficient_attention and query.dtype != torch.float64
    params = SDPAParams(query, key, key, None, 0.0, is_causal, query.shape[1] != key.shape[1])
    return bool(rule(params, False))


def in_layout_of(query: Tensor, x: Tensor) -> Tensor:
    """x, or a copy, with the strides of the output that cuDNN's forward allocates: those of empty_like(query)."""
    strides = torch.empty_like(query, device="meta").stride()
    return x if x.stride() == strides else torch.empty_like(query, dtype=x.dtype).copy_(x)


def _full_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Pads the rows of the bias in memory, because the kernel reads them in vectors of 16 elements."""
    if bias is None:
        return None
    keys = key.shape[2]
    bias = pad(bias, (0, -keys % 16))[..., :keys]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], keys)


def _sum_repeats(grad_BHSD: Tensor, groups: int) -> Tensor:
    """Sums the gradients of the query heads that share a key-value head."""
    batch, heads, keys, dim = grad_BHSD.shape
    if heads == groups:
        return grad_BHSD
    shared = grad_BHSD.reshape(batch, groups, heads // groups, keys, dim)
    return shared.sum(2, dtype=row_dtype(grad_BHSD.dtype)).to(grad_BHSD.dtype)
