"""attach and detach: every family and mechanism against the oracle, the identity start, and invalid calls."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch

from affine_attention import Mechanism
from affine_attention.hf import BiasLengthNotice, WeightsNotice, attach, detach
from affine_attention.nn import PRESETS

from .models import EVERY_CASE, FAMILIES, make_model, make_tokens, mechanisms, oracle, plain_model

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    (logits * torch.sin(torch.arange(logits.numel()).view_as(logits))).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equals_oracle(model, **inputs):
    logits, gradients = loss_and_gradients(model, **inputs)
    with oracle():
        expected, truth = loss_and_gradients(model, **inputs)
    torch.testing.assert_close(logits, expected, **EXACT)
    assert gradients.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(gradients[name], truth[name], **EXACT, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("family", "mechanism"), EVERY_CASE)
def test_logits_and_every_gradient_equal_the_oracle(family, mechanism):
    model = make_model(family, Mechanism.named(mechanism, bias_length=6), torch.float64)
    assert_equals_oracle(model, input_ids=make_tokens())
    owned = sum(p.numel() for layer in mechanisms(model) for p in layer.parameters())
    assert owned == 2 * PRESETS[mechanism].extra_parameters(32, 4, 8)


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_restores_the_model_bit_for_bit(family):
    model = plain_model(family)
    before, settings, tokens = copy.deepcopy(model.state_dict()), model.config.to_dict(), make_tokens()
    logits, kind = model(tokens).logits, type(model)
    for mechanism, start in (("affine_gated", "identity"), ("sink", "fresh"), ("affine", "fresh")):
        attach(model, mechanism, start)
        assert type(model) is not kind
        assert isinstance(model, kind)
        assert detach(model) is model
        assert type(model) is kind
        assert model.config.to_dict() == settings
        assert model.config._attn_implementation == "sdpa"
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        assert torch.equal(model(tokens).logits, logits)
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("mechanism", [name for name, each in PRESETS.items() if each.identity_scale is not None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_start_is_bitwise_equal_and_the_gates_can_learn(mechanism, dtype):
    plain = plain_model(dtype=dtype)
    model = attach(copy.deepcopy(plain), mechanism, start="identity")
    tokens = make_tokens()
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    for layer in mechanisms(model):
        for name, parameter in layer.named_parameters():
            assert parameter.grad.abs().sum() > 0, name
    gates = [p.detach().clone() for layer in mechanisms(model) for p in layer.parameters()]
    torch.optim.SGD(model.parameters(), 0.1).step()
    for before, after in zip(gates, (p for layer in mechanisms(model) for p in layer.parameters()), strict=True):
        assert not torch.equal(before, after)


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_start_in_every_family(family):
    plain = plain_model(family)
    model = attach(copy.deepcopy(plain), "affine_gated", start="identity")
    assert torch.equal(model(make_tokens()).logits, plain(make_tokens()).logits)


def test_copies_and_pickles_are_independent():
    model = make_model()
    tokens = make_tokens()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model)
        assert torch.equal(twin(tokens).logits, model(tokens).logits)
        detach(twin)
    assert torch.isfinite(model(tokens).logits).all()


def test_experts_can_still_be_switched():
    """Transformers decides this from the source file of a model's class, which is a different file for our classes."""
    model = make_model("mixtral")
    logits = model(make_tokens()).logits
    model.set_experts_implementation("grouped_mm")
    assert model.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(model(make_tokens()).logits, logits, rtol=1e-4, atol=1e-4)


def test_models_that_share_a_configuration_stay_independent():
    first = plain_model()
    second = type(first)(first.config).eval()
    logits = second(make_tokens()).logits
    attach(first, "affine")
    assert type(second.config) is not type(first.config)
    assert torch.equal(second(make_tokens()).logits, logits)
    assert all(getattr(m, "config", first.config) is first.config for m in first.modules())


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("eager", "reference"),
        ("sdpa", "composed"),
        ("flash_attention_2", "fused"),
        ("kernels-community/fa3-flash", "fused"),
    ],
)
def test_names_of_transformers_choose_an_implementation_of_the_operator(name, ours):
    model = make_model()
    tokens = make_tokens()
    expected = model(tokens).logits
    for switch in (model.set_attn_implementation, lambda name: setattr(model.config, "_attn_implementation", name)):
        switch("affine_attention")
        assert model.config._attn_implementation == "affine_attention"
        switch(name)
        assert model.config._attn_implementation == f"affine_attention_{ours}"
        if ours == "fused":
            with pytest.raises(ValueError, match='impl="fused" needs a CUDA GPU'):
                model(tokens)
        else:
            torch.testing.assert_close(model(tokens).logits, expected)
    detach(model)
    assert model.config._attn_implementation == "sdpa"


def test_names_that_are_set_from_outside_choose_too():
    """A composite model writes into the configurations of its parts."""
    model = make_model()
    model.config._attn_implementation_internal = "eager"
    assert model.config._attn_implementation == "affine_attention_reference"
    tokens = make_tokens()
    with pytest.warns(WeightsNotice):
        weights = model(tokens, output_attentions=True).attentions
    assert not torch.allclose(weights[0].sum(-1), torch.ones(()))  # alpha: no softmax


@pytest.mark.parametrize("switch", ["flex_attention", "paged|flex_attention", 3])
def test_attention_cannot_be_switched_away_behind_our_back(switch):
    model = make_model()
    for change in (model.set_attn_implementation, lambda name: setattr(model.config, "_attn_implementation", name)):
        with pytest.raises(ValueError, match=rf"while a mechanism is attached, got {re.escape(repr(switch))}; call"):
            change(switch)
    assert model.config._attn_implementation == "affine_attention"
    # A configuration that is not ours reaches a layer.
    module = model.model.layers[0].self_attn
    module.config = plain_model().config
    for call in (lambda: model(make_tokens()), lambda: module(torch.zeros(1, 1, 32))):
        with pytest.raises(ValueError, match="while a mechanism is attached, got 'sdpa'"):
            call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attach(torch.nn.Linear(2, 2), "affine"), "model must be a PreTrainedModel"),
        (lambda: attach(plain_model(), "afine"), "did you mean 'affine'?"),
        (lambda: attach(plain_model(), "affine", start="zero"), "start must be one of 'fresh', 'identity', got 'zero'"),
        (lambda: attach(plain_model(), "sink", start="identity"), "start=\"identity\" does not work for 'sink'"),
        (lambda: detach(plain_model()), "model must have a mechanism to detach, got a plain LlamaForCausalLM"),
        (
            lambda: make_model(attention_dropout=0.1).train()(make_tokens()),
            "dropout on attention weights is not part of any mechanism, got 0.1",
        ),
        (
            lambda: make_model(mechanism=Mechanism.named("affine", bias_length="keys")).generate(make_tokens()),
            'bias_length="keys" cannot generate',
        ),
    ],
)
def test_invalid_calls_raise_clear_errors(call, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert words in str(caught.value)


def test_bias_length_keys_trains_but_rejects_a_cache():
    model = make_model(mechanism=Mechanism.named("affine", bias_length="keys"))
    tokens = make_tokens()
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot generate"):
        model(tokens[:, :1], past_key_values=cache)


def test_a_preset_says_where_its_divisor_is_longer_than_the_model():
    with pytest.warns(BiasLengthNotice, match=r"N = 2048, and the sequences of this model have at most 512 tokens"):
        attach(plain_model(), "affine")
    with warnings.catch_warnings():
        warnings.simplefilter("error", BiasLengthNotice)
        attach(plain_model(), "gated")  # no bias
        attach(plain_model(), Mechanism.named("affine"))  # chosen on purpose
        attach(plain_model(max_position_embeddings=2048), "affine")


def test_identity_start_scales_a_weight_that_layers_share_once():
    """As in zamba, whose attention modules are several and their weights one."""
    plain = plain_model()
    first, second = (layer.self_attn for layer in plain.model.layers)
    second.o_proj.weight = first.o_proj.weight
    expected, before = plain(make_tokens()).logits, first.o_proj.weight.clone()
    model = attach(plain, "affine_gated", start="identity")
    assert torch.equal(model(make_tokens()).logits, expected)
    detach(model)
    assert torch.equal(first.o_proj.weight, before)
