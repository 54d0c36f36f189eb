"""Kernels of the operator, by family, and the plan that chooses among them; Triton is imported on first use.

This file holds what decides whether they can run, in forms that a compiled graph takes as constants.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

MIN_CAPABILITY = 80
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on the CPU: slow, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def capability(device_index: int) -> int:
    """The compute capability of a CUDA GPU, 90 for 9.0: a number, since a graph does not compare tuples."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


def runs_on(device_index: int) -> bool:
    """Whether the Triton kernels run on a CUDA GPU, or in the interpreter."""
    return HAS_TRITON and (INTERPRETED or capability(device_index) >= MIN_CAPABILITY)


# What torch.compiler.assume_constant_result sets; calling it here would load the compiler with every import.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
runs_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_device(device: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function with a GPU as the current one; costs nothing where it already is. -1 is the CPU."""
    if device < 0 or torch._C._cuda_getDevice() == device:
        return function(*arguments)
    with torch.cuda.device(device):
        return function(*arguments)


def capability_of(x: torch.Tensor) -> int:
    """The compute capability of the GPU that holds a CUDA tensor."""
    index = x.device.index
    return capability(0 if index is None else index)
