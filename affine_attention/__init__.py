"""Affine-Scaled Attention and its family: softmax, off-by-one, learned sink, gated, affine, affine + gated.

`attention` is the operator, `Mechanism` names a member of the family, `SelfAttention` is a layer that has it.
"""

from .nn import (
    AffineScale,
    AttentionMechanism,
    KeyValueCache,
    Mechanism,
    SelfAttention,
    commit_after_step,
    commit_running_alpha,
    discard_running_alpha,
    linear_clipping,
    sequence_parallel,
    shard_sequence,
)
from .ops import attention, attention_weights, count_visible_keys, decode_attention, explain
from .version import __version__

__all__ = [
    "AffineScale",
    "AttentionMechanism",
    "KeyValueCache",
    "Mechanism",
    "SelfAttention",
    "__version__",
    "attention",
    "attention_weights",
    "commit_after_step",
    "commit_running_alpha",
    "count_visible_keys",
    "decode_attention",
    "discard_running_alpha",
    "explain",
    "linear_clipping",
    "sequence_parallel",
    "shard_sequence",
]
