"""Multimodal models: the text decoder gets the mechanism, the other towers keep their attention."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import WeightsNotice, attach, detach
from affine_attention.hf.composite import decoder_config, other_towers, own_configs, parts
from affine_attention.hf.families import find_decoders, find_sites, uses_interface
from affine_attention.hf.interface import IMPLEMENTATION

from .models import VOCABULARY, mechanisms, oracle, running_alphas
from .multimodal import IMAGE, MULTIMODAL, TEXT, TOWER, image_batch, multimodal_model, plain_multimodal, token_types
from .test_attach import loss_and_gradients
from .test_training import assert_same_state

MECHANISM = Mechanism.named("affine_gated", bias_length=6)
# Three ways in which images meet a text decoder in every run of the tests, all families in the long one.
FEW = ("llava", "gemma3", "qwen3_vl")
EACH_FAMILY = pytest.mark.parametrize(
    "family", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MULTIMODAL]
)
# Vision towers, rotary tables and norms compute in fp32 whatever the dtype of the model, so a difference of 1e-16 in
# attention can move one of their inputs across a rounding boundary of fp32.
FP32_INSIDE = {"rtol": 1e-6, "atol": 1e-6}


@EACH_FAMILY
@pytest.mark.parametrize("pad", [0, 3])
def test_logits_and_every_gradient_with_an_image_equal_the_oracle(family, pad):
    model = multimodal_model(family, MECHANISM, torch.float64)
    batch = image_batch(family, torch.float64, pad=pad)
    logits, gradients = loss_and_gradients(model, **batch)
    with oracle():
        expected, truth = loss_and_gradients(model, **batch)
    torch.testing.assert_close(logits[:, pad:], expected[:, pad:], **FP32_INSIDE)
    assert gradients.keys() == truth.keys()
    for name in truth:
        largest = max(1.0, float(truth[name].abs().max()))
        torch.testing.assert_close(
            gradients[name] / largest, truth[name] / largest, **FP32_INSIDE, msg=lambda text, n=name: f"{n}: {text}"
        )
    gates = [name for name, _ in model.named_parameters() if ".affine." in name]
    assert gates
    assert all(gradients[name].abs().max() > 0 for name in gates)
    assert any("vision" in name or "visual" in name for name in gradients), "the vision tower gets no gradient"


@EACH_FAMILY
def test_only_the_text_decoder_gets_the_mechanism(family):
    model = multimodal_model(family, MECHANISM)
    decoder = model.get_decoder()
    assert {name for name, _ in model.named_modules() if name.endswith(".affine")} == {
        f"{site.name}.affine" for site in find_sites(model)
    }
    assert len(mechanisms(model)) == len(mechanisms(decoder)) == 2
    assert find_decoders(model, find_sites(model)) == [decoder]
    config = model.config
    assert config._attn_implementation == decoder_config(config)._attn_implementation == IMPLEMENTATION
    assert decoder.config is decoder_config(config)
    towers = other_towers(model, decoder.config)
    assert towers
    assert all(tower.config._attn_implementation == "sdpa" for tower in towers)
    outside = [m for m in model.modules() if uses_interface(m) and m not in set(decoder.modules())]
    assert outside
    assert all(module.config._attn_implementation == "sdpa" for module in outside)


@EACH_FAMILY
def test_greedy_tokens_do_not_depend_on_the_cache(family):
    model, batch = multimodal_model(family, MECHANISM), image_batch(family)
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": list(range(IMAGE, VOCABULARY))}
    told = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, cache_implementation="static", disable_compile=True), told)
    if family != "paligemma":  # without a cache, transformers makes its new tokens a part of the prefix
        assert torch.equal(model.generate(**batch, **options, use_cache=False), told)
    prompt = batch["input_ids"].shape[1]
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None  # transformers keeps those of the last generation
    with torch.no_grad():
        logits = model(**batch | {"input_ids": told} | token_types(family, told, prompt), use_cache=False).logits
    assert logits[0, prompt - 1 : -1, :IMAGE].argmax(-1).tolist() == told[0, prompt:].tolist()


@EACH_FAMILY
def test_a_folder_holds_the_mechanism_and_never_loads_as_plain_softmax(family, tmp_path):
    model, batch = multimodal_model(family, MECHANISM), image_batch(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert type(decoder_config(loaded.config)) is type(decoder_config(model.config))
    assert_same_state(loaded, model)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=1e-5, atol=1e-5)
    assert [layer.mechanism for layer in mechanisms(loaded)] == [MECHANISM] * 2
    # What a process sees that has not imported this package: the model type is unknown, so is the attention.
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == settings["attn_implementation"] == "affine_attention"
    assert settings["text_config"]["attn_implementation"] == "affine_attention"
    plain = model.plain_class.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a model with a mechanism"):
        plain(**batch)


def test_the_configuration_of_a_folder_takes_output_attentions_for_the_decoder(tmp_path):
    """A plain class of transformers takes it with eager attention alone."""
    multimodal_model("llava", MECHANISM).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    decoder_config(config).output_attentions = True
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, config=config)
    assert decoder_config(model.config).output_attentions
    assert [layer.mechanism for layer in mechanisms(model)] == [MECHANISM] * 2


@EACH_FAMILY
def test_identity_start_and_detach_are_bitwise_equal(family):
    plain, batch = plain_multimodal(family), image_batch(family)
    model = attach(copy.deepcopy(plain), "affine_gated", start="identity")
    with torch.no_grad():
        expected = plain(**batch).logits
        assert torch.equal(model(**batch).logits, expected)
        detach(model)
        assert torch.equal(model(**batch).logits, expected)
    assert type(model) is type(plain)
    assert type(model.config) is type(plain.config)
    assert model.config.to_dict() == plain.config.to_dict()
    assert_same_state(model, plain)
    for name, part in parts(plain.config).items():
        assert type(getattr(model.config, name)) is type(part)
        assert getattr(model.config, name)._attn_implementation == part._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen3_vl"])
def test_gradient_checkpointing_changes_nothing(family):
    plain = multimodal_model(family, MECHANISM).train()
    checked = copy.deepcopy(plain)
    checked.gradient_checkpointing_enable()
    batch = image_batch(family)
    for model in (plain, checked):
        before = running_alphas(model)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        commit_running_alpha(model)
        assert not torch.equal(running_alphas(model), before)
    assert torch.equal(running_alphas(plain), running_alphas(checked))
    for (name, x), y in zip(plain.named_parameters(), checked.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), name
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "llava"])
def test_image_tokens_see_each_other_where_the_model_says_so(family):
    """In gemma3 the tokens of an image see each other, in paligemma the whole prefix; text stays causal."""
    model, batch = multimodal_model(family, MECHANISM), image_batch(family)
    first, *_, last = (batch["input_ids"][0] == IMAGE).nonzero().flatten().tolist()
    with pytest.warns(WeightsNotice), torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions[-1][0]
    assert bool((weights[:, first, last] != 0).any()) == (family != "llava")
    if family == "gemma3":
        assert not weights[:, 0, 1:].any()
        assert not weights[:, first, last + 1 :].any()
    if family == "paligemma":
        types = batch | {"token_type_ids": torch.ones_like(batch["input_ids"])}  # all of it is suffix: causal
        del batch["token_type_ids"]
        with torch.no_grad():  # and causal without the types, though its layers say is_causal=False
            torch.testing.assert_close(model(**batch).logits, model(**types).logits, rtol=1e-5, atol=1e-5)


def test_names_of_transformers_choose_an_implementation_of_the_operator_for_the_decoder(tmp_path):
    model, batch = multimodal_model("llava", MECHANISM), image_batch("llava")
    text, vision = model.config.text_config, model.config.vision_config
    expected = model(**batch).logits

    def chosen():
        return model.config._attn_implementation, text._attn_implementation, vision._attn_implementation

    composed, reference = f"{IMPLEMENTATION}_composed", f"{IMPLEMENTATION}_reference"
    model.set_attn_implementation("eager")
    assert chosen() == (reference, reference, "eager")
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    model.config._attn_implementation = "sdpa"
    assert chosen() == (composed, composed, "sdpa")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "eager"})
    assert chosen() == (composed, reference, "eager")
    text._attn_implementation = "sdpa"
    assert chosen() == (composed, composed, "eager")
    model.set_attn_implementation(IMPLEMENTATION)
    assert chosen() == (IMPLEMENTATION, IMPLEMENTATION, "eager")
    with pytest.raises(ValueError, match="attn_implementation must be left out"):
        model.set_attn_implementation("flex_attention")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.text_config._attn_implementation == reference
    assert loaded.config.vision_config._attn_implementation == "eager"
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert plain.config.text_config._attn_implementation == IMPLEMENTATION
    assert plain.config.vision_config._attn_implementation == "sdpa"


def test_models_that_were_built_from_one_configuration_stay_apart():
    model = plain_multimodal("qwen2_vl")
    other = type(model)(model.config)
    attach(model, MECHANISM)
    assert other.config.text_config._attn_implementation == "sdpa"
    assert type(other.config.text_config) is transformers.Qwen2VLTextConfig
    other(**image_batch("qwen2_vl"))
    copied = copy.deepcopy(model)
    assert copied.get_decoder().config is copied.config.text_config is not model.config.text_config
    assert type(pickle.loads(pickle.dumps(model.config)).text_config) is type(model.config.text_config)
    originals = {id(part) for part in (other.config, *parts(other.config).values())}
    assert originals <= own_configs(other).keys()


def test_a_part_cannot_be_saved_apart_from_what_it_belongs_to(tmp_path):
    whole = multimodal_model("llava", MECHANISM)
    with pytest.raises(ValueError, match="must be saved with the multimodal model that contains it"):
        whole.get_decoder().save_pretrained(tmp_path)
    whole = plain_multimodal("llava")
    part = attach(whole.get_decoder(), "affine")
    with pytest.raises(ValueError, match=r"would load as plain softmax attention; detach the part and call"):
        whole.save_pretrained(tmp_path / "whole")
    part.save_pretrained(tmp_path / "part")
    detach(part)
    whole.save_pretrained(tmp_path / "plain")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_four_planes_of_positions_pack_documents(compiled):
    """Qwen2-VL and its like: the first plane counts the tokens of the text."""
    torch._dynamo.reset()
    model = multimodal_model("qwen2_vl", MECHANISM, torch.float64).get_decoder()
    hidden = torch.randn(1, 12, 32, dtype=torch.float64)
    packed = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, 1, -1)
    with torch.no_grad():
        alone = model(inputs_embeds=hidden[:, 5:], position_ids=packed[:, :, 5:], use_cache=False).last_hidden_state
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        together = call(inputs_embeds=hidden, position_ids=packed, use_cache=False).last_hidden_state
    torch.testing.assert_close(together[:, 5:], alone, **FP32_INSIDE)


def clip():
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=TOWER))


def on_meta(kind, config):
    with torch.device("meta"):
        return getattr(transformers, kind)(getattr(transformers, config)())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (clip, "its text tower is not a causal decoder (text_model.encoder.layers.0.self_attn.is_causal is False)"),
        (lambda: on_meta("MllamaForConditionalGeneration", "MllamaConfig"), "is cross-attention, from text to another"),
        (
            lambda: on_meta("Kosmos2ForConditionalGeneration", "Kosmos2Config"),
            "image_to_text_projection.x_attn is built",
        ),
        (lambda: on_meta("T5Gemma2ForConditionalGeneration", "T5Gemma2Config"), "it is an encoder-decoder"),
        (lambda: on_meta("GitForCausalLM", "GitConfig"), "no attention module was found"),
        (lambda: on_meta("Qwen3_5ForConditionalGeneration", "Qwen3_5Config"), "does it contain a gate?"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(make, words):
    model = make()
    kind = type(model)
    with pytest.raises(ValueError) as caught:
        attach(model, "affine")
    assert words in str(caught.value)
    assert type(model) is kind


def test_a_model_whose_own_configuration_describes_the_decoder():
    """Fuyu's decoder has a part of the configuration, Chameleon's the whole of it."""
    config = transformers.FuyuConfig(text_config=TEXT | {"model_type": "persimmon"}, **TEXT | {"patch_size": 2})
    model = transformers.FuyuForCausalLM(config)
    attach(model, "affine")
    assert [site.num_heads for site in find_sites(model)] == [4, 4]
    codes = {"double_latent": False, "latent_channels": 32, "base_channels": 32, "resolution": 16, "embed_dim": 8,
             "num_embeddings": 8, "channel_multiplier": [1], "num_res_blocks": 1}  # fmt: skip
    vocabulary = {f"IMGIMG{chr(65 + i)}Z": i for i in range(8)} | {"<image>": IMAGE}
    model = transformers.ChameleonForConditionalGeneration(
        transformers.ChameleonConfig(**TEXT | {"vq_config": codes, "vocabulary_map": vocabulary})
    )
    attach(model, "affine")
    model(torch.randint(10, IMAGE, (1, 6))).logits.sum().backward()
    assert all(p.grad is not None for layer in mechanisms(model) for p in layer.parameters())
    assert model.config.vq_config._attn_implementation != IMPLEMENTATION
