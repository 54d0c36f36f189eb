"""Says what a decoder does with tokens outside of its attention: what a split or packed sequence would change."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}  # in config.layer_types
CHANGING_ROPE = ("dynamic", "longrope")  # frequencies follow the largest position of a call
OWN_POSITIONS = ("biogpt", "opt")  # families that count positions from the mask


def counts_positions(decoder: PreTrainedModel) -> bool:
    """True for a decoder that ignores position_ids and computes positions from the tokens or the mask of a call."""
    takes = "position_ids" in inspect.signature(type(decoder).forward).parameters
    return not takes or decoder.config.model_type in OWN_POSITIONS


def mixes_tokens(decoder: PreTrainedModel) -> str | None:
    """The part of a decoder that mixes tokens in another way than full or sliding attention; None if there is none."""
    config: Any = decoder.config
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if others:
        return f"layers of type {', '.join(others)} mix tokens outside of attention or in chunks"
    mixing = next((name for name, module in decoder.named_modules() if isinstance(module, nn.Conv1d)), None)
    if mixing is not None:
        return f"{mixing} mixes tokens outside of attention"
    return None


def changing_rope(decoder: PreTrainedModel) -> tuple[str, str] | None:
    """The module and its rope_type whose frequencies depend on the longest sequence of a call; None without one."""
    for name, module in decoder.named_modules():
        kinds = getattr(module, "rope_type", None)
        found = set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(CHANGING_ROPE)
        if found:
            return name, found.pop()
    return None
