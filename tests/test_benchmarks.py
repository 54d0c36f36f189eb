"""The benchmarks run, on small shapes, and their numbers mean what they say."""

from __future__ import annotations

import sys
import time

import torch

from benchmarks import accuracy, attention
from benchmarks.measure import median_seconds, peak_memory


def test_peak_memory_counts_what_is_held_at_once():
    def call():
        a = torch.empty(2**20, dtype=torch.uint8)
        b = torch.empty(2**21, dtype=torch.uint8)
        del a, b
        torch.empty(2**20, dtype=torch.uint8)

    assert 3 * 2**20 <= peak_memory(call) < 3 * 2**20 + 2**16


def test_median_is_per_function():
    times = median_seconds({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, rounds=3)
    assert times["slow"] > 0.02 > times["fast"]


def test_attention_benchmark_writes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "CPU_SHAPES", (attention.Shape("tiny", 1, 4, 2, 128, 16),))
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["attention", "--device", "cpu", "--rounds", "2"])
    attention.main()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "tiny: B1 H4/2 T128 D16" in text
    assert "the paper's formula" in text
    assert "composed on cpu_flash" in text
    assert "Hardware: " in text


def test_accuracy_benchmark_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(accuracy, "grid_cases", lambda count, device: attention_cases())
    monkeypatch.setattr(sys, "argv", ["accuracy", "--cases", "2"])
    accuracy.main()
    (file,) = tmp_path.iterdir()
    assert "| float32 | grad_query | 2 |" in file.read_text()


def attention_cases():
    from affine_attention.testing import Case

    return [Case("affine"), Case("sink", queries=7, keys=7)]
