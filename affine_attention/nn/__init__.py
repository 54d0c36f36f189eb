"""Parameters and state around the operator."""

from .attention import AttentionMechanism, Coefficients, KeyValueCache, SelfAttention
from .mechanism import PRESETS, Mechanism
from .scaling import (
    AffineScale,
    commit_after_step,
    commit_running_alpha,
    discard_running_alpha,
    linear_clipping,
)
from .sequence import SequenceHandle, sequence_parallel, shard_sequence

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
