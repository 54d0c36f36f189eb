"""Attention on packed tensors [total, H, D] whose documents are given by cumulative lengths (`cu_seqlens`).

The documents become segments of one sequence, so nothing is padded to the longest document and no length is read on the
host. Causal attention and windows are aligned by positions. Where a document has the same queries and keys, positions
in the pack serve. Where their numbers differ (chunked prefill), each query is first moved to the position of its own
key, so that the last query of a document sees its last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .api import attention
from .finish import NORM_EPS
from .validation import check_cu_seqlens, check_packed, check_window
from .weights import SOFTMAX

NO_QUERY, NO_KEY = -1, -2  # segment ids of tokens outside of all documents: they differ, so these see no key


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_key: Tensor | None = None,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    exclusion: Tensor | float | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = NORM_EPS,
    weights: str = SOFTMAX,
    is_causal: bool = False,
    window: int | None = None,
    softmax_scale: float | None = None,
    nonnegative_alpha: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`attention` for packed documents without a batch dimension, as trainers and servers hold them.

    >>> q = torch.randn(10, 8, 64); k = torch.randn(10, 2, 64); v = torch.randn(10, 2, 64)
    >>> cu_seqlens = torch.tensor([0, 3, 10])  # documents of 3 and 7 tokens
    >>> attention_varlen(q, k, v, cu_seqlens, is_causal=True).shape
    torch.Size([10, 8, 64])

    Args:
        query: [total, H, D], the queries of all documents one after the other.
        key, value: [total_keys, G, D]; H must be a multiple of G.
        cu_seqlens: int32 or int64 [documents + 1], on the device of query: document d has the queries
            cu_seqlens[d] to cu_seqlens[d + 1] - 1. It starts with 0 and does not decrease. Tokens from its last entry
            on are padding: they see nothing, are seen by nothing, and return zeros. On a GPU these values are not
            checked, because reading them would synchronise.
        cu_seqlens_key: the same for key and value where a document has other numbers of keys than of queries; None
            means cu_seqlens.
        alpha, beta: [total, H].
        sink: [H], or [total, H].
        gate: [total, H, D].
        exclusion: a number or [total, H].
        norm_weight, norm_eps, weights: as in `attention`.
        is_causal, window: as in `attention`, aligned bottom-right within each document: the last query of a document
            sees its last key.
        softmax_scale, nonnegative_alpha, impl: as in `attention`.

    Returns:
        [total, H, D] in the dtype of query.
    """
    by_row: dict[str, Any] = {"query": query, "alpha": alpha, "beta": beta, "gate": gate}
    shared: dict[str, Any] = {}
    for name, x in (("sink", sink), ("exclusion", exclusion)):
        (by_row if isinstance(x, Tensor) and x.dim() == 2 else shared)[name] = x
    check_packed(key=key, value=value, **by_row)
    check_cu_seqlens("cu_seqlens", cu_seqlens, query, query.shape[0])
    check_window(window)
    settings: dict[str, Any] = {
        **shared, "norm_weight": norm_weight, "norm_eps": norm_eps, "weights": weights, "is_causal": is_causal,
        "window": window, "softmax_scale": softmax_scale, "nonnegative_alpha": nonnegative_alpha, "impl": impl,
    }  # fmt: skip
    if cu_seqlens_key is None or cu_seqlens_key is cu_seqlens:
        if key.shape[0] != query.shape[0]:
            raise ValueError(
                f"cu_seqlens_key must be given where key has another number of tokens than query, got key "
                f"{list(key.shape)} and query {list(query.shape)}"
            )
        ids = _documents(cu_seqlens, query.shape[0])
        inside = ids < cu_seqlens.shape[0] - 1
        return _attend(by_row, key, value, _ids(ids, inside, NO_QUERY), _ids(ids, inside, NO_KEY), settings)

    check_cu_seqlens("cu_seqlens_key", cu_seqlens_key, query, key.shape[0])
    if cu_seqlens_key.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_key must have as many entries as cu_seqlens {list(cu_seqlens.shape)}, for the same documents, "
            f"got {list(cu_seqlens_key.shape)}"
        )
    starts, starts_key = cu_seqlens.long(), cu_seqlens_key.long()
    num_documents = starts.shape[0] - 1
    ids, ids_key = _documents(starts, query.shape[0]), _documents(starts_key, key.shape[0])
    inside, inside_key = ids < num_documents, ids_key < num_documents
    query_ids, key_ids = _ids(ids, inside, NO_QUERY), _ids(ids_key, inside_key, NO_KEY)
    by_position = is_causal or window is not None or exclusion is not None
    if not by_position or not (num_documents and query.shape[0] and key.shape[0]):
        return _attend(by_row, key, value, query_ids, key_ids, settings | {"is_causal": False, "window": None})

    # The position of a query among the keys of its document; negative where a document has more queries than keys.
    position = torch.arange(query.shape[0], device=query.device) - _at(starts, ids)
    position = position + _at(starts_key.diff() - starts.diff(), ids)
    if is_causal:
        # Keys keep their positions. A query before the first key of its document sees none: it has no slot.
        num_slots = key.shape[0]
        slots = position + _at(starts_key, ids)
        slots = slots.masked_fill(~inside | (position < 0), num_slots)
    else:
        # A query before the first key may see keys ahead of it, so it needs a slot of its own: each document gets as
        # many slots as it has queries and keys together.
        num_slots = query.shape[0] + key.shape[0]
        room = (
            starts + starts_key + (starts.diff(append=starts[-1:]) - starts_key.diff(append=starts_key[-1:])).clamp(0)
        )
        slots = (position + _at(room, ids)).masked_fill(~inside, num_slots)
        own_key = torch.arange(key.shape[0], device=key.device) - _at(starts_key, ids_key)
        slots_key = (own_key + _at(room, ids_key)).masked_fill(~inside_key, num_slots)
        key, value = (_scatter(x, slots_key, num_slots) for x in (key, value))
        key_ids = _scatter(key_ids, slots_key, num_slots, NO_KEY)
    placed = {name: None if x is None else _scatter(x, slots, num_slots) for name, x in by_row.items()}
    out = _attend(placed, key, value, _scatter(query_ids, slots, num_slots, NO_QUERY), key_ids, settings)
    without_slot = (slots == num_slots)[:, None, None]
    return out.index_select(0, slots.clamp(max=num_slots - 1)).masked_fill(without_slot, 0)


def _attend(
    rows: dict[str, Tensor | None], key: Tensor, value: Tensor, query_ids: Tensor, key_ids: Tensor, settings: Any
) -> Tensor:
    """`attention` on views [1, H, T, ..] of packed tensors [T, H, ..], without a copy."""
    views: dict[str, Any] = {name: None if x is None else x.transpose(0, 1)[None] for name, x in rows.items()}
    out = attention(
        key=key.transpose(0, 1)[None], value=value.transpose(0, 1)[None], **views,
        segment_ids=(query_ids[None], key_ids[None]), **settings,
    )  # fmt: skip
    return out[0].transpose(0, 1)


def _documents(cu_seqlens: Tensor, total: int) -> Tensor:
    """The document of each of `total` tokens; the number of documents for tokens after the last one."""
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1


def _ids(documents: Tensor, inside: Tensor, outside: int) -> Tensor:
    return documents.masked_fill(~inside, outside)


def _at(per_document: Tensor, documents: Tensor) -> Tensor:
    """The entry of each token's document; that of the last document for tokens after it."""
    return per_document[documents.clamp(max=per_document.shape[0] - 1)]


def _scatter(x: Tensor, slots: Tensor, num_slots: int, fill: int = 0) -> Tensor:
    """[n, ..] as [num_slots, ..] with row r in slot slots[r] and `fill` elsewhere; slot num_slots is dropped."""
    return x.new_full((num_slots + 1, *x.shape[1:]), fill).index_copy(0, slots, x)[:num_slots]
