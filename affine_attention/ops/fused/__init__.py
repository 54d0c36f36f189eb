"""Triton kernels of the operator; Triton is imported on first use.

What decides whether they can run is asked once here, in forms that a compiled graph can take as constants.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter runs the kernels on the CPU: slow, for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def capability(device_index: int) -> int:
    """The compute capability of a CUDA GPU, 90 for 9.0: a number, since a graph does not compare tuples."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


# What torch.compiler.assume_constant_result sets; calling it here would load the compiler with every import.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of a tensor the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function launch on the device of its first tensor: Triton takes the current one, which may be another."""

    @functools.wraps(launch)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        with device_of(first):
            return launch(first, *rest)

    # torch.library reads the signature, and would look names up in this module instead of the function's own.
    hints, signature = get_type_hints(launch), inspect.signature(launch)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=hints["return"])  # type: ignore[attr-defined]
    return call


def capability_of(x: torch.Tensor) -> int:
    """The compute capability of the GPU that holds a CUDA tensor."""
    index = x.device.index
    return capability(0 if index is None else index)
