"""The update of the running averages in one launch is bitwise the one of PyTorch's operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from affine_attention.nn.commit import _stack_collected, _update
from affine_attention.ops.fused import INTERPRETED, running_average
from affine_attention.ops.fused.running_average import update_running_alpha

from ...interpreter import run_in_the_interpreter

DEVICE = "cpu" if INTERPRETED else "cuda"
needs_kernels = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU")


def draw(layers, heads):
    torch.manual_seed(layers)
    running = [torch.rand(heads, device=DEVICE) for _ in range(layers)]
    collected = [torch.rand(heads + 1, dtype=torch.float64, device=DEVICE) * 100 + 1 for _ in range(layers)]
    return running, collected


@needs_kernels
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (3, 9), (30, 9), (2, 33)])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_the_update_is_bitwise_that_of_pytorch(layers, heads, momentum):
    for _ in range(3):  # the first launch goes through Triton, later ones by address
        running, collected = draw(layers, heads)
        expected = [x.clone() for x in running]
        _update(expected, _stack_collected(expected, collected), momentum)
        assert update_running_alpha(running, collected, momentum)
        for found, wanted in zip(running, expected, strict=True):
            assert torch.equal(found, wanted)


@needs_kernels
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, "no token", 1e300])
def test_a_layer_without_a_finite_mean_keeps_its_average(broken):
    running, collected = draw(3, 5)
    if broken == "no token":
        collected[1].zero_()
    else:
        collected[1][2] = broken
    before = [x.clone() for x in running]
    assert update_running_alpha(running, collected, 0.5)
    assert torch.equal(running[1], before[1])
    assert not torch.equal(running[0], before[0])
    assert not torch.equal(running[2], before[2])


@needs_kernels
def test_more_layers_than_one_launch_takes(monkeypatch):
    monkeypatch.setattr(running_average, "MAX_LAYERS", 4)
    running, collected = draw(10, 3)
    expected = [x.clone() for x in running]
    _update(expected, _stack_collected(expected, collected), 0.9)
    assert update_running_alpha(running, collected, 0.9)
    assert torch.equal(torch.stack(running), torch.stack(expected))


@needs_kernels
def test_unaligned_averages_are_left_to_pytorch():
    running, collected = draw(2, 4)
    running[1] = torch.rand(9, device=DEVICE)[1:5]
    before = [x.clone() for x in running]
    assert not update_running_alpha(running, collected, 0.9)
    assert torch.equal(torch.stack(running), torch.stack(before))


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests above run the kernel")
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
