"""Builds the paper's student models, and smaller models of the same design, with random weights."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ..nn import Mechanism
from ..nn.mechanism import as_mechanism
from .classes import affine_config_class, affine_model_class

LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _llama_3_2(width: int, layers: int, heads: int, head_dim: int) -> tuple[str, dict[str, Any]]:
    return "llama", {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
        "head_dim": head_dim, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA_3_ROPE,
        "bos_token_id": 128000, "eos_token_id": 128001,
    }  # fmt: skip


def _small_llama(
    width: int, layers: int, heads: int, groups: int, ffn: int, vocabulary: int
) -> tuple[str, dict[str, Any]]:
    """A small llama of the same design: GQA, head dim 64 (32 in the smallest), tied embeddings, SwiGLU of 8/3 width."""
    return "llama", {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": width // heads, "intermediate_size": ffn, "vocab_size": vocabulary, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip


# (family, settings); the first three are the published configurations of the paper's students (appendix B.1).
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen1.5-0.5b": (
        "qwen2",
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
            "intermediate_size": 2816, "vocab_size": 151936, "tie_word_embeddings": True,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "bos_token_id": 151643,
            "eos_token_id": 151643,
        },
    ),
    "llama-3.2-1b": _llama_3_2(2048, 16, 32, 64),
    "llama-3.2-3b": _llama_3_2(3072, 28, 24, 128),
    "llama-1m": _small_llama(128, 4, 4, 2, 344, 2048),
    "llama-10m": _small_llama(320, 6, 5, 1, 856, 8192),
    "llama-30m": _small_llama(512, 8, 8, 2, 1368, 16384),
    "llama-100m": _small_llama(768, 12, 12, 4, 2048, 32768),
}  # fmt: skip


def student(
    name: str,
    mechanism: Mechanism | str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Builds a randomly initialised student of the paper, or a smaller model of the same design, with a mechanism.

    >>> model = student("llama-1m", "affine", vocab_size=512)

    Args:
        name: "qwen1.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", or a smaller model with about as many parameters as its
            name says: "llama-1m", "llama-10m", "llama-30m", "llama-100m".
        mechanism: a `Mechanism` or the name of a preset; "softmax" is the baseline.
        device: device of the weights; "meta" allocates no memory.
        dtype: dtype of the weights, float32 by default; running averages stay float32.
        changes: configuration settings that replace the published ones (`vocab_size=...`).
    """
    if name not in STUDENTS:
        near = get_close_matches(str(name), STUDENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"name must be one of {', '.join(STUDENTS)}, got {name!r}{hint}")
    mechanism = as_mechanism(mechanism)
    family, settings = STUDENTS[name]
    config_class = affine_config_class(CONFIG_MAPPING[family])
    unknown = [key for key in changes if not hasattr(config_class(), key)]
    if unknown:
        raise ValueError(f"changes must be settings of {config_class.__name__}, got {', '.join(map(repr, unknown))}")
    config = config_class(**(settings | changes), affine_attention={"mechanism": mechanism.to_dict(), "start": "fresh"})
    config.dtype = dtype or torch.float32
    plain_class: Any = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
    model_class = affine_model_class(plain_class)
    with torch.device(device or torch.get_default_device()):
        model: PreTrainedModel = model_class._from_config(config)
    return model
