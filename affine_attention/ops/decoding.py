"""One or a few new queries against a cache: lengths per sequence, dense or paged. No gradients.

On a CUDA GPU this is one pass over the cache (ops/fused/decode.py). Elsewhere the cache is made dense, and the same
visibility becomes a small mask [B, 1, T, S] for `composed`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .composed import composed_attention
from .fused.choose import choose_fused
from .validation import check_lengths, check_pages, check_query_key, check_rows, check_softmax_scale, check_value
from .visibility import Visibility


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """`attention` for generation: causal, and aligned to the real length of each sequence instead of the cache's size.

    Args:
        query: [B, H, T, D], the last T tokens of each sequence; their keys are in the cache already.
        key, value: the cache, [B, G, S, D]; with a block table [pages, page_size, G, D].
        alpha, beta, sink, gate, window, softmax_scale: as in `attention`.
        lengths: integers [B], how many keys of each sequence are real; None: all S. What lies behind is never read.
        block_table: integers [B, n]; key j of sequence b lies in page block_table[b, j // page_size], slot
            j % page_size. Entries that a length covers must be pages of the cache; they are not checked on a GPU.

    Returns:
        [B, H, T, D] in the dtype of query.
    """
    pages = None if block_table is None else check_pages(query, key, value, block_table)
    dense_key, dense_value = (key, value) if pages is None else (pages.like(key), pages.like(value))
    check_query_key(query, dense_key)
    check_value(dense_value, query, dense_key)
    check_rows(query, alpha, beta, sink, gate)
    batch, _, num_queries, dim = query.shape
    num_keys = dense_key.shape[2]
    check_lengths(lengths, query)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an integer of at least 1 or None, got {window!r}")
    call: dict[str, Any] = {"alpha": alpha, "beta": beta, "sink": sink, "gate": gate}
    scale = check_softmax_scale(softmax_scale, dim)
    visibility = Visibility(batch, num_queries, num_keys, query.device, is_causal=True, window=window)
    with torch.no_grad():
        kernel, _ = choose_fused(query, dense_key, dense_value, **call, visibility=visibility)
        if kernel == "decode":
            from .fused.decode import decode_attention as decode_on_gpu

            return decode_on_gpu(
                query, key, value, **call, visibility=visibility, softmax_scale=scale, lengths=lengths,
                block_table=block_table,
            )  # fmt: skip
        if pages is not None:
            key, value = pages.gather(key), pages.gather(value)
        return composed_attention(
            query, key, value, **call, visibility=_aligned(visibility, lengths), softmax_scale=scale
        )


def _aligned(visibility: Visibility, lengths: Tensor | None) -> Visibility:
    """The visibility with queries at the end of each sequence, not of the cache."""
    if lengths is None:
        return visibility
    device, queries, keys = visibility.device, visibility.num_queries, visibility.num_keys
    position_BT1 = (lengths.to(device)[:, None] - queries + torch.arange(queries, device=device))[..., None]
    key_S = torch.arange(keys, device=device)
    seen_BTS = key_S <= position_BT1
    if visibility.window is not None:
        seen_BTS &= position_BT1 - key_S < visibility.window
    return Visibility(visibility.batch, queries, keys, device, pair_mask=seen_BTS[:, None])
