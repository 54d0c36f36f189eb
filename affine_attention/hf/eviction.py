"""Hides keys that a model usually sees: masks for training, and a cache without its first key for evaluation.

A first key that is hidden from every later query costs a pretrained model nothing: the second token then sees only
itself, as a first token does, and becomes the sink. The key must be evicted after other tokens have seen it, as a
cache of limited size does (docs/decisions/0053).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .masks import KEY_CODE, SEGMENT_CODE, packed_segments


def eviction_mask(
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    *,
    first_key_after: int | None = None,
    window: int | None = None,
) -> Tensor:
    """The `attention_mask` of an attached model under which keys are hidden; without padding and without a cache.

    >>> model(input_ids, attention_mask=eviction_mask(input_ids, first_key_after=16))  # doctest: +SKIP

    Args:
        input_ids: [B, T].
        position_ids: [B, T] if documents are packed: a document starts wherever a position does not follow the
            previous one. They must be passed to the model as well.
        first_key_after: the first key of a document is visible to its first `first_key_after` tokens, and hidden from
            all later ones. This is a boolean mask of T x T (B x T x T with packed documents).
        window: each query sees itself and the `window` - 1 keys before it. This is a code of masks.py, without a T x T
            tensor.
    """
    if (first_key_after is None) is (window is None):
        raise ValueError(
            f"eviction_mask needs either first_key_after or window, got first_key_after={first_key_after!r} and "
            f"window={window!r}"
        )
    for name, value in (("first_key_after", first_key_after), ("window", window)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    batch, length = input_ids.shape
    documents = torch.zeros(1, length, dtype=SEGMENT_CODE, device=input_ids.device)
    if position_ids is not None:
        documents = packed_segments(position_ids, batch).to(SEGMENT_CODE)
    if window is not None:
        columns = documents if position_ids is not None else torch.ones(1, 0, dtype=KEY_CODE, device=input_ids.device)
        return columns[:, None, None].expand(-1, window + 1, -1, -1)
    assert first_key_after is not None
    order_T = torch.arange(length, device=input_ids.device)
    starts_BT = torch.ones_like(documents, dtype=torch.bool)
    starts_BT[:, 1:] = documents[:, 1:] != documents[:, :-1]
    place_BT = order_T - torch.where(starts_BT, order_T, 0).cummax(1).values  # of a token in its document
    seen = (order_T[:, None] >= order_T) & (documents[:, :, None] == documents[:, None])
    seen &= ~(starts_BT[:, None] & (place_BT[:, :, None] >= first_key_after))
    return seen[:, None]


def without_first_key(cache: Any) -> DynamicCache:
    """The cache, in place, without the key and the value of its first token in every layer.

    Raises ValueError for a cache that does not hold all keys of every layer.
    """
    layers: list[Any] = getattr(cache, "layers", [])
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in layers):
        raise ValueError(f"the first key cannot be removed from a {type(cache).__name__} with sliding or other layers")
    for layer in layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
    return cache


def check_can_evict(config: Any, length: int) -> None:
    """Raises ValueError for a model whose layers have windows of their own, which such a mask would replace."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and all(kind == "full_attention" for kind in kinds):
        return
    for name in ("sliding_window", "attention_chunk_size"):
        own = getattr(config, name, None)
        if own is not None and own < length and getattr(config, "use_sliding_window", True):
            raise ValueError(
                f"keys cannot be hidden from a model with layers of {name} = {own} below the length {length}: the mask "
                "would replace that of the layers; use shorter sequences"
            )
