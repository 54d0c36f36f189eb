"""Modules with the parameters and state of a mechanism."""

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
