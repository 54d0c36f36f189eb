"""Layers are compiled once per model, and other compiled code of the process keeps its graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from affine_attention.lab.training.compilation import compile_layers

COMPILE = torch.compile


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        return x + self.proj(x).tanh()


class Model(nn.Sequential):
    _no_split_modules = ("Layer",)


@pytest.fixture
def counter(monkeypatch):
    """Counts graphs instead of calling inductor."""
    counted = CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda f, **options: COMPILE(f, backend=counted))
    with torch.no_grad():  # with gradients, the first layer has a graph of its own: its input needs none
        yield counted


def make_model(width: int) -> Model:
    return Model(*(Layer(width) for _ in range(3)))


def test_all_layers_of_a_model_share_one_graph(counter):
    model = make_model(4)
    expected = model(torch.ones(2, 4))
    compile_layers(model, None)
    assert torch.equal(model(torch.ones(2, 4)), expected)
    model(torch.zeros(2, 4))
    assert counter.frame_count == 1
    assert "0.proj.weight" in model.state_dict()


def test_many_models_in_one_process_are_all_compiled(counter):
    """dynamo falls back to eager code after `recompile_limit` graphs of one code object."""
    number = torch._dynamo.config.recompile_limit + 3
    for width in range(2, 2 + number):
        model = make_model(width)
        compile_layers(model)
        model(torch.ones(2, width))
    assert counter.frame_count == number


def test_other_compiled_functions_keep_their_graphs(counter):
    graphs = CompileCounter()
    mine = COMPILE(lambda x: x.sin() + 1, backend=graphs)
    mine(torch.ones(3))
    model = make_model(4)
    compile_layers(model)
    model(torch.ones(2, 4))
    mine(torch.ones(3))
    assert graphs.frame_count == 1, "compile_layers must not reset dynamo"
