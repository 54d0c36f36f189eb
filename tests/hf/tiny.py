"""Derives tiny models of every causal family of transformers from its configuration class."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .models import VOCABULARY, spread

CAUSAL = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
LAYERS, WIDTH, HEADS, HEAD_DIM, FFN, EXPERTS, WINDOW = 2, 32, 4, 8, 32, 4, 5
MOST_PARAMETERS = 2_000_000
# Settings by name, wherever a configuration has them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim",
                     "attention_hidden_size", "hidden_size_per_layer_input", "lru_width", "mamba_hidden"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"),
                    LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "attention_num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "attention_head_dim", "kv_channels"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff",
                     "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "dim_ff",
                     "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
                     "intermediate_size_mlp", "dense_intermediate_size"), FFN),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout",
                     "activation_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "dropout_p",
                     "residual_dropout", "embedding_dropout", "attn_dropout", "summary_first_dropout",
                     "attention_dropout_prob", "router_jitter_noise", "input_jitter_noise"), 0.0),
    **dict.fromkeys(("layerdrop", "decoder_layerdrop", "encoder_layerdrop"), 0.0),
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "rotary_dim": 4,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_chunk_size": 8, "chunk_size": 8, "state_size": 8, "conv_kernel": 4, "n_mamba_heads": 1, "mamba_headdim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "attention_chunk_size": 4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
KEEP_NONE = ("attention_chunk_size", "q_lora_rank", "n_inner", "hidden_size_per_layer_input")
# What the names above do not say.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "cwm": {"bos_token_id": 1, "eos_token_id": 63},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                       "original_max_position_embeddings": 16}},
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 63, "cls_token_id": 1, "sep_token_id": 63},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "roc_bert": {"pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "zamba": {"num_hidden_layers": 2, "attention_head_dim": 16, "attention_hidden_size": 64, "n_mamba_heads": 2,
              "layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 2, "attention_head_dim": 16, "attention_hidden_size": 64, "hybrid_layer_ids": [1],
               "layers_block_type": ["mamba", "hybrid"]},
}  # fmt: skip


class NotBuilt(Exception):
    """No tiny model of the family was built here; the message says why."""


def tiny_settings(family: str) -> dict[str, Any]:
    """Small values for the settings that the configuration class of a family has."""
    default: Any = CONFIG_MAPPING[family]()
    known = vars(default) | {name: getattr(default, to, None) for name, to in default.attribute_map.items()}
    settings = {name: SIZES[name] for name in known if name in SIZES and not _stays_none(name, known[name])}
    for name, target in default.attribute_map.items():  # one name for each setting that has two
        if name in settings and target in settings:
            del settings[name]
    if known.get("sliding_window"):
        settings["sliding_window"] = WINDOW
    kinds = vars(default).get("layer_types")
    if kinds:  # one layer of each kind, the last of them full attention if there is one
        distinct = sorted(set(kinds), key=lambda kind: (kind == "full_attention", kind))
        settings["layer_types"] = (distinct * LAYERS)[-max(LAYERS, len(distinct)) :]
        settings["num_hidden_layers"] = len(settings["layer_types"])
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    return settings | OVERRIDES.get(family, {})


def _stays_none(name: str, value: Any) -> bool:
    return value is None and name in KEEP_NONE


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny random model of a causal family; raises NotBuilt with the reason where there is none."""
    torch.manual_seed(seed)
    try:
        config = CONFIG_MAPPING[family](**tiny_settings(family))
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"its settings leave {size:,} parameters")
        try:
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        except ValueError:  # a family without it
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        words = "" if isinstance(error, NotBuilt) else f"{type(error).__name__}: "
        raise NotBuilt(f"{words}{' '.join(str(error).split())[:120]}") from error
    with contextlib.suppress(Exception):  # families without experts
        model.set_experts_implementation("eager")  # the grouped matmul does not support fp64
    spread(model, 0.3)
    return model.to(dtype).eval()


def published_shapes(family: str) -> Any:
    """A model of a family with its published settings, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
