"""A sample of `python -m tests.lab.training.crash`: runs that are killed end like one that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent


def crash(*options: str) -> str:
    command = [sys.executable, "-m", "tests.lab.training.crash", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def totals(table: str) -> tuple[int, int]:
    name, runs, recovered = table.strip().splitlines()[-1].split()
    assert name == "all"
    return int(runs), int(recovered)


def test_a_few_kills_lose_nothing():
    runs, recovered = totals(crash("--random", "4", "--operations", "3"))
    assert recovered == runs
    assert runs >= 12


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["softmax", "affine"])
def test_many_kills_lose_nothing(mechanism):
    runs, recovered = totals(crash("--random", "20", "--every-file-operation", "--mechanism", mechanism))
    assert recovered == runs
    assert runs >= 150
