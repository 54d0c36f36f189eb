"""The example that compares mechanisms runs, is reproducible and prints the expected row sums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_compare_mechanisms():
    command = [sys.executable, "-m", "examples.compare_mechanisms", "--steps", "5", "--mechanisms", "softmax", "affine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {
        line.split()[0]: line.split() for line in done.stdout.splitlines() if line.startswith(("softmax", "affine"))
    }
    assert float(rows["softmax"][4]) == 1.0  # softmax rows sum to one
    assert 0 < float(rows["affine"][4]) < 1.0
    assert rows["affine"][1] == "1,152"
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert [line.split()[:7] for line in again.stdout.splitlines()] == [
        line.split()[:7] for line in done.stdout.splitlines()
    ]


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_nano_gpt_learns(mechanism):
    command = [sys.executable, "examples/nano_gpt.py", mechanism]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first, last = (float(line.split()[-1]) for line in lines[:2])
    assert last < first - 1, "bits of text are learned in twenty steps"
    averages = [line for line in lines if line.startswith("running alpha")]
    assert bool(averages) == (mechanism == "affine")
    if averages:
        numbers = [float(word.strip("[],")) for word in averages[0].split(":")[1].split()]
        assert all(0.3 < number < 0.7 for number in numbers), "alpha starts at a half"
    changed = (ROOT / "examples/nano_gpt.py").read_text().count("# affine")
    assert changed - 1 <= 10, "a training script changes in at most ten lines (one mark is in the docstring)"
