"""Parameters and state around the operator. Names are imported on first use, so that settings do not need torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionMechanism, Coefficients, KeyValueCache, SelfAttention
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PRESETS", "Mechanism"):
        module = "mechanism"
    else:
        module = "scaling" if name == "AffineScale" or name.islower() else "attention"
    return globals().setdefault(name, getattr(import_module(f".{module}", __name__), name))
