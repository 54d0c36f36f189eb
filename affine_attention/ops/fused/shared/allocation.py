"""Allocates tensors of known shapes with little more overhead than the caching allocator itself.

`torch.empty` parses its arguments and goes through the dispatcher, which takes as long as a kernel launch. Inductor has
a function that skips both for a known shape, strides and dtype; it allocates on the current device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...call import TensorSpec

Allocate = Callable[[], Tensor]


def allocator(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
    """Returns a function that allocates an uninitialised tensor; a GPU must be the current device when it is called."""
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type == "cuda" and fast is not None:
        return functools.partial(fast, tuple(shape), tuple(strides), dtype)
    return functools.partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)


def like(spec: TensorSpec) -> Allocate:
    """Allocates like torch.empty_like of such a tensor."""
    return allocator(spec.shape, spec.fresh_strides, spec.dtype, spec.device)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return allocator(shape, tuple(reversed(strides)), dtype, device)
