"""A pause depends on the memory bandwidth of the GPU; on the CPU work runs immediately."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from affine_attention.ops.fused.shared import side_stream

H200 = SimpleNamespace(memory_bus_width=6144, memory_clock_rate=3_201_000, clock_rate=1_980_000)


@pytest.fixture
def properties(monkeypatch):
    found = {}
    side_stream.cycles_to_move.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found["gpu"])
    yield found
    side_stream.cycles_to_move.cache_clear()


def test_cycles_depend_on_the_gpu(properties):
    properties["gpu"] = H200
    on_h200 = side_stream.cycles_to_move(10**9, torch.device("cuda", 0))
    assert 350_000 < on_h200 < 450_000
    properties["gpu"] = SimpleNamespace(**{**vars(H200), "memory_bus_width": 384})
    assert side_stream.cycles_to_move(10**9, torch.device("cuda", 1)) == pytest.approx(16 * on_h200, rel=1e-4)
    properties["gpu"] = SimpleNamespace()  # a version of PyTorch without these properties
    assert side_stream.cycles_to_move(10**9, torch.device("cuda", 2)) == 400_000


def test_on_a_cpu_work_runs_immediately():
    done = []
    side = side_stream.SideStream(torch.device("cpu"))
    side.run(lambda: done.append(1), pause=1000)
    assert done == [1]
    side.join()
