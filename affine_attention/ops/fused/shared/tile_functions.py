"""Triton functions on tiles: which tiles a program visits, which pairs are visible, loads and stores, softmax state.

A program that owns queries loops over tiles of keys, one that owns keys loops over tiles of queries; `tile_span` and
`visible_pairs` are used for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Arguments that are not specialised, so that a kernel is not recompiled when they change.
GRID_NUMBERS = ("num_heads", "num_kv_heads", "num_programs", "section")
LOG2E = tl.constexpr(1.4426950408889634)
# The phases of a loop over tiles: the run without a mask, the masked edge before it, and (2) the one after it.
FULL = tl.constexpr(0)
LEFT = tl.constexpr(1)
# Weight functions of the flash kernels other than softmax, by their index among plan.WEIGHTS.
SIGNED = tl.constexpr(1)
SIGMOID = tl.constexpr(2)


class Rule(NamedTuple):
    """The visibility of a call as kernel arguments; a field that is None is compiled away.

    Query i has position i + num_keys - num_queries and sees the keys position - back .. position + ahead.
    """

    num_queries: Any
    num_keys: Any
    back: Any  # int, or None: no limit
    ahead: Any  # int, or None: no limit
    query_segments: Any  # [B, T], or None
    key_segments: Any  # [B, S], or None
    key_mask: Any  # [B, S] int8, or None


@triton.jit
def scheduled_block(num_blocks, num_heads, section, LONGEST_LAST: tl.constexpr):
    """(block, head) of this program: heads in sections whose loop operands fit the L2 cache, longest blocks first."""
    program = tl.program_id(0)
    first_head = program // (num_blocks * section) * section
    rest = program % (num_blocks * section)
    heads_here = tl.minimum(section, num_heads - first_head)
    block = rest // heads_here
    if LONGEST_LAST:
        block = num_blocks - 1 - block
    return block, first_head + rest % heads_here


@triton.jit
def tile_span(first, last, before, after, length, ranges, BLOCK: tl.constexpr, MASK_TAIL: tl.constexpr):
    """Tiles [start, stop) for the owned rows first..last, and the run [full_start, full_stop) that needs no mask.

    The owned row at p sees the rows p - before .. p + after of the `length` rows that are looped over. `ranges` points
    to the four bounds that ranges.py computes from segments and padding. MASK_TAIL: rows beyond `length` in the last
    tile are masked.
    """
    start = 0
    full_start = 0
    stop = tl.cdiv(length, BLOCK)
    full_stop = stop
    if MASK_TAIL:
        full_stop = length // BLOCK
    if before is not None:
        start = tl.maximum(first - before, 0) // BLOCK
        full_start = tl.cdiv(tl.maximum(last - before, 0), BLOCK)
    if after is not None:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(last + after + 1, 0), BLOCK))
        full_stop = tl.minimum(full_stop, tl.maximum(first + after + 1, 0) // BLOCK)
    if ranges is not None:
        start = tl.maximum(start, tl.load(ranges))
        full_start = tl.maximum(full_start, tl.load(ranges + 1))
        full_stop = tl.minimum(full_stop, tl.load(ranges + 2))
        stop = tl.minimum(stop, tl.load(ranges + 3))
    stop = tl.maximum(stop, start)
    full_start = tl.minimum(tl.maximum(full_start, start), stop)
    full_stop = tl.maximum(tl.minimum(full_stop, stop), full_start)
    return start, full_start, full_stop, stop


@triton.jit
def span_phase(span, phase: tl.constexpr):
    """[begin, end) of one phase of a span. FULL is the first phase, because it needs the fewest registers."""
    if phase == FULL:
        return span[1], span[2]
    elif phase == LEFT:
        return span[0], span[1]
    else:
        return span[2], span[3]


@triton.jit
def visible_pairs(queries, keys, batch, rule):
    """The boolean tile of visible pairs; `queries` and `keys` are indices that broadcast, in either orientation."""
    # Compute the limits per row first, so that each pair needs one comparison per limit.
    position = queries + (rule.num_keys - rule.num_queries)
    highest = position * 0 + (rule.num_keys - 1)
    if rule.ahead is not None:
        highest = tl.minimum(highest, position + rule.ahead)
    visible = keys <= highest
    if rule.back is not None:
        visible = visible & (keys >= position - rule.back)
    if rule.query_segments is not None:
        of_query = rule.query_segments + batch * rule.num_queries + queries
        of_key = rule.key_segments + batch * rule.num_keys + keys
        inside = queries < rule.num_queries
        query_segment = tl.load(of_query, mask=inside, other=0)
        key_segment = tl.load(of_key, mask=keys < rule.num_keys, other=0)
        # Rows beyond the end load segment 0 and must not match a key with that segment.
        visible = visible & inside & (query_segment == key_segment)
    if rule.key_mask is not None:
        unmasked = tl.load(rule.key_mask + batch * rule.num_keys + keys, mask=keys < rule.num_keys, other=0)
        visible = visible & (unmasked != 0)
    return visible


@triton.jit
def load_tile(descriptor, batch, head, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows row .. row + ROWS of one head as [ROWS, BLOCK_D]; elements outside of the tensor are 0."""
    return descriptor.load([batch.to(tl.int32), head.to(tl.int32), row, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def store_tile(pointer, strides, batch, head, rows, length, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the rows below `length` and the columns below HEAD_DIM of a tile, in the dtype of `pointer`."""
    columns = tl.arange(0, BLOCK_D)
    # 64-bit offsets: a strided or large tensor may exceed 2^31 elements.
    at = rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3]
    inside = rows[:, None] < length
    if HEAD_DIM < BLOCK_D:
        inside = inside & (columns[None, :] < HEAD_DIM)
    target = pointer + batch * strides[0] + head * strides[1] + at
    tl.store(target, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_row_scalars(pointer, strides, batch, head, rows, length):
    """One fp32 value per row of a [B, H, T] tensor; 0 beyond `length`."""
    at = pointer + batch * strides[0] + head * strides[1] + rows.to(tl.int64) * strides[2]
    return tl.load(at, mask=rows < length, other=0.0).to(tl.float32)


@triton.jit
def store_row_scalars(pointer, strides, batch, head, rows, length, numbers):
    """Stores one value per row, in the dtype of `pointer`."""
    at = pointer + batch * strides[0] + head * strides[1] + rows.to(tl.int64) * strides[2]
    tl.store(at, numbers.to(pointer.dtype.element_ty), mask=rows < length)


@triton.jit
def load_sinks(sink, strides, batch, head, rows, length):
    """The sinks of some rows in units of log2: one number for a sink [H] (strides None), one per row for [B, H, T]."""
    if strides is None:
        return tl.load(sink + head).to(tl.float32) * LOG2E
    else:
        return load_row_scalars(sink, strides, batch, head, rows, length) * LOG2E


@triton.jit
def start_softmax(sink_log2, BLOCK_M: tl.constexpr):
    """(largest score, sum) of BLOCK_M rows before their first key, in units of log2.

    The sink, if it is not None, acts as a first key without a value, so it is included in lse.
    """
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sink_log2 is not None:
        row_max = tl.zeros([BLOCK_M], tl.float32) + sink_log2
        row_sum += tl.where(sink_log2 == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def signs(scores):
    """1, 0 or -1 for each score."""
    return tl.where(scores > 0.0, 1.0, tl.where(scores < 0.0, -1.0, 0.0))


@triton.jit
def is_finite(x):
    """False for NaN and infinity."""
    return tl.abs(x).to(tl.float32) < float("inf")


@triton.jit
def zero_nonfinite(x):
    """Replaces NaN and infinity by 0, because a non-finite value times a weight of 0 is NaN."""
    return tl.where(is_finite(x), x, 0.0).to(x.dtype)


@triton.jit
def has_unseen_keys(rule, phase: tl.constexpr):
    """True if a masked phase can contain keys that no query of the call sees: padding, and keys before a window.

    Plain causal attention has none: every key of its diagonal tiles is seen by a later query.
    """
    padded: tl.constexpr = (rule.key_mask is not None) or (rule.query_segments is not None)
    return (phase != FULL) and (padded or ((phase == LEFT) and (rule.back is not None)))


@triton.jit
def sum_full_tiles(
    table, span, batch, kv_head, num_kv_heads, num_tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """F8's sum of v over the full run of a span, [BLOCK_D] in fp32: every row of the block sees all of it.

    If the run starts at key 0 (PREFIX), it is one row of the scanned table. Otherwise the sums of the run's tiles are
    added here: a difference of prefix sums would suffer from cancellation with values outside of the run.
    """
    columns = tl.arange(0, BLOCK_D)
    row = table + (batch * num_kv_heads + kv_head) * (num_tiles + 1) * HEAD_DIM + columns
    full_start, full_stop = span_phase(span, FULL)
    if PREFIX:
        total = tl.load(row + full_stop * HEAD_DIM, mask=columns < HEAD_DIM, other=0.0)
    else:
        total = tl.zeros([BLOCK_D], tl.float32)
        for first in tl.range(full_start, full_stop, 16, num_stages=1):
            tiles = first + tl.arange(0, 16)
            inside = (tiles[:, None] < full_stop) & (columns[None, :] < HEAD_DIM)
            total += tl.sum(tl.load(row[None, :] + (tiles[:, None] + 1) * HEAD_DIM, mask=inside, other=0.0), 0)
    return total
