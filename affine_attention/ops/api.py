"""Validates a call, chooses the implementation and says why, and runs it: the only dispatch in the project."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from .composed import composed_attention
from .fused.choose import choose_fused, fused_attention
from .reference import reference_attention, reference_weights
from .sdpa import choose_kernel
from .tiles import plan
from .validation import check_query_key, check_rows, check_softmax_scale, check_value, check_visibility
from .visibility import Visibility

IMPLEMENTATIONS = ("auto", "reference", "composed", "fused")


@dataclass(frozen=True)
class Choice:
    """Which implementation a call takes, and why. `str(choice)` is the sentence."""

    impl: str
    reason: str
    kernels: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kernels = f" on {', '.join(self.kernels)}" if self.kernels else ""
        refused = "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())
        return f"{self.impl}{kernels}: {self.reason}{refused}"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    nonnegative_alpha: bool = False,
    impl: str = "auto",
) -> Tensor:
    """gate * (alpha * softmax_with_sink(query key^T * softmax_scale) value + beta * sum of visible values).

    >>> q = torch.randn(2, 8, 128, 64); k = torch.randn(2, 2, 128, 64); v = torch.randn(2, 2, 128, 64)
    >>> alpha = torch.rand(2, 8, 128); beta = (0.5 - alpha) / 2048
    >>> attention(q, k, v, alpha=alpha, beta=beta, is_causal=True).shape
    torch.Size([2, 8, 128, 64])

    Args:
        query: [B, H, T, D].
        key, value: [B, G, S, D]; H must be a multiple of G (grouped heads).
        alpha, beta: [B, H, T], scale and shift of a query's weights; None means 1 and 0.
        sink: [H], a logit that takes part in the softmax and has no value; not multiplied by softmax_scale.
        gate: [B, H, T, D], multiplies the output.
        mask: boolean, True where a key may be seen: [B, S] (padding) or [B, 1|H, T, S].
        is_causal: bottom-right aligned: the last query sees the last key.
        window: a query sees keys closer than this many positions (with is_causal: the last `window` keys).
        segment_ids: integers [B, T], or a pair ([B, T], [B, S]): documents that do not see each other.
        softmax_scale: 1/sqrt(D) when None.
        nonnegative_alpha: a promise that alpha >= 0 (a sigmoid or linear clipping keeps it), with which the backward
            on a GPU saves time and a tensor. A negative alpha then gives NaN gradients.
        impl: "auto", "fused", "composed" or "reference". One that is asked for runs or raises, it never falls back.

    Returns:
        [B, H, T, D] in the dtype of query. A query that sees no key gets zeros, and zero gradients.
    """
    _check_impl(impl)
    query, key, value, gate = _follow_autocast(query, key, value, gate)
    visibility, scale = _check_call(query, key, value, alpha, beta, sink, gate, mask, is_causal, window,
                                    segment_ids, softmax_scale)  # fmt: skip
    rows = {"alpha": alpha, "beta": beta, "sink": sink, "gate": gate}
    choice = _choose(query, key, value, rows, visibility, impl)
    call: dict[str, Any] = {**rows, "visibility": visibility, "softmax_scale": scale}
    # Products inside must not be lowered once more: the dtypes are settled above.
    with torch.autocast(query.device.type, enabled=False):
        if choice.impl == "reference":
            return reference_attention(query, key, value, **call)
        if choice.impl == "composed":
            return composed_attention(query, key, value, **call)
        return fused_attention(query, key, value, **call, kernel=choice.kernels[0], nonnegative_alpha=nonnegative_alpha)


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """The weights alpha * softmax_with_sink + beta of `attention`, [B, H, T, S]: for diagnostics, T x S memory.

    They are 0 where a key is invisible, may be negative where beta is, and sum to alpha * (1 - sink's share) + n * beta
    over the n visible keys. fp64 for fp64 inputs, fp32 otherwise.
    """
    check_query_key(query, key)
    check_rows(query, alpha, beta, sink, None)
    visibility = check_visibility(query, key, mask=mask, is_causal=is_causal, window=window, segment_ids=segment_ids)
    scale = check_softmax_scale(softmax_scale, query.shape[-1])
    with torch.autocast(query.device.type, enabled=False):
        return reference_weights(
            query, key, alpha=alpha, beta=beta, sink=sink, visibility=visibility, softmax_scale=scale
        )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    nonnegative_alpha: bool = False,
    impl: str = "auto",
) -> Choice:
    """Which implementation `attention` would take with the same arguments, and why. Nothing is computed."""
    _check_impl(impl)
    query, key, value, gate = _follow_autocast(query, key, value, gate)
    visibility, _ = _check_call(query, key, value, alpha, beta, sink, gate, mask, is_causal, window,
                                segment_ids, softmax_scale)  # fmt: skip
    rows = {"alpha": alpha, "beta": beta, "sink": sink, "gate": gate}
    choice = _choose(query, key, value, rows, visibility, impl)
    if choice.impl == "composed":
        choice = replace(choice, kernels=_kernels_of(query, key, visibility))
    return choice


def count_visible_keys(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """n, the number of keys that each query of a call sees: int64, broadcastable to [B, H, T]."""
    check_query_key(query, key)
    return check_visibility(query, key, mask=mask, is_causal=is_causal, window=window, segment_ids=segment_ids).count()


def _choose(
    query: Tensor, key: Tensor, value: Tensor, rows: dict[str, Tensor | None], visibility: Visibility, impl: str
) -> Choice:
    if impl == "reference":
        return Choice("reference", 'asked for by name; holds the T x S weights, "composed" does not')
    if impl == "composed":
        return Choice("composed", "asked for by name")
    kernel, reason = choose_fused(query, key, value, **rows, visibility=visibility)
    if kernel is not None:
        return Choice("fused", reason, (kernel,))
    if impl == "fused":
        raise ValueError(f'impl="fused" {reason}; use impl="composed", or "auto" to let the call decide')
    return Choice("composed", f"the fastest implementation that serves this call on {query.device.type}", (),
                  {"fused": reason})  # fmt: skip


def _kernels_of(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[str, ...]:
    """The PyTorch kernels that the tiles of `composed` would run on, each once."""
    names = []
    for tiles in plan(visibility, query.device.type):
        for tile in tiles:
            kernel, _ = choose_kernel(query, key, tile.mask != "none", tile.is_causal)
            names.append(kernel.name)
    return tuple(dict.fromkeys(names))


def _check_call(
    query, key, value, alpha, beta, sink, gate, mask, is_causal, window, segment_ids, softmax_scale
) -> tuple[Visibility, float]:
    check_query_key(query, key)
    check_value(value, query, key)
    check_rows(query, alpha, beta, sink, gate)
    visibility = check_visibility(query, key, mask=mask, is_causal=is_causal, window=window, segment_ids=segment_ids)
    return visibility, check_softmax_scale(softmax_scale, query.shape[-1])


def _check_impl(impl: Any) -> None:
    if impl not in IMPLEMENTATIONS:
        known = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        near = get_close_matches(str(impl), IMPLEMENTATIONS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"impl must be one of {known}, got {impl!r}{hint}")


def _follow_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Lowers fp32 tensors to autocast's dtype, as PyTorch does for its own attention."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors have no autocast
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in tensors)
