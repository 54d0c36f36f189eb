"""Affine-Scaled Attention and related mechanisms: softmax, off-by-one, learned sink, gated, affine, affine + gated.

`attention` is the operator, `Mechanism` holds the settings of a mechanism, `SelfAttention` is a complete layer. Names
are imported on first use, so that `affine report` and `affine --help` start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
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
    from .ops import attention, attention_varlen, attention_weights, count_visible_keys, decode_attention, explain

__all__ = [
    "AffineScale",
    "AttentionMechanism",
    "KeyValueCache",
    "Mechanism",
    "SelfAttention",
    "__version__",
    "attention",
    "attention_varlen",
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
OPERATIONS = ("attention", "attention_varlen", "attention_weights", "count_visible_keys", "decode_attention", "explain")


def __getattr__(name: str) -> Any:
    if name in ("nn", "ops"):  # available after `import affine_attention` alone
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(".ops" if name in OPERATIONS else ".nn", __name__)
    return globals().setdefault(name, getattr(module, name))
