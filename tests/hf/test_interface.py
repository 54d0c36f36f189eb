"""The attention function and its hooks: true weights on demand, and clear words for what it cannot do."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaForCausalLM

from affine_attention import Mechanism
from affine_attention.hf import WeightsNotice
from affine_attention.hf.interface import IMPLEMENTATION, affine_attention
from affine_attention.nn import PRESETS

from .models import FAMILIES, make_model, make_tokens, oracle, plain_model
from .test_attach import EXACT
from .test_masks import packed_positions, padded_rows


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize("family", FAMILIES)
def test_output_attentions_are_the_true_weights(family):
    model = make_model(family, Mechanism.named("affine", bias_length=4), torch.float64)
    out = model(make_tokens(), output_attentions=True, use_cache=False)
    with oracle():
        truth = model(make_tokens(), output_attentions=True, use_cache=False)
    assert len(out.attentions) == len(truth.attentions) == 2
    for mine, theirs in zip(out.attentions, truth.attentions, strict=True):
        assert mine.shape == (2, 4, 12, 12)
        torch.testing.assert_close(mine, theirs, **EXACT)
        assert (mine < 0).any(), "affine weights may be negative, and these are"
    torch.testing.assert_close(out.logits, model(make_tokens()).logits, **EXACT)


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize("mechanism", PRESETS)
def test_weights_of_every_mechanism_with_padding_and_packing(mechanism):
    model = make_model("llama", Mechanism.named(mechanism, bias_length=4), torch.float64)
    tokens, mask = padded_rows("right")
    for inputs in (
        {"input_ids": tokens, "attention_mask": mask},
        {"input_ids": make_tokens(), "position_ids": packed_positions()},
    ):
        out = model(**inputs, output_attentions=True, use_cache=False)
        with oracle():
            truth = model(**inputs, output_attentions=True, use_cache=False)
        for mine, theirs in zip(out.attentions, truth.attentions, strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)


def test_weights_cost_a_notice_and_nothing_when_not_asked_for():
    model = make_model()
    with pytest.warns(WeightsNotice, match="a second time"):
        model(make_tokens(), output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not model(make_tokens()).attentions
    model.config.output_attentions = True
    with pytest.warns(WeightsNotice):
        assert model(make_tokens()).attentions[0].shape == (2, 4, 12, 12)


def test_our_attention_without_a_mechanism_is_an_error():
    plain = LlamaForCausalLM(plain_model().config)
    plain.config._attn_implementation = IMPLEMENTATION
    with pytest.raises(ValueError, match=r"call affine_attention.hf.attach\(model, mechanism\)"):
        plain(make_tokens())


@pytest.mark.parametrize("name", ["position_bias", "s_aux", "softcap"])
def test_what_no_mechanism_has_is_refused(name):
    model = make_model()
    module = model.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"{name} is not part of any mechanism, but LlamaAttention passes one"):
        affine_attention(module, query, key, key, None, affine_hidden=torch.randn(1, 3, 32), **{name: 1.0})


def test_the_hidden_state_is_what_feeds_q_proj():
    model = make_model()
    seen = {}
    layer = model.model.layers[1].self_attn
    layer.q_proj.register_forward_pre_hook(lambda module, args: seen.update(query=args[0]))
    layer.affine.scale.proj.register_forward_pre_hook(lambda module, args: seen.update(alpha=args[0]))
    model(make_tokens())
    assert seen["query"] is seen["alpha"]


def test_a_packed_row_cannot_meet_a_cache():
    model = make_model()
    segments = torch.tensor([[0, 0, 1]])
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="packed position_ids cannot be used with cached keys"):
        affine_attention(
            model.model.layers[0].self_attn, query, torch.cat([key, key], 2), torch.cat([key, key], 2),
            torch.ones(1, 1, 1, 0, dtype=torch.uint8), affine_hidden=torch.randn(1, 3, 32), affine_segments=segments,
        )  # fmt: skip
