"""Attention of one or a few new queries to a dense or paged cache, with a length per sequence and without gradients.

On a CUDA GPU this is one pass over the cache (ops/fused/decode). Elsewhere pages are gathered into a dense cache, and
the visibility becomes a small mask [B, 1, T, S] for `composed`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import AttentionCall, Rows
from .composed import composed_attention
from .finish import EMPTY, NORM_EPS, Finish, finish, own_values, row_marks, uses_kernels
from .fused.plan import why_not_decode, why_not_fused
from .validation import (
    check_finish,
    check_lengths,
    check_pages,
    check_query,
    check_query_key,
    check_rows,
    check_softmax_scale,
    check_value,
    check_visibility,
    check_weights,
)
from .visibility import Visibility
from .weights import SOFTMAX


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    exclusion: Tensor | float | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = NORM_EPS,
    weights: str = SOFTMAX,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """`attention` for generation: causal, aligned to the length of each sequence instead of the size of the cache.

    Args:
        query: [B, H, T, D], the last T tokens of each sequence, whose keys are already in the cache.
        key, value: the cache, [B, G, S, D], or [pages, page_size, G, D] with a block table.
        alpha, beta, sink, gate, exclusion, norm_weight, norm_eps, weights, window, softmax_scale: as in `attention`.
            The own value of a query is the one at its position in the sequence.
        lengths: integers [B], the number of keys of each sequence; None means all S. Later slots are never read.
        block_table: integers [B, n]; key j of sequence b is in page block_table[b, j // page_size], slot
            j % page_size. Entries within a length must be pages of the cache; this is not checked on a GPU.

    Returns:
        [B, H, T, D] in the dtype of query.
    """
    dense_key, dense_value = key, value
    if block_table is not None:
        check_query(query)
        check_lengths(lengths, query)
        check_pages(query, key, value, block_table, lengths)
        dense_key, dense_value = _shape_of_pages(key, block_table), _shape_of_pages(value, block_table)
    check_query_key(query, dense_key)
    check_value(dense_value, query, dense_key)
    check_rows(query, alpha, beta, sink, gate)
    check_lengths(lengths, query)
    visibility = check_visibility(query, dense_key, mask=None, is_causal=True, window=window, segment_ids=None)
    scale = check_softmax_scale(softmax_scale, query.shape[-1])
    check_weights(weights, sink)
    if exclusion is not None or norm_weight is not None:
        check_finish(query, exclusion, norm_weight, norm_eps)
        y = decode_attention(
            query, key, value, alpha=alpha, beta=beta, sink=sink, lengths=lengths, block_table=block_table,
            window=window, softmax_scale=softmax_scale, weights=weights,
        )  # fmt: skip
        with torch.no_grad():
            own, marks = _own_values(value, visibility, lengths, block_table)
            parts = Finish(exclusion, norm_weight, norm_eps, gate)
            return finish(y, own, marks, parts, kernels=uses_kernels(y))
    rows = Rows(alpha, beta, sink, gate)
    with torch.no_grad():
        dense = AttentionCall(query, dense_key, dense_value, rows, visibility, scale, weights=weights)
        if why_not_fused(dense) is None and why_not_decode(dense, needs_gradient=False) is None:
            from .fused.decode.op import decode

            return decode(dense._replace(key=key, value=value), lengths, block_table)
        if block_table is not None:
            key, value = _gather_pages(key, block_table), _gather_pages(value, block_table)
        call = dense._replace(key=key, value=value, visibility=_aligned(visibility, lengths))
        return composed_attention(call)


def _shape_of_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """A tensor with the shape, dtype and device of the dense cache [B, G, S, D], without its memory."""
    (batch, pages), (_, page_size, groups, dim) = block_table.shape, cache.shape
    return cache.new_empty(()).expand(batch, groups, pages * page_size, dim)


def _gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """The dense cache [B, G, S, D]; table entries beyond the length of a sequence may select any page."""
    pages = block_table.long().clamp(0, cache.shape[0] - 1)
    return cache[pages].flatten(1, 2).transpose(1, 2)


def _own_values(
    value: Tensor, visibility: Visibility, lengths: Tensor | None, block_table: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The value at the position of each query, [B, G, T, D], and the marks of rows before the first key."""
    queries, keys, device = visibility.num_queries, visibility.num_keys, visibility.device
    if lengths is None and block_table is None:
        return own_values(value, visibility), row_marks(visibility)
    first_B1 = (keys if lengths is None else lengths.to(device).clamp(max=keys)[:, None]) - queries
    position_BT = (first_B1 + torch.arange(queries, device=device)).expand(visibility.batch, -1)
    marks = (position_BT < 0).to(torch.uint8)[:, None] * EMPTY
    at_BT = position_BT.clamp(min=0)
    if block_table is None:
        index = at_BT[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3])
        return value.gather(2, index), marks
    page_size = value.shape[1]
    page_BT = block_table.long().gather(1, at_BT // page_size).clamp(0, value.shape[0] - 1)
    return value[page_BT, at_BT % page_size].transpose(1, 2), marks


def _aligned(visibility: Visibility, lengths: Tensor | None) -> Visibility:
    """The visibility with the queries at the end of each sequence instead of the end of the cache."""
    if lengths is None:
        return visibility
    device, queries, keys = visibility.device, visibility.num_queries, visibility.num_keys
    position_BT1 = (lengths.to(device)[:, None] - queries + torch.arange(queries, device=device))[..., None]
    key_S = torch.arange(keys, device=device)
    seen_BTS = key_S <= position_BT1
    if visibility.window is not None:
        seen_BTS &= position_BT1 - key_S < visibility.window
    return Visibility(visibility.batch, queries, keys, device, pair_mask=seen_BTS[:, None])
