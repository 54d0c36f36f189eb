"""The benchmark of the loss runs on a small shape, and keeps the memory that it promises."""

from __future__ import annotations

import sys

import pytest

from affine_attention.lab.distill import chunks
from benchmarks import distill
from benchmarks.measure import peak_memory


def test_it_writes_its_table(tmp_path, monkeypatch):
    tiny = distill.Shape("tiny", 64, 1000, 16, 24)
    monkeypatch.setitem(distill.SHAPES, "cpu", (tiny,))
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_divergence", None)  # its import takes seconds
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["distill", "--device", "cpu", "--rounds", "1", "--shapes", "tiny"])
    distill.main()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "tiny: 64 tokens, V1000, M16, teacher M24 | plain, all logits |" in text
    assert "| ours |" in text
    assert "Not measured, because not installed: " in text
    assert "TRL" in text


def test_an_unknown_shape(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["distill", "--device", "cpu", "--shapes", "huge"])
    with pytest.raises(SystemExit):
        distill.main()
    assert "cpu-128k" in capsys.readouterr().err


def test_memory_at_a_large_vocabulary():
    """The bar is 0.3 of the plain version, at a shape that takes a second."""
    bench = distill.Bench(distill.Shape("small", 512, 32768, 64, 64), "cpu")
    plain, ours = (peak_memory(bench.with_backward(loss)) for loss in (bench.plain, bench.ours))
    assert plain > 4 * 512 * 32768 * 4
    # So few tokens are one chunk: the student's logits, half of the teacher's, the gradients, and a few rows.
    assert ours < 1.5 * 512 * 32768 * 4 + (512 + 32768) * 64 * 4 + 2**24

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunks.CHUNK_BYTES, "cpu", 2**23)
        assert peak_memory(bench.with_backward(bench.ours)) < 0.3 * plain
