"""The GPU kernels of the operator, by family, and the plan that chooses among them; Triton is imported on first use.

This file decides whether the kernels can run, with functions whose results a compiled graph treats as constants.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

MIN_CAPABILITY = 80
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on the CPU, slowly, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def capability(device_index: int) -> int:
    """The compute capability of a CUDA GPU, 90 for 9.0: an integer, since a compiled graph cannot compare tuples."""
    return _capability(device_index)


@functools.cache
def _capability(device_index: int) -> int:
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def runs_on(device_index: int) -> bool:
    """True if the Triton kernels run on a CUDA GPU, or in the interpreter."""
    return HAS_TRITON and (INTERPRETED or capability(device_index) >= MIN_CAPABILITY)


# This is what torch.compiler.assume_constant_result does; calling it would import the compiler with the package.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
runs_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_device(device: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function with a GPU as the current device; free of cost if it already is. -1 is the CPU."""
    if device < 0 or torch._C._cuda_getDevice() == device:
        return function(*arguments)
    with torch.cuda.device(device):
        return function(*arguments)


def capability_of(x: torch.Tensor) -> int:
    """The compute capability of the GPU that holds a CUDA tensor."""
    index = x.device.index
    return capability(0 if index is None else index)
