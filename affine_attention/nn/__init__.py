"""Parameters and state around the operator. Names are imported on first use, so that settings do not need torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionMechanism, Coefficients
    from .commit import commit_after_step, commit_running_alpha, discard_running_alpha
    from .key_value_cache import KeyValueCache
    from .mechanism import PRESETS, Mechanism
    from .scaling import AffineScale, linear_clipping
    from .self_attention import SelfAttention
    from .ulysses import SequenceHandle, sequence_parallel, shard_sequence

__all__ = [
    "PRESETS",
    "AffineScale",
    "AttentionMechanism",
    "Coefficients",
    "KeyValueCache",
    "Mechanism",
    "SelfAttention",
    "SequenceHandle",
    "commit_after_step",
    "commit_running_alpha",
    "discard_running_alpha",
    "linear_clipping",
    "sequence_parallel",
    "shard_sequence",
]


_MODULES = {
    "AttentionMechanism": "attention",
    "Coefficients": "attention",
    "KeyValueCache": "key_value_cache",
    "Mechanism": "mechanism",
    "PRESETS": "mechanism",
    "SelfAttention": "self_attention",
    "SequenceHandle": "ulysses",
    "sequence_parallel": "ulysses",
    "commit_after_step": "commit",
    "commit_running_alpha": "commit",
    "discard_running_alpha": "commit",
    "shard_sequence": "ulysses",
}  # the others are in scaling.py


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULES.get(name, 'scaling')}", __name__)
    return globals().setdefault(name, getattr(module, name))
