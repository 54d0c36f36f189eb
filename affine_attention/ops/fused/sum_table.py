"""Turns values into the table that gives every block of queries the sum of the values before it (F8).

Row n of the table [B, G, blocks + 1, D] is the sum of the first n blocks of a key-value head's values, in fp32. Two
small kernels fill it: the sum of each block, then a scan over them. The backward's table (B6) has the same form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cudnn_kernels import block_sums_kernel, scan_kernel
from .relaunch import relaunch

# Measured on an H200. The passes are bound by memory: small tiles and few warps leave room for many programs at once.
TILE = 2048  # elements
ELEMENTS = 64  # of a tile, to a thread: sums keep no tile in registers


def padded(dim: int) -> int:
    """Columns of a tile: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def block_of(dim: int) -> int:
    """Rows of a block of the table, and of a tile of the passes that read it."""
    return min(max(TILE // padded(dim), 16), 64)


def warps_of(dim: int, elements: int) -> int:
    """Warps of a program that owns a block, with so many elements to a thread."""
    return max(block_of(dim) * padded(dim) // (32 * elements), 1)


def table_shape(value: Tensor) -> tuple[int, int, int, int]:
    """[B, G, blocks + 1, D]."""
    batch, groups, num_keys, dim = value.shape
    block = block_of(dim)
    return batch, groups, (num_keys + block - 1) // block + 1, dim


def new_table(value: Tensor) -> Tensor:
    """An unwritten table for the sums of `value`."""
    return torch.empty(table_shape(value), dtype=torch.float32, device=value.device)


def fill(table: Tensor, value: Tensor, early: bool = False) -> None:
    """Writes the table of `value`. `early`: the kernel launched next may begin before it is whole, and must wait."""
    groups, num_keys, dim = value.shape[1:]
    blocks = table.shape[2] - 1
    relaunch(
        block_sums_kernel, (table.shape[0] * groups * blocks,), (value, table),
        (*value.stride()[:3], num_keys, blocks, groups, dim, block_of(dim), padded(dim), early),
        num_warps=warps_of(dim, ELEMENTS),
    )  # fmt: skip
    scan(table, early)


def scan(table: Tensor, early: bool = False) -> None:
    """Makes the sums of blocks, in rows 1 to the last, prefix sums."""
    batch, groups, length, dim = table.shape
    options = {"launch_pdl": True} if early else {}
    relaunch(
        scan_kernel, (batch * groups, (dim + 31) // 32), (table,), (length, dim, 64, 32, early), num_warps=4, **options
    )
