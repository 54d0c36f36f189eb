"""Adding a mechanism to a model: initial weights, also for a plain checkpoint, and missing tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import attach, classes, detach
from affine_attention.nn import PRESETS

from .models import make_model, make_tokens, mechanisms, plain_model, running_alphas
from .test_classes import assert_same


def test_init_weights_does_not_change_the_gates():
    model = attach(plain_model(), "affine_gated", start="identity")
    model.init_weights()
    for layer in mechanisms(model):
        assert all(not p.any() for p in layer.parameters())
        assert torch.equal(layer.scale.running_alpha, torch.full((4,), 0.5))


def test_init_weights_keeps_the_collected_sums():
    model = make_model().train().to(torch.float64)
    model(make_tokens()).logits.sum().backward()
    pending = [layer.scale.collected.grad.clone() for layer in mechanisms(model)]
    model.init_weights()
    for layer, sums in zip(mechanisms(model), pending, strict=True):
        assert torch.equal(layer.scale.collected.grad, sums)


def test_new_weights_have_the_dtype_and_mode_of_the_model():
    model = attach(plain_model(dtype=torch.bfloat16), "affine_gated")
    layer = mechanisms(model)[0]
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer.scale.running_alpha.dtype == torch.float32
    assert not layer.training
    assert abs(layer.gate_proj.weight.float().std() - 0.02) < 0.004


@pytest.mark.parametrize("mechanism", PRESETS)
def test_a_plain_checkpoint_gets_initialised_mechanisms(mechanism, tmp_path):
    """An attached class loads a plain folder through the meta device: old weights are loaded, new ones initialised."""
    plain = plain_model()
    plain.save_pretrained(tmp_path)
    config = classes.AffineLlamaConfig(
        **plain.config.to_dict(),
        affine_attention={"mechanism": Mechanism.named(mechanism, sink_start=1.5).to_dict(), "start": "fresh"},
    )
    loaded, info = classes.AffineLlamaForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    old = plain.state_dict()
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, old[name]) if name in old else name in info["missing_keys"]
    for layer in mechanisms(loaded):
        for name, parameter in layer.named_parameters():
            if name == "sink":
                assert torch.equal(parameter, torch.full((4,), 1.5))
            elif parameter.dim() == 1:
                ones = name in ("scale.head_alpha", "norm_weight")
                assert torch.equal(parameter, torch.full_like(parameter, 1.0 if ones else 0.0)), name
            else:
                assert abs(parameter.std() - 0.02) < 0.006, name
        if layer.mechanism.sink == "zero":
            assert torch.equal(layer.sink, torch.zeros(4))
        if layer.mechanism.has_running_alpha:
            assert torch.equal(layer.scale.running_alpha, torch.zeros(4))
    loaded.train()
    loaded(make_tokens(), labels=make_tokens()).loss.backward()
    commit_running_alpha(loaded)
    if PRESETS[mechanism].has_running_alpha:
        assert (running_alphas(loaded) > 0).all()


@pytest.mark.parametrize("mechanism", ["affine_gated", "affine_low_start", "affine_free", "per_head_alpha"])
def test_a_plain_checkpoint_with_the_identity_start(mechanism, tmp_path):
    plain = plain_model()
    plain.save_pretrained(tmp_path)
    settings = {"mechanism": Mechanism.named(mechanism).to_dict(), "start": "identity"}
    config = classes.AffineLlamaConfig(**plain.config.to_dict(), affine_attention=settings)
    loaded = classes.AffineLlamaForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(loaded(make_tokens()).logits, plain(make_tokens()).logits)
    loaded.save_pretrained(tmp_path / "attached")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "attached")
    assert_same(again, loaded)
    assert torch.equal(detach(again)(make_tokens()).logits, plain(make_tokens()).logits)


def test_a_checkpoint_without_running_alpha_is_an_error(tmp_path):
    make_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "running_alpha" not in k}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"has the weights of LlamaAttention.affine but not its scale.running_alpha"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
