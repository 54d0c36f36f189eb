"""Chooses tiles and splits for decoding and launches the kernels of kernels.py.

A short cache needs one launch: with a single split there is nothing to merge, so the first kernel writes the output.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call import CallSpec, TensorSpec
from ..plan import WEIGHTS
from ..shared.allocation import like
from ..shared.launch import Launch, LaunchSet, Slot
from ..shared.tile_functions import LOG2E
from ..shared.value_sums import padded
from ..shared.workspace import Workspace
from .kernels import merge_kernel, split_kernel

MAX_QUERIES = 16
MAX_ROWS = 64  # rows per tile; more rows (many heads per group, many queries) use more tiles
MIN_STEPS = 2  # tiles of keys per split, at least
MAX_STEPS_AT_ONCE = 8  # up to this many tiles of keys, a single split is used, which saves the merge kernel
MAX_SPLITS = 512
MAX_ROW_STRIDE = 2**23  # row stride up to which offsets inside a tile fit 32 bits
(QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, KEY_MASK, LENGTHS, BLOCK_TABLE, OUT, NUM_TENSORS) = range(12)


class Decode:
    """Computes the output [B, H, T, D] of calls with one signature against a cache.

    Args:
        call: the first call; for a paged cache key and value are [pages, page_size, G, D], and
            `visibility.num_keys` is pages * page_size.
        lengths, block_table: those of the first call, or None.
    """

    def __init__(
        self, call: CallSpec, lengths: TensorSpec | None = None, block_table: TensorSpec | None = None
    ):  # fmt: skip
        query, key, value, (alpha, beta, _, gate) = call[:4]
        visibility = call.visibility
        batch, heads, num_queries, dim = query.shape
        self.device, self.new_out = query.get_device(), like(query)
        if block_table is None:
            groups, page_size = key.shape[1], 1
            key_strides, value_strides = key.stride()[:3], value.stride()[:3]
        else:
            page_size, groups = key.shape[1:3]
            key_strides, value_strides = ((x.stride(0), x.stride(2), x.stride(1)) for x in (key, value))
        repeats = heads // groups
        rows = (repeats + (beta is not None)) * num_queries
        block_m, block_d = min(max(16, padded(rows)), MAX_ROWS), padded(dim)
        window, num_keys = visibility.window, visibility.num_keys
        reach = num_keys if window is None else min(num_keys, window + num_queries - 1)
        tiles = -(-rows // block_m)
        programs = batch * groups * tiles
        num_sms, shared_bytes = _resources(query.device)
        # Wide tiles are larger than a typical page.
        plan = choose_tiles(block_d * query.element_size(), programs, num_sms, shared_bytes if page_size == 1 else 0)
        steps = -(-reach // plan.block_n)
        finish = num_queries == 1 and tiles == 1 and steps <= MAX_STEPS_AT_ONCE
        splits = 1 if finish else choose_splits(programs, steps, num_sms * plan.ctas_per_sm)
        # ONE_PAGE: a tile never crosses a page (a window may start anywhere), and its offsets fit 32 bits.
        near = max(key_strides[2], value_strides[2]) <= MAX_ROW_STRIDE
        one_page = block_table is not None and window is None and page_size % plan.block_n == 0 and near
        arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if not finish:
            arrays = {"max": ((batch, groups, splits, rows), torch.float32),
                      "sum": ((batch, groups, splits, rows), torch.float32),
                      "acc": ((batch, groups, splits, rows, dim), torch.float32)}  # fmt: skip
        self.workspace = Workspace(arrays, query.device)
        parts = [None if finish else Slot(NUM_TENSORS + n) for n in range(3)]
        row_slots: list[Any] = [None if x is None else Slot(n) for n, x in enumerate(call.rows, ALPHA)]
        row_slots.insert(3, call.rows.sink_strides)
        out_strides = query.fresh_strides
        mask, weights = visibility.key_mask, WEIGHTS.index(call.weights)
        strides = [_strides(x) for x in (alpha, beta, gate)]
        launches = [Launch(
            split_kernel, (splits * programs,),
            (
                Slot(QUERY), Slot(KEY), Slot(VALUE), None if mask is None else Slot(KEY_MASK),
                None if lengths is None else Slot(LENGTHS), None if block_table is None else Slot(BLOCK_TABLE), *parts,
                *(row_slots if finish else (None,) * 5), Slot(OUT) if finish else None,
                *query.stride()[:3], *key_strides, *value_strides, *((0, 0) if mask is None else mask.stride()),
                0 if block_table is None else block_table.stride(0),
                *strides[0][:2], *strides[1][:2], *strides[2][:2], *out_strides[:2],
                num_queries, num_keys, groups, repeats, rows, splits, window or 0, call.softmax_scale * LOG2E.value,
                visibility.is_causal and num_queries > 1, window is not None, page_size, one_page, finish,
                dim, block_m, plan.block_n, block_d, weights,
            ),
            num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.registers,
        )]  # fmt: skip
        if not finish:
            launches.append(Launch(
                merge_kernel, (num_queries * heads * batch,),
                (
                    *parts, *row_slots, Slot(OUT), *strides[0], *strides[1], *strides[2], *out_strides[:3],
                    num_queries, heads, repeats, rows, splits, dim, min(32, 1 << (splits - 1).bit_length()), block_d,
                    weights,
                ),
                num_warps=4,
            ))  # fmt: skip
        self.launches = LaunchSet({"decode": launches}, self.workspace)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """`inputs` are query, key, value, alpha, beta, sink, gate, the key mask, lengths and the block table."""
        out = self.new_out()
        self.launches.run("decode", self.launches.values((*inputs, out), self.workspace.new()), self.device)
        return out


@dataclass(frozen=True)
class DecodeTiles:
    """Keys per tile, warps, pipeline stages, and resident CTAs per SM."""

    block_n: int
    warps: int
    stages: int
    ctas_per_sm: int

    @property
    def registers(self) -> int:
        """Maximum registers per thread; with more, fewer CTAs would be resident, and a second wave would follow."""
        return min(255, 2**16 // (32 * self.warps * self.ctas_per_sm))


def choose_tiles(row_bytes: int, programs: int, num_sms: int, shared_bytes: int) -> DecodeTiles:
    """Tile sizes measured on an H200 with 512 MB of keys and values; row_bytes is the size of one padded key.

    Long rows and few sequences use one CTA per SM with wide tiles and a deep pipeline. Other calls use smaller tiles
    and several CTAs per SM to hide latency.
    """
    if row_bytes <= 128:
        return DecodeTiles(64, 2, 3, 4)
    wide = max(32, 32768 // row_bytes)
    if programs <= num_sms and shared_bytes >= 160 * 1024:
        return DecodeTiles(wide, 8, 3, 1)
    return DecodeTiles(max(16, wide // 2), 4, 2, 4)


def choose_splits(programs: int, steps: int, room: int) -> int:
    """The number of splits of the keys of a sequence, given the number of CTAs without a split.

    As many as keep all CTAs resident at once (a second, nearly empty wave takes as long as a full one), with at least
    MIN_STEPS tiles of keys per split and no empty splits.
    """
    wanted = max(1, min(room // programs, steps // MIN_STEPS, MAX_SPLITS))
    return -(-steps // -(-steps // wanted))


@functools.cache
def _resources(device: torch.device) -> tuple[int, int]:
    """(number of SMs, bytes of shared memory available to one CTA)."""
    if device.type != "cuda":
        return 4, 0
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _strides(x: TensorSpec | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else tuple(x.stride()[:3])
