"""Computes the first and the last key that each query sees, in calls with segments or padding.

If the ids of the segments are in ascending order and the padding is at the ends of a sequence, every query sees
consecutive keys. A masked tile then takes two comparisons per pair and no load per key, and the tiles that a block
visits follow from the limits of its queries. Any other sequence is marked as irregular: the keys between its limits are
not all visible, and every tile compares the segments and the mask of each pair (`mask_pairs`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...visibility import Visibility
from .launch import Launch, Slot
from .rule import depends_on_data
from .tile_functions import Rule, mask_segments, one_run
from .tile_sizes import Config
from .workspace import Arrays

BLOCK = 64  # queries per program
CHUNK = 1024  # keys per step of the pass over a sequence
COMPARED = 64  # keys per step of the comparison of all pairs, for irregular sequences
TILES = 16  # query tiles per step of `key_ranges_kernel`


def limit_arrays(visibility: Visibility) -> Arrays:
    """The arrays of a forward's state: limits [B, 2, T], first and last key, and irregular [B], 1 or 0."""
    if not depends_on_data(visibility):
        return {}
    batch = visibility.batch
    return {
        "limits": ((batch, 2, visibility.num_queries), torch.int32),
        "irregular": ((batch,), torch.int32),
    }


def limit_launches(rule: Rule, batch: int) -> list[Launch]:
    """The launch that writes the limits; none if visibility does not depend on data."""
    if rule.limits is None:
        return []
    num_blocks = -(-rule.num_queries // BLOCK)
    steps = int(rule.num_keys).bit_length()
    return [Launch(limits_kernel, (batch, num_blocks), (rule, steps, BLOCK, CHUNK, COMPARED), num_warps=4)]


def key_ranges(rule: Rule, batch: int, config: Config, first_slot: int) -> tuple[Arrays, Slot | None, list[Launch]]:
    """The tiles of queries that blocks of keys visit: the array at slot `first_slot`, its slot, and its launch."""
    if rule.limits is None:
        return {}, None, []
    num_blocks = -(-rule.num_keys // config.block_n)
    slot = Slot(first_slot)
    arguments = (rule, slot, config.block_m, config.block_n, TILES)
    launch = Launch(key_ranges_kernel, (batch, num_blocks), arguments, num_warps=4)
    return {"key ranges": ((batch, num_blocks, 4), torch.int32)}, slot, [launch]


@triton.jit
def limits_kernel(rule, steps, BLOCK: tl.constexpr, CHUNK: tl.constexpr, COMPARED: tl.constexpr):
    """One program owns BLOCK queries of one sequence; writes their limits, and whether the sequence is irregular.

    A query that sees no key gets the limits num_keys and -1.
    """
    batch = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_keys = rule.num_keys
    queries = block * BLOCK + tl.arange(0, BLOCK)
    position = queries + (num_keys - rule.num_queries)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + (num_keys - 1)
    if rule.back is not None:
        low = tl.maximum(low, position - rule.back)
    if rule.ahead is not None:
        high = tl.minimum(high, position + rule.ahead)

    # The whole sequence: are the ids in order, and are the unmasked keys consecutive?
    out_of_order = 0
    first_unmasked = num_keys
    last_unmasked = -1
    num_unmasked = 0
    for start in range(0, num_keys, CHUNK):
        keys = start + tl.arange(0, CHUNK)
        inside = keys < num_keys
        if rule.key_segments is not None:
            ids = rule.key_segments + batch * num_keys + keys
            here = tl.load(ids, mask=inside, other=0)
            later = tl.load(ids + 1, mask=keys + 1 < num_keys, other=0)
            descends = (keys + 1 < num_keys) & (later < here)
            out_of_order = tl.maximum(out_of_order, tl.max(descends.to(tl.int32), 0))
        if rule.key_mask is not None:
            unmasked = tl.load(rule.key_mask + batch * num_keys + keys, mask=inside, other=0) != 0
            first_unmasked = tl.minimum(first_unmasked, tl.min(tl.where(unmasked, keys, num_keys), 0))
            last_unmasked = tl.maximum(last_unmasked, tl.max(tl.where(unmasked, keys, -1), 0))
            num_unmasked += tl.sum(unmasked.to(tl.int32), 0)
    irregular = out_of_order
    if rule.key_mask is not None:
        irregular = tl.where(num_unmasked == tl.maximum(last_unmasked - first_unmasked + 1, 0), irregular, 1)

    if irregular == 0:
        if rule.key_mask is not None:
            low = tl.maximum(low, first_unmasked)
            high = tl.minimum(high, last_unmasked)
        if rule.query_segments is not None:
            is_query = queries < rule.num_queries
            own = tl.load(rule.query_segments + batch * rule.num_queries + queries, mask=is_query, other=0)
            ids = rule.key_segments + batch * num_keys
            # Two binary searches: the first key with an id of at least `own`, and the first one with a larger id.
            begin = tl.zeros([BLOCK], tl.int32)
            begin_end = tl.zeros([BLOCK], tl.int32) + num_keys
            stop = tl.zeros([BLOCK], tl.int32)
            stop_end = begin_end
            for _ in range(steps):
                middle = (begin + begin_end) // 2
                smaller = tl.load(ids + middle, mask=begin < begin_end, other=0) < own
                begin_end = tl.where(smaller, begin_end, middle)
                begin = tl.where(smaller & (begin < begin_end), middle + 1, begin)
                middle = (stop + stop_end) // 2
                no_larger = tl.load(ids + middle, mask=stop < stop_end, other=0) <= own
                stop_end = tl.where(no_larger, stop_end, middle)
                stop = tl.where(no_larger & (stop < stop_end), middle + 1, stop)
            low = tl.maximum(low, begin)
            high = tl.minimum(high, stop - 1)
    else:
        first_seen = tl.zeros([BLOCK], tl.int32) + num_keys
        last_seen = tl.zeros([BLOCK], tl.int32) - 1
        for start in range(0, num_keys, COMPARED):
            keys = start + tl.arange(0, COMPARED)
            visible = (keys[None, :] >= low[:, None]) & (keys[None, :] <= high[:, None])
            pairs = tl.where(visible, 1.0, 0.0)
            pairs = mask_segments(pairs, 0.0, queries, keys, batch, rule, False)
            first_seen = tl.minimum(first_seen, tl.min(tl.where(pairs != 0.0, keys[None, :], num_keys), 1))
            last_seen = tl.maximum(last_seen, tl.max(tl.where(pairs != 0.0, keys[None, :], -1), 1))
        low = first_seen
        high = last_seen
    sees = low <= high
    low = tl.where(sees, low, num_keys)
    high = tl.where(sees, high, -1)
    at = rule.limits + batch * 2 * rule.num_queries + queries
    tl.store(at, low, mask=queries < rule.num_queries)
    tl.store(at + rule.num_queries, high, mask=queries < rule.num_queries)
    tl.store(rule.irregular + batch, irregular, mask=block == 0)


@triton.jit
def _store_span(ranges, block, batch, span):
    at = ranges + (batch * tl.num_programs(1) + block) * 4
    tl.store(at, span[0])
    tl.store(at + 1, span[1])
    tl.store(at + 2, span[2])
    tl.store(at + 3, span[3])


@triton.jit
def key_ranges_kernel(rule, ranges, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """One program owns BLOCK_N keys of one sequence; writes start, full_start, full_stop, stop, in tiles of queries."""
    batch = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = block * BLOCK_N
    last = tl.minimum(first + BLOCK_N, rule.num_keys) - 1
    irregular = tl.load(rule.irregular + batch)
    num_tiles = tl.cdiv(rule.num_queries, BLOCK_M)
    start = num_tiles
    stop = 0
    full_start = num_tiles
    full_stop = 0
    num_full = 0
    for first_tile in range(0, num_tiles, TILES):
        tiles = first_tile + tl.arange(0, TILES)
        queries = tiles[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        inside = queries < rule.num_queries
        at = rule.limits + batch * 2 * rule.num_queries + queries
        low = tl.load(at, mask=inside, other=0)
        high = tl.load(at + rule.num_queries, mask=inside, other=0)
        meets = tl.max((inside & (low <= last) & (high >= first)).to(tl.int32), 1) != 0
        # A query beyond the end is loaded as zeros and adds nothing, so it does not prevent a tile from being full.
        sees_all = (inside == 0) | ((low <= first) & (high >= last))
        full = meets & (tl.min(sees_all.to(tl.int32), 1) != 0) & (irregular == 0)
        start = tl.minimum(start, tl.min(tl.where(meets, tiles, num_tiles), 0))
        stop = tl.maximum(stop, tl.max(tl.where(meets, tiles + 1, 0), 0))
        full_start = tl.minimum(full_start, tl.min(tl.where(full, tiles, num_tiles), 0))
        full_stop = tl.maximum(full_stop, tl.max(tl.where(full, tiles + 1, 0), 0))
        num_full += tl.sum(full.to(tl.int32), 0)
    # Only one contiguous run can skip the mask: if the full tiles are scattered, all tiles are masked.
    if num_full != full_stop - full_start:
        full_start = start
        full_stop = start
    _store_span(ranges, block, batch, one_run(start, full_start, full_stop, stop))
