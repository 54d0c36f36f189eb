"""Builds the table from which every block of queries reads the sum of the values before it (F8).

Row n of the table [B, G, blocks + 1, D] is the sum of the first n blocks of values of a key-value head, in fp32. Two
kernels write it: one sums each block, the other scans over the blocks. For a short table the scan is skipped, and the
kernel that reads the table adds its rows, which is cheaper than a launch. The table of the backward (B4) has the same
form, with its blocks in reverse order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Launch, Slot

# Measured on an H200. The kernels are memory-bound: small tiles and few warps give the most CTAs per SM.
TILE = 2048  # elements
ELEMENTS = 64  # elements of a tile per thread; a sum does not hold its tile in registers
# Up to this many blocks, readers of the table add its rows themselves. From LARGE elements of query on, the GPU is the
# bottleneck, and launching a scan costs less than adding more than MAX_UNSCANNED_LARGE blocks.
MAX_UNSCANNED, MAX_UNSCANNED_LARGE, LARGE = 64, 32, 2**25
SUM_ROWS = tl.constexpr(32)  # rows per load of a reader


def padded(dim: int) -> int:
    """The number of columns of a tile: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def block_of(dim: int) -> int:
    """The rows per block of the table, and per tile of the kernels that read it."""
    return min(max(TILE // padded(dim), 16), 64)


def warps_of(dim: int, elements: int) -> int:
    """The warps of a CTA that owns one block, given the elements per thread."""
    return max(block_of(dim) * padded(dim) // (32 * elements), 1)


def table_shape(value_shape: tuple[int, ...], block: int | None = None) -> tuple[int, int, int, int]:
    """The shape [B, G, blocks + 1, D] of the table for values of this shape."""
    batch, groups, num_keys, dim = value_shape
    return batch, groups, -(-num_keys // (block or block_of(dim))) + 1, dim


def is_scanned(table_length: int, num_elements: int) -> bool:
    """True if a table with this many rows is scanned, in a call with this many elements of query."""
    return table_length - 1 > (MAX_UNSCANNED_LARGE if num_elements >= LARGE else MAX_UNSCANNED)


def sum_launches(
    value_shape: tuple[int, ...],
    value_strides: tuple[int, ...],
    value: Slot,
    table: Slot,
    *,
    block: int | None = None,
    scans: bool,
    early: bool = False,
) -> list[Launch]:
    """The launches that write the table. `early`: the next launch may start before the table is complete."""
    groups, num_keys, dim = value_shape[1:]
    block = block or block_of(dim)
    shape = table_shape(value_shape, block)
    blocks = shape[2] - 1
    launch = Launch(
        block_sums_kernel, (shape[0] * groups * blocks,),
        (value, table, *value_strides[:3], num_keys, blocks, groups, dim, block, padded(dim), early),
        num_warps=max(block * padded(dim) // (32 * ELEMENTS), 1),
    )  # fmt: skip
    return [launch, *([scan_launch(shape, table, early)] if scans else [])]


def scan_launch(shape: tuple[int, int, int, int], table: Slot, early: bool = False) -> Launch:
    """The launch that turns the block sums, rows 1 to the last, into prefix sums."""
    batch, groups, length, dim = shape
    options = {"launch_pdl": True} if early else {}
    return Launch(
        scan_kernel, (batch * groups, -(-dim // 32)), (table, length, dim, 64, 32, early), num_warps=4, **options
    )


@triton.jit
def locate(num_blocks, BACKWARDS: tl.constexpr):
    """(batch and head slot, block) of this program; neighbouring programs own neighbouring blocks.

    BACKWARDS goes from the end of memory to its start: the data that the previous kernel wrote last is still in L2, and
    the data that the next kernel reads first is written last.
    """
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    return program // num_blocks, program % num_blocks


@triton.jit
def sum_blocks(table, first, stop, cols, col_ok, HEAD_DIM: tl.constexpr):
    """Sum over the blocks [first, stop) of a table that is not scanned, [D] in fp32."""
    sums = tl.zeros([SUM_ROWS, cols.shape[0]], dtype=tl.float32)
    for start in range(first, stop, SUM_ROWS):
        rows = start + tl.arange(0, SUM_ROWS)
        inside = (rows < stop)[:, None] & col_ok[None, :]
        sums += tl.load(table + (rows[:, None] + 1) * HEAD_DIM + cols[None, :], mask=inside, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def sum_before(table, block, cols, col_ok, HEAD_DIM: tl.constexpr, SCANNED: tl.constexpr):
    """Sum over the first `block` blocks of a table, [D] in fp32."""
    if SCANNED:
        total = tl.load(table + block * HEAD_DIM + cols, mask=col_ok, other=0.0)
    else:
        total = sum_blocks(table, 0, block, cols, col_ok, HEAD_DIM)
    return total


@triton.jit
def sum_visible(
    value, table, value_s, rows, cols, ok, col_ok, block, key_blocks,
    CAUSAL: tl.constexpr, SCANNED: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """F8 for a block of queries: [BLOCK, D] when causal, [1, D] when every query sees every key.

    If causal, `value` points at the block's first row, and `rows` count from there. A scan is used instead of an MMA
    with a triangle of ones, whose result would need a layout conversion for every head.
    """
    if CAUSAL:
        before = sum_before(table, block, cols, col_ok, HEAD_DIM, SCANNED)
        tile = tl.load(value + rows[:, None] * value_s + cols[None, :], mask=ok, other=0.0)
        summed = tl.cumsum(tile.to(tl.float32), axis=0) + before[None, :]
    else:
        summed = sum_before(table, key_blocks, cols, col_ok, HEAD_DIM, SCANNED)[None, :]
    return summed


@triton.jit
def block_sums_kernel(
    value, table, value_b, value_g, value_s, num_keys, num_blocks, groups,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """F8, first step. One program owns BLOCK keys of one key-value head; writes their sum to row block + 1.

    EARLY: the next kernel may start once all programs of this one have started; it must call `gdc_wait` before it reads
    the table.
    """
    if EARLY:
        gdc_launch_dependents()
    slot, block = locate(num_blocks, False)
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    tile = tl.load(
        value + batch * value_b + group * value_g + first_row * value_s + rows[:, None] * value_s + cols[None, :],
        mask=(first_row + rows < num_keys)[:, None] & (cols < HEAD_DIM)[None, :],
        other=0.0,
    )
    table += slot.to(tl.int64) * (num_blocks + 1) * HEAD_DIM
    tl.store(table + (block + 1) * HEAD_DIM + cols, tl.sum(tile.to(tl.float32), axis=0), mask=cols < HEAD_DIM)
    if block == 0:
        tl.store(table + cols, tl.zeros([BLOCK_D], dtype=tl.float32), mask=cols < HEAD_DIM)


@triton.jit
def scan_kernel(table, length, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr):
    """F8 and B4, second step. One program owns BLOCK_D columns of one table [length, D]; prefix sums in place.

    Row 0 is the empty sum, and row n becomes the sum of the n blocks before block n. EARLY: this kernel may start
    before the block sums are complete, and the next one may start before this one has finished.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    table += tl.program_id(0).to(tl.int64) * length * HEAD_DIM
    carry = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(1, length, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        ptrs = table + rows[:, None] * HEAD_DIM + cols[None, :]
        inside = (rows < length)[:, None] & (cols < HEAD_DIM)[None, :]
        tile = tl.load(ptrs, mask=inside, other=0.0)
        tl.debug_barrier()  # all threads must have read the tile before one overwrites it
        tl.store(ptrs, tl.cumsum(tile, axis=0) + carry[None, :], mask=inside)
        carry += tl.sum(tile, axis=0)
