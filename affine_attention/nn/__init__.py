"""Modules with the parameters and state of a mechanism. Names are imported on first use: settings do not need torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionMechanism, Coefficients, SelfAttention
    from .key_value_cache import KeyValueCache
    from .mechanism import PRESETS, Mechanism
    from .scaling import (
        AffineScale,
        commit_after_step,
        commit_running_alpha,
        discard_running_alpha,
        linear_clipping,
    )

__all__ = [
    "PRESETS",
    "AffineScale",
    "AttentionMechanism",
    "Coefficients",
    "KeyValueCache",
    "Mechanism",
    "SelfAttention",
    "commit_after_step",
    "commit_running_alpha",
    "discard_running_alpha",
    "linear_clipping",
]


MODULES = {
    **dict.fromkeys(("AttentionMechanism", "Coefficients", "SelfAttention"), "attention"),
    **dict.fromkeys(("PRESETS", "Mechanism"), "mechanism"),
    "KeyValueCache": "key_value_cache",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{MODULES.get(name, 'scaling')}", __name__)
    return globals().setdefault(name, getattr(module, name))
