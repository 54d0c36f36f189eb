"""Fake quantisation rounds what it says, changes no weight, and is removed again."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.evaluation.quantisation import VARIANTS, Quantisation, linear_layers, quantise, quantised
from tests.hf.models import FAMILIES, make_model


def test_numbers_are_integers_times_a_scale():
    x = torch.tensor([[1.0, -0.5, 0.26], [0.0, 0.0, 0.0], [100.0, 1.0, -100.0]], dtype=torch.float64)
    per_row = quantise(x, 4, -1)
    torch.testing.assert_close(per_row[0], torch.tensor([7.0, -4.0, 2.0], dtype=torch.float64) / 7)  # -3.5 to even
    assert torch.equal(per_row[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(per_row[2], torch.tensor([100.0, 0.0, -100.0], dtype=torch.float64))
    whole = quantise(x, 8, None)
    scale = 100 / 127
    torch.testing.assert_close(whole, (x / scale).round() * scale)
    assert quantise(x.bfloat16(), 8, None).dtype == torch.bfloat16
    assert len(quantise(torch.linspace(-1, 1, 1000), 4, None).unique()) == 15


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_model_computes_with_quantised_inputs_and_weights(family, name):
    how = VARIANTS[name]
    model = make_model(family, "affine_gated", torch.float64)
    layer = model.get_submodule("model.layers.1.mlp.down_proj" if family == "llama" else "transformer.h.1.mlp.c_fc")
    seen = []
    hook = layer.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    ids = torch.arange(1, 12)[None]
    before = model(ids).logits
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with quantised(model, how) as count:
        changed = model(ids).logits
    hook.remove()
    assert count == len(linear_layers(model)) == 2 * (8 if family == "llama" else 5)
    x, out = seen[1]
    dim = None if how.scale == "tensor" else -1
    x = x if how.inputs is None else quantise(x, how.inputs, dim)
    weight = layer.weight if family == "llama" else layer.weight.T
    weight = weight if how.weights is None else quantise(weight, how.weights, 1)
    bias = 0 if layer.bias is None else layer.bias
    torch.testing.assert_close(out, x @ weight.T + bias)
    assert not torch.allclose(changed, before, rtol=1e-6)
    assert torch.equal(model(ids).logits, before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_the_head_and_alpha_are_not_quantised_and_an_error_inside_restores_the_model():
    for family in FAMILIES:
        model = make_model(family, "affine_gated")
        layers = linear_layers(model)
        assert model.get_output_embeddings() not in layers
        assert not any(module.scale.proj in layers for module in model.modules() if hasattr(module, "gate_proj")
                       and hasattr(module, "scale"))  # fmt: skip
        assert sum(module.gate_proj in layers for module in model.modules() if hasattr(module, "scale")
                   and getattr(module, "gate_proj", None) is not None) == 2  # fmt: skip
    with pytest.raises(KeyError), quantised(model, Quantisation(inputs=8)):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in layers)
    assert str(VARIANTS["w8a8_token"]) == "weights int8 per channel, inputs int8 per token"
