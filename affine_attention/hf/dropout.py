"""Switches off the dropout on attention weights of a pretrained model, which no mechanism has."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .families import find_sites

SETTINGS = ("attention_dropout", "attn_pdrop")  # of a configuration
ATTRIBUTES = ("attention_dropout", "attn_dropout", "dropout")  # of an attention module: a number or an nn.Dropout


def remove_attention_dropout(model: PreTrainedModel) -> dict[str, float]:
    """Sets the dropout on attention weights to 0, in place; returns the settings that were changed, with their values.

    Dropout on hidden states stays. A model in evaluation mode keeps its outputs.
    """
    changed: dict[str, float] = {}
    config: Any = model.config
    for name in SETTINGS:
        if getattr(config, name, None):
            changed[name] = getattr(config, name)
            setattr(config, name, 0.0)
    if changed:
        for site in find_sites(model):
            for name in ATTRIBUTES:
                found = getattr(site.module, name, None)
                if isinstance(found, nn.Dropout):
                    found.p = 0.0
                elif isinstance(found, float):
                    setattr(site.module, name, 0.0)
    return changed
