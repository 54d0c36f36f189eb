"""The operator and its implementations: functions of tensors. They need torch only; Triton is imported on first use."""

from .api import Choice, attention, attention_weights, count_visible_keys, explain
from .decoding import decode_attention
from .varlen import attention_varlen

__all__ = [
    "Choice",
    "attention",
    "attention_varlen",
    "attention_weights",
    "count_visible_keys",
    "decode_attention",
    "explain",
]
