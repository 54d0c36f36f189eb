"""Rotary positions: the rotation itself, and the tables that layers share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from affine_attention import KeyValueCache, SelfAttention
from affine_attention.nn import rotary
from affine_attention.nn.rotary import rotate


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch):
    monkeypatch.setattr(rotary, "_tables", {})


def test_scores_depend_on_distance_only_and_lengths_are_kept():
    query, key = torch.randn(1, 2, 1, 8, dtype=torch.float64), torch.randn(1, 2, 1, 8, dtype=torch.float64)

    def score(i, j):
        at = [torch.tensor([[p]]) for p in (i, j)]
        return (rotate(query, at[0], 10000.0) * rotate(key, at[1], 10000.0)).sum(-1)

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert not torch.allclose(score(7, 3), score(8, 3))
    rotated = rotate(query, torch.tensor([[11]]), 10000.0)
    torch.testing.assert_close(rotated.norm(dim=-1), query.norm(dim=-1))
    torch.testing.assert_close(rotate(query, torch.tensor([[0]]), 10000.0), query)


def test_half_precision_is_rotated_in_fp32():
    x = torch.randn(1, 1, 1, 8)
    at = torch.tensor([[100_003]])
    exact = rotate(x.bfloat16().double(), at, 10000.0)
    torch.testing.assert_close(rotate(x.bfloat16(), at, 10000.0).double(), exact, rtol=0.01, atol=0.02)


class CountCosines(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.ops.aten.cos.default
        return function(*args, **(kwargs or {}))


def test_layers_share_one_table_and_compute_it_once():
    layers = [SelfAttention(32, 4, 2) for _ in range(3)]
    hidden, mask = torch.randn(2, 8, 32), torch.ones(2, 8, dtype=torch.bool)
    with torch.no_grad(), CountCosines() as count:
        for layer in layers:
            layer(hidden)
            layer(hidden, mask=mask)
            layer(hidden[:, :5], segment_ids=torch.zeros(2, 5).long())
    assert count.calls == 1
    assert not any("cos" in name for name in layers[0].state_dict())


def test_decoding_extends_the_table_a_logarithmic_number_of_times():
    layer, cache = SelfAttention(32, 4, 2).eval(), KeyValueCache()
    hidden = torch.randn(1, 200, 32)
    with torch.no_grad(), CountCosines() as count:
        steps = [layer(part, cache=cache) for part in hidden.split(1, 1)]
    assert count.calls <= 9
    torch.testing.assert_close(torch.cat(steps, 1), layer(hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "mask", "segments"])
def test_the_table_equals_explicit_positions(kind):
    layer, hidden = SelfAttention(32, 4, 2).double(), torch.randn(2, 7, 32).double()
    given, positions = {}, torch.arange(7).expand(2, 7)
    if kind == "mask":
        given["mask"] = torch.arange(7)[None] >= torch.tensor([[0], [3]])
        positions = torch.stack([positions[0], (positions[0] - 3).clamp(min=0)])
    if kind == "segments":
        given["segment_ids"] = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [4, 4, 1, 1, 1, 1, 1]])
        positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]])
    assert torch.equal(layer(hidden, **given), layer(hidden, positions=positions, **given))


def test_every_dtype_and_device_has_its_own_table():
    layer, hidden = SelfAttention(32, 4, 2), torch.randn(1, 8, 32)
    whole = layer(hidden)
    meta = copy.deepcopy(layer).to("meta")
    assert meta(hidden.to("meta")).device.type == "meta"
    double = copy.deepcopy(layer).double()(hidden.double())
    torch.testing.assert_close(double.float(), whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(double.float(), double)
    assert copy.deepcopy(layer).bfloat16()(hidden.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(layer(hidden), whole)
    kinds = {(device.type, dtype) for _, _, device, dtype in rotary._tables}
    assert kinds == {("cpu", torch.float32), ("meta", torch.float32), ("cpu", torch.float64)}


def test_tables_made_in_inference_mode_serve_training():
    layer, hidden = SelfAttention(32, 4, 2), torch.randn(1, 8, 32)
    with torch.inference_mode():
        layer(hidden)
    layer(hidden).sum().backward()
    assert layer.q_proj.weight.grad.abs().sum() > 0


def test_fake_tensors_leave_no_table_behind():
    with FakeTensorMode():
        rotary.cos_sin_table(4, 8, 10000.0, torch.device("cpu"), torch.float32)
    assert not rotary._tables


def test_a_compiled_layer_equals_the_eager_one_before_and_after_a_table_exists():
    layer, hidden = SelfAttention(32, 4, 2), torch.randn(2, 8, 32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    first = compiled(hidden)
    assert not rotary._tables
    torch.testing.assert_close(first, layer(hidden))
    torch.testing.assert_close(compiled(hidden), first)


def test_the_number_of_tables_is_bounded():
    for theta in range(1, 40):
        rotary.cos_sin_table(4, 8, float(theta), torch.device("cpu"), torch.float32)
    assert len(rotary._tables) <= rotary.MAX_TABLES
