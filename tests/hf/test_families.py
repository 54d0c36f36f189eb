"""Finding attention modules: nine more families, and clear errors for unsupported models."""

from __future__ import annotations

import pytest
import torch
import transformers

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import WeightsNotice, attach, detach
from affine_attention.hf.families import drops_keywords, find_decoders, find_sites

from .models import (
    FAMILIES,
    NO_HEAD_DIM,
    make_model,
    make_tokens,
    mechanisms,
    oracle,
    plain_model,
    running_alphas,
    spread,
)
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


def shapes(name):
    """A model of a family with its published settings, without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name))


def lw_detr():
    with torch.device("meta"):
        return transformers.LwDetrForObjectDetection(transformers.LwDetrConfig())


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
        (lambda: shapes("bigbird_pegasus"), "is not marked as causal (is_causal=False) in a decoder"),
        (lambda: shapes("minimax_m3_vl_text"), "passes block_indices to its attention: sparse attention over chosen"),
        (lambda: shapes("inkling_text"), "passes position_bias to its attention: a learned bias on the scores"),
        (lambda: shapes("doge"), "computes a mask from its values"),
        (lambda: shapes("blt"), "is built from a configuration of a part of the model (BltLocalEncoderConfig)"),
        (lambda: shapes("zamba"), "has heads of 464 channels, and the operator serves at most 256"),
        (lambda: shapes("moshi"), "self_attn.q_proj is a MoshiLinear, which is more than one linear map"),
        (lambda: shapes("zaya"), "self_attn.qkv_proj is a ZayaCCAProjection, which is more than one linear map"),
        (lw_detr, "is built from a configuration of a part of the model (LwDetrViTConfig)"),
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


def test_a_norm_before_the_projection_allows_no_identity_start():
    model = tiny("bitnet")
    with pytest.raises(ValueError, match=r"attn_sub_norm normalises the output of attention .*; use start=\"fresh\""):
        attach(model, "affine", start="identity")
    attach(model, "affine")


def test_weights_in_a_format_of_their_own_allow_no_identity_start():
    """What torchao's quantize_ leaves: a linear layer whose weight is a tensor of another class."""

    class Packed(torch.Tensor):
        pass

    model = plain_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = torch.nn.Parameter(
            layer.self_attn.o_proj.weight.detach().as_subclass(Packed), requires_grad=False
        )
    kind, before = type(model), model.state_dict()
    with pytest.raises(ValueError, match=r"self_attn has one in a format of its own \(Packed\); use start=\"fresh\""):
        attach(model, "affine", start="identity")
    assert type(model) is kind
    assert model.state_dict().keys() == before.keys()
    attach(model, "affine")


def test_cross_attention_that_is_never_called_gets_no_gates():
    model = transformers.BartForCausalLM(
        transformers.BartConfig(vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=4,
                                decoder_ffn_dim=32, dropout=0.0)
    )  # fmt: skip
    attach(model, "affine")
    assert [name for name, _ in model.named_modules() if name.endswith(".affine")] == [
        "model.decoder.layers.0.self_attn.affine"
    ]


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_layers_that_pass_no_keywords_on(family):
    """Weights and packed documents are told by keywords."""
    torch._dynamo.reset()
    model = attach(tiny(family, attention_dropout=0.0).eval(), "affine")
    assert drops_keywords(model.model.layers[0])
    assert not drops_keywords(plain_model().model.layers[0])
    spread(model, 0.3)
    tokens = make_tokens(1, 12)
    with pytest.warns(WeightsNotice):
        assert [w.shape for w in model(tokens, output_attentions=True).attentions] == [(1, 4, 12, 12)]
    assert not model(tokens).attentions
    packed = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        alone = model(tokens[:, 5:]).logits
        for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            logits = call(tokens, position_ids=packed, use_cache=True).logits[:, 5:]
            torch.testing.assert_close(logits, alone, rtol=1e-3, atol=1e-3)
    detach(model)
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert not any("affine_carried" in module.__dict__ for module in model.modules())


def test_outputs_are_contiguous_as_those_of_transformers():
    """The attention of afmoe calls view."""
    model = tiny("afmoe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_shared_experts=1,
                    head_dim=8, sliding_window=5)  # fmt: skip
    attach(model, "affine")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    model(make_tokens(), attention_mask=mask).logits.sum().backward()


TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = {"image_size": 8, "patch_size": 4}
SPEECH = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (2, 2), "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "attention_dropout": 0.0}  # fmt: skip
SPECIAL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
# A vision tower, a speech encoder with padding, a text encoder with padding and a text tower that is causal.
ENCODERS = {
    "clip_vision": (transformers.CLIPVisionModel, TOWER | IMAGES, {"pixel_values": (2, 3, 8, 8)}),
    "vit": (transformers.ViTModel, TOWER | IMAGES, {"pixel_values": (2, 3, 8, 8)}),
    "wav2vec2": (transformers.Wav2Vec2Model, TOWER | SPEECH, {"input_values": (2, 48)}),
    "eurobert": (transformers.EuroBertModel, TOWER | SPECIAL | {"num_key_value_heads": 2}, {"input_ids": (2, 12)}),
    "clip_text": (transformers.CLIPTextModel, TOWER | SPECIAL, {"input_ids": (2, 12)}),
}


def encoder(name, mechanism="affine_gated"):
    kind, settings, inputs = ENCODERS[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**settings)).double().eval()
    spread(model, 0.3)
    attach(model, Mechanism.named(mechanism, bias_length=6, running_alpha_start=0.4))
    spread(model, 0.3)
    generator = torch.Generator().manual_seed(0)
    batch = {
        name: make_tokens(*shape) if name == "input_ids" else torch.randn(shape, generator=generator).double()
        for name, shape in inputs.items()
    }
    if name in ("wav2vec2", "eurobert"):
        batch["attention_mask"] = torch.ones(next(iter(inputs.values())), dtype=torch.long)
        batch["attention_mask"][1, -4:] = 0
    return model, batch


def states(model, batch):
    model.zero_grad()
    hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"].bool() if "input_ids" in batch and "attention_mask" in batch else None
    hidden = hidden if real is None else hidden[real]
    (hidden * torch.sin(torch.arange(hidden.numel()).view_as(hidden))).sum().backward()
    return hidden.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_the_oracle(name):
    model, batch = encoder(name)
    mine = states(model, batch)
    with oracle():
        truth = states(model, batch)
    torch.testing.assert_close(mine[0], truth[0], rtol=1e-7, atol=1e-9)
    for x, y in zip(mine[1], truth[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    assert all(p.grad is not None for layer in mechanisms(model) for p in layer.parameters())


def test_an_encoder_sees_in_both_directions_and_a_causal_tower_does_not():
    for name, causal in (("eurobert", False), ("clip_text", True)):
        model, batch = encoder(name)
        batch.pop("attention_mask", None)
        changed = batch["input_ids"].clone()
        changed[:, -1] = changed[:, -1] % 60 + 1
        with torch.no_grad():
            before = model(**batch).last_hidden_state[:, 0]
            after = model(input_ids=changed).last_hidden_state[:, 0]
        assert torch.allclose(before, after) == causal


def test_padding_of_an_encoder_does_not_enter_the_running_average():
    averages = []
    for length in (8, 12):
        model, batch = encoder("eurobert")
        model.train()
        ids = batch["input_ids"][1:, :length]
        model(input_ids=ids, attention_mask=batch["attention_mask"][1:, :length]).last_hidden_state.sum().backward()
        commit_running_alpha(model)
        averages.append(running_alphas(model))
    torch.testing.assert_close(*averages)
