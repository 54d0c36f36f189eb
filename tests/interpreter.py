"""Runs a test file in Triton's interpreter, in a separate process: the setting is read when kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IN_FULL = "AFFINE_TESTS_IN_FULL"


def run_in_the_interpreter(path: str, *options: str, in_full: bool = False) -> None:
    """Fails with the output of pytest if a test of the file fails. `in_full` includes the cases of `skip_for_time`."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", IN_FULL: "1" if in_full else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, *options]
    limit = 3000 if in_full else 600
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def skip_for_time() -> None:
    """Skips a case of a test in the interpreter, unless `make test-all` runs it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and not os.environ.get(IN_FULL):
        pytest.skip("slow in the interpreter: runs in make test-all")
