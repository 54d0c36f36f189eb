"""The backward of large causal calls in one kernel of our own, on Hopper: dQ, dK and dV from what B7 has written.

It takes the place of cuDNN's backward, is faster at most sizes, and adds beta's part of dV on the way. For dQ it needs
sums in fp32 that programs add to; where memory is short beside plain attention's, the call runs in parts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import capability_of, side
from .launch import ALIGNMENT, align
from .relaunch import relaunch
from .sum_table import block_of
from .tiles import LOG2E

HEAD_DIMS = range(40, 129, 8)  # below, tiles of 64 columns are mostly empty
SHORTEST = 512  # tokens of a sequence; less was not measured
# Gluon is experimental: versions in which the kernel compiles to what was measured, without spilled registers.
TRITON_VERSIONS = ((3, 6), (3, 7))
ROW_UNIT = ALIGNMENT // 4
# cuDNN repeats dK and dV for grouped heads, in fp32 sums of its own. With one head to a group it does not: half of dQ's
# sums at a time then make up for O, where that is kept beside the output.
PARTS_BESIDE_O = 2


class Sizes(NamedTuple):
    """Queries of a tile, keys of a program, tiles of queries in flight."""

    block_m: int
    block_n: int
    stages: int


# Measured on an H200. 128 queries to a tile where their scores fit the registers; shared memory holds one program.
NARROW, WIDE = Sizes(128, 128, 3), Sizes(64, 128, 3)


@functools.cache
def why_not_here() -> str | None:
    """The reason why this installation cannot run the kernel, None when it can."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in TRITON_VERSIONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in TRITON_VERSIONS)
        return f"is written for Triton {known}, got {triton.__version__}"
    try:
        from . import alone_backward_kernels  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs Gluon as Triton {version[0]}.{version[1]} has it: {error}"
    return None


def fits_alone(query: Tensor, key: Tensor, is_causal: bool, softmax_scale: float) -> bool:
    """Whether the call is one for `input_gradients`: measured on Hopper, causal, head dims 40 to 128, long, large."""
    fits = is_causal and query.shape[2] == key.shape[2] and softmax_scale > 0 and query.shape[-1] in HEAD_DIMS
    return fits and side.is_large(query, SHORTEST) and query.is_cuda and 90 <= capability_of(query) < 100


def backwards_alone(query: Tensor, key: Tensor, is_causal: bool, softmax_scale: float) -> bool:
    """Whether `input_gradients` takes the call: it fits, and this installation can run the kernel."""
    return fits_alone(query, key, is_causal, softmax_scale) and why_not_here() is None


@functools.cache
def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU: each holds one program."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def new_row_numbers(query: Tensor) -> Tensor:
    """Unwritten numbers of the rows for B7: [B, H, 4, T], T in whole units of what a descriptor can address."""
    batch, heads, length = query.shape[:3]
    return torch.empty(batch, heads, 4, -(-length // ROW_UNIT) * ROW_UNIT, dtype=torch.float32, device=query.device)


def new_gradient(of: Tensor) -> Tensor:
    """Unwritten: like the input as it came, as a compiled graph expects it. Being fresh, it is aligned."""
    return torch.empty_like(of)


def input_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_numbers: Tensor,
    later_sums: Tensor | None,
    softmax_scale: float,
    beside_o: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of a causal call. `grad` and `row_numbers` are B7's, `later_sums` is B6's table after its scan.

    `beside_o`: O is kept beside the output, and memory is to be saved for it.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .alone_backward_kernels import ADDED, WARPS, convert_kernel, gradients_kernel

    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    repeats = heads // groups
    block_d = 64 if dim <= 64 else 128
    sizes = NARROW if block_d == 64 else WIDE
    tiles = -(-length // sizes.block_m)
    tile_rows = sizes.block_m * block_d // ADDED.value
    grad_query, grad_key, grad_value = (new_gradient(x) for x in (query, key, value))
    query, key, value, grad = align(query), align(key), align(value), align(grad)
    wide = gl.NVMMASharedLayout(128, 16, 4)

    def describe(x: Tensor, rows: int) -> TensorDescriptor:
        # A stride along one element is never used, but is checked: give it a value that passes.
        strides = [stride if size > 1 else ALIGNMENT for size, stride in zip(x.shape, x.stride(), strict=True)]
        return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, block_d], wide)

    row_length = row_numbers.shape[-1]
    rows_desc = TensorDescriptor(
        row_numbers, [batch * heads, 4, length], [4 * row_length, row_length, 1], [1, 4, sizes.block_m],
        gl.NVMMASharedLayout(0, 32, 3),
    )  # fmt: skip
    of_queries = (describe(query, sizes.block_m), describe(grad, sizes.block_m))
    of_keys = tuple(describe(x, sizes.block_n) for x in (key, value, grad_key, grad_value))
    blocks = -(-length // sizes.block_n)
    # The programs that run at once are the blocks of a few heads, all of them, longest first: their queries meet in the
    # L2 cache, and they end together. Twice or half as many heads were up to 7 % slower.
    section = max(1, processors(query.device) // blocks)

    slots = batch * groups
    part = -(-slots // PARTS_BESIDE_O) if beside_o and repeats == 1 else slots
    sums = torch.empty(part * repeats * tiles * tile_rows, ADDED.value, dtype=torch.float32, device=query.device)
    sums_desc = TensorDescriptor(
        sums, list(sums.shape), [ADDED.value, 1], [tile_rows, ADDED.value], gl.NVMMASharedLayout(0, 32, 2)
    )
    for first in range(0, slots, part):
        here = min(part, slots - first)
        sums.zero_()
        relaunch(
            gradients_kernel, (blocks * here,),
            (of_queries[0], *of_keys[:2], of_queries[1], rows_desc, *of_keys[2:], sums_desc, later_sums),
            (
                softmax_scale, softmax_scale * LOG2E.value, length,
                0 if later_sums is None else later_sums.shape[2] - 1, first, heads, groups, here, min(section, here),
                *sizes[:2], dim, block_d, block_of(dim), sizes.stages,
            ),
            num_warps=WARPS.value,
        )  # fmt: skip
        relaunch(
            convert_kernel, (here * repeats * tiles,), (sums, grad_query),
            (
                grad_query.stride(), softmax_scale, length, tiles, heads, first * repeats,
                sizes.block_m, dim, block_d,
            ),
            num_warps=4,
        )  # fmt: skip
    return grad_query, grad_key, grad_value
