"""Finding attention modules: nine more families, and clear errors for unsupported models."""

from __future__ import annotations

import pytest
import torch
import transformers

from affine_attention.hf import attach
from affine_attention.hf.families import find_decoders, find_sites

from .models import FAMILIES, NO_HEAD_DIM, make_model, make_tokens, plain_model
from .test_attach import assert_equals_oracle

HYBRID = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {
    "gemma3_text": HYBRID | {"head_dim": 8},
    "olmo3": HYBRID,
    "cohere2": HYBRID,
    "exaone4": HYBRID,
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 4, "head_dim": 8},
    "stablelm": {},
    "starcoder2": {"sliding_window": 5},
    "phi": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_equal_the_oracle(family, monkeypatch):
    """Windows on some layers, chunks, parallel blocks and learned positions work without code for the family."""
    monkeypatch.setitem(FAMILIES, family, NO_HEAD_DIM | OTHERS[family])
    model = make_model(family, "affine_gated", torch.float64)
    assert_equals_oracle(model, input_ids=make_tokens())


@pytest.mark.parametrize("family", FAMILIES)
def test_sites_are_the_attention_modules_of_the_decoder(family):
    model = plain_model(family)
    sites = find_sites(model)
    assert len(sites) == 2
    assert {(s.embed_dim, s.num_heads, s.head_dim) for s in sites} == {(32, 4, 8)}
    assert find_decoders(model, sites) == [model.base_model]
    assert find_decoders(model.base_model, find_sites(model.base_model)) == [model.base_model]


def adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(plain_model(), LoraConfig(target_modules=["q_proj"])).base_model.model


def tiny(name, **settings):
    """A tiny model of an unsupported family."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
             "num_key_value_heads": 2, "intermediate_size": 32}  # fmt: skip
    config = transformers.AutoConfig.for_model(name, **(small | settings))
    return transformers.AutoModelForCausalLM.from_config(config)


def deepseek():
    return tiny("deepseek_v3", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=8,
                   kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, moe_intermediate_size=8,
                   num_key_value_heads=4, first_k_dense_replace=1)  # fmt: skip


def gpt_oss():
    return tiny("gpt_oss", num_local_experts=2, num_experts_per_tok=1, head_dim=8)


t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)


def quantised():
    model = plain_model()
    model.model.layers[0].self_attn.q_proj = torch.ao.nn.quantized.dynamic.Linear(32, 32)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (deepseek, "multi-head latent attention"),
        (lambda: tiny("bloom"), "ALiBi"),
        (lambda: tiny("gemma2", head_dim=8), "soft-caps the scores (attn_logit_softcapping=50.0)"),
        (
            lambda: gpt_oss(),
            "already has attention sinks",
        ),
        (quantised, "mechanisms need unquantised projections"),
        (lambda: tiny("mamba"), "no attention module was found"),
        (lambda: tiny("gpt2", add_cross_attention=True), "cross-attention"),
        (lambda: transformers.T5ForConditionalGeneration(t5), "encoder-decoder"),
        (lambda: tiny("diffllama", head_dim=8), "differential attention"),
        (lambda: tiny("falcon", alibi=True), "ALiBi"),
        (adapted, "attach to the plain model first"),
        (lambda: make_model("llama", "sink"), "already has a mechanism ('sink')"),
    ],
)
def test_unsupported_models_raise_with_the_reason_and_stay_unchanged(make, words):
    model = make()
    kind, hooks = type(model), sum(len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(ValueError) as caught:
        attach(model, "affine")
    assert words in str(caught.value)
    assert type(model) is kind
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
