"""Allocates tensors of a known shape at the cost of the caching allocator.

`torch.empty` parses its arguments and goes through the dispatcher, which takes as long as a kernel launch. PyTorch's
compiler has a function for tensors whose shape, strides and dtype are known; it allocates on the current device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...call import TensorSpec

Allocate = Callable[[], Tensor]


def allocator(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
    """A function that returns an unwritten tensor; on a GPU the device must be the current one when it is called."""
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type == "cuda" and fast is not None:
        return functools.partial(fast, tuple(shape), tuple(strides), dtype)
    return functools.partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device)


def like(spec: TensorSpec) -> Allocate:
    """Tensors like torch.empty_like of such a tensor."""
    return allocator(spec.shape, spec.fresh_strides, spec.dtype, spec.device)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return allocator(shape, tuple(reversed(strides)), dtype, device)
