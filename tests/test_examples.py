"""The example that compares mechanisms runs, is reproducible and prints the expected row sums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
