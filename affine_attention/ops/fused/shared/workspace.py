"""Allocates several arrays at once, because an allocation costs as much host time as a launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .allocation import Allocate, contiguous

Arrays = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name
UNIT = 256  # bytes: alignment of every array, for vector loads and TMA


class Workspace:
    """Named arrays with shape and dtype at fixed offsets in one buffer.

    >>> workspace = Workspace({"lse": ((2, 4, 10), torch.float32)}, torch.device("cpu"))
    >>> workspace.views(workspace.new())[0].shape
    torch.Size([2, 4, 10])
    """

    def __init__(self, arrays: Arrays, device: torch.device):
        self.arrays, self.device = arrays, device
        sizes = [_padded_bytes(shape, dtype) for shape, dtype in arrays.values()]
        self.offsets = [sum(sizes[:n]) for n in range(len(sizes))]
        self.length = length_of(arrays)
        self.new: Allocate = contiguous((self.length,), torch.float32, device)  # an uninitialised buffer

    def index(self, name: str) -> int:
        """The index of an array among the arrays."""
        return list(self.arrays).index(name)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The arrays of a buffer as tensors."""
        found, whole = [], buffer.view(torch.int8)
        for offset, (shape, dtype) in zip(self.offsets, self.arrays.values(), strict=True):
            size = math.prod(shape) * dtype.itemsize
            found.append(whole[offset : offset + size].view(dtype).view(shape))
        return found


def length_of(arrays: Arrays) -> int:
    """The length of a buffer in fp32 elements; a torch.library operator returns it as an ordinary tensor."""
    return sum(_padded_bytes(shape, dtype) for shape, dtype in arrays.values()) // 4


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in shape:  # not math.prod, because a traced length is symbolic
        size = size * length
    return (size + UNIT - 1) // UNIT * UNIT
