"""Knows the keywords that models pass to their attention, and refuses those that the operator would drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# The mask has already been made from these, or they belong to another part of the model, the loss for one.
WITHOUT_EFFECT = frozenset(
    (
        "position_ids", "cache_position", "use_cache", "past_key_values", "sliding_window", "cu_seq_lens_q",
        "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "token_type_ids", "mm_token_type_ids",
        "cycle_offset", "output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch",
        "return_dict", "logits_to_keep", "position_embeddings", "layer_idx", "deterministic", "shift_labels",
        "ignore_index", "return_loss", "skip_logits", "accum_dtype", "generation_mode", "tokenizer", "affine_hidden",
        "affine_segments", "affine_weights", "affine_call", "affine_readings",
    )
)  # fmt: skip
# What each of these changes; a module that passes one cannot be served.
CHANGES_ATTENTION = {
    "position_bias": "a learned bias on the scores",
    "s_aux": "sinks of its own",
    "softcap": "soft-capped scores",
    "block_indices": "sparse attention over chosen blocks",
    "indices": "sparse attention over chosen keys",
}


def refuse_unknown(kind: str, given: dict[str, Any], way_out: str) -> None:
    """Raises for a keyword that is not known to leave attention as it is; None passes, it says nothing."""
    for name, value in given.items():
        if name not in WITHOUT_EFFECT and value is not None:
            raise ValueError(
                f"{name} is a keyword that the operator does not know, got {_shown(value)} in {kind}; leave it out, or "
                f"{way_out}"
            )


def passes(forward: Callable[..., Any]) -> list[str]:
    """The keywords of `CHANGES_ATTENTION` that a forward names, read from its code."""
    names: set[Any] = set()
    for constant in forward.__code__.co_consts:
        names.update(constant if isinstance(constant, tuple) else (constant,))
    return [name for name in CHANGES_ATTENTION if name in names]


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
