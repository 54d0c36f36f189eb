"""Training state is stored by name and restored bitwise."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch
from torch import nn

from affine_attention.lab.training.state import (
    Gathering,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    random_state,
    set_random_state,
    weights,
    whole_on_cpu,
)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("average", torch.rand(3))
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(0, 10, (6,))).logsumexp(-1).sum().backward()
    optimizer.step()


def test_a_copy_with_the_stored_state_continues_like_the_original():
    model = make_model()
    optimizer = make_optimizer(model)
    for seed in range(3):
        step(model, optimizer, seed)
    stored = {name: tensor.clone() for name, tensor in weights(model).items()}
    tensors, settings = optimizer_state(model, optimizer)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    assert "2.weight" not in stored, "a tied weight is stored once"
    assert "exp_avg/0.weight" in tensors

    other = make_model(seed=1)
    other_optimizer = make_optimizer(other)
    load_weights(other, stored.items())
    load_optimizer_state(other, other_optimizer, tensors.items(), json.loads(json.dumps(settings)))
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    assert other[2].weight is other[0].weight
    for (name, a), b in zip(weights(model).items(), weights(other).values(), strict=True):
        assert torch.equal(a, b), name
    again, settings_again = optimizer_state(other, other_optimizer)
    assert list(again) == list(optimizer_state(model, optimizer)[0])
    assert json.dumps(settings_again) == json.dumps(settings)


def test_what_does_not_fit_is_named():
    model = make_model()
    stored = weights(model)
    with pytest.raises(ValueError) as error:
        load_weights(model, [(name, tensor) for name, tensor in stored.items() if name != "1.bias"])
    assert "lacks 1.bias" in str(error.value)
    with pytest.raises(ValueError) as error:
        load_weights(model, (stored | {"average": torch.zeros(4)}).items())
    assert "average [4], but the model has [3]" in str(error.value)
    with pytest.raises(ValueError) as error:
        load_weights(model, (stored | {"more": torch.zeros(4)}).items())
    assert "more" in str(error.value)


def test_an_optimizer_of_other_parameters_is_rejected():
    model = make_model()
    optimizer = make_optimizer(model)
    step(model, optimizer, 0)
    tensors, settings = optimizer_state(model, optimizer)
    settings["groups"][1]["params"].reverse()
    with pytest.raises(ValueError) as error:
        load_optimizer_state(model, optimizer, tensors.items(), settings)
    assert "another order" in str(error.value)


def test_random_states_survive_json():
    torch.rand(3), numpy.random.randn(3), random.gauss(0, 1)
    state = json.loads(json.dumps(random_state()))
    expected = torch.rand(5), numpy.random.randn(5), [random.gauss(0, 1) for _ in range(5)]
    torch.manual_seed(99), numpy.random.seed(99), random.seed(99)
    set_random_state(state)
    assert torch.equal(torch.rand(5), expected[0])
    assert (numpy.random.randn(5) == expected[1]).all()
    assert [random.gauss(0, 1) for _ in range(5)] == expected[2]


def test_gathering_keeps_the_order_of_all_ranks():
    tensors = [torch.zeros(1), torch.ones(2)]
    gathering = Gathering(tensors)
    assert gathering.fetch(tensors[0]) is not None
    gathering.finish()
    wrong = Gathering(tensors)
    with pytest.raises(AssertionError):
        wrong.fetch(tensors[1])
    assert torch.equal(whole_on_cpu(tensors[1]), tensors[1])
