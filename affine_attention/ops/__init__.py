"""The operator and its implementations: functions of tensors. They need torch only; Triton is imported on first use."""

from .api import Choice, attention, attention_weights, count_visible_keys, explain
from .decoding import decode_attention

__all__ = ["Choice", "attention", "attention_weights", "count_visible_keys", "decode_attention", "explain"]
