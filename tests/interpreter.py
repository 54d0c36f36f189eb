"""Runs a test file in Triton's interpreter, in its own process, since the switch is read when kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys


def run_in_the_interpreter(path: str, *options: str) -> None:
    """Fails with the output of pytest if a test of the file fails."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
