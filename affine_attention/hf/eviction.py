"""Makes masks that hide keys which an attached model usually sees: the first key of a document, or all but a window.

The masks are the codes of masks.py. The caller passes one as `attention_mask`, and transformers hands a mask of four
dimensions to every layer unchanged. No T x T tensor is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import KEY_CODE, SEGMENT_CODE, packed_segments


def eviction_mask(
    input_ids: Tensor, position_ids: Tensor | None = None, *, first_key: bool = False, window: int | None = None
) -> Tensor:
    """The `attention_mask` of an attached model under which keys are hidden; without padding and without a cache.

    >>> model(input_ids, attention_mask=eviction_mask(input_ids, first_key=True))  # doctest: +SKIP

    Args:
        input_ids: [B, T].
        position_ids: [B, T] if documents are packed: a document starts wherever a position does not follow the
            previous one. They must be passed to the model as well.
        first_key: True hides the first key of each document from all later queries; the first query still sees it.
        window: each query sees itself and the `window` - 1 keys before it.
    """
    if not first_key and window is None:
        raise ValueError("eviction_mask needs first_key=True or a window, got neither: no key would be hidden")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an integer of at least 1, got {window!r}")
    batch, length = input_ids.shape
    if position_ids is None and not first_key:
        columns = torch.ones(1, 0, dtype=KEY_CODE, device=input_ids.device)
    else:
        columns = _segments(position_ids, batch, length, input_ids.device, first_key)
    return columns[:, None, None].expand(-1, (window or 0) + 1, -1, -1)


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


def _segments(position_ids: Tensor | None, batch: int, length: int, device: torch.device, first_key: bool) -> Tensor:
    """Segment ids [B, T]: documents, with the first token of each as a segment of its own if `first_key`."""
    if position_ids is None:
        documents = torch.zeros(batch, length, dtype=SEGMENT_CODE, device=device)
    else:
        documents = packed_segments(position_ids, batch).to(SEGMENT_CODE)
    if not first_key:
        return documents
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    after = torch.zeros_like(starts)
    after[:, 1:] = starts[:, :-1]
    return (starts | after).to(SEGMENT_CODE).cumsum(1)
