"""Triton functions on tiles: which tiles a program visits, which pairs are visible, loads and stores, softmax state.

A program that owns queries loops over tiles of keys, one that owns keys loops over tiles of queries: `query_span` and
`key_span` say which. `mask_pairs` is used for both.
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

    Query i has position i + num_keys - num_queries and sees the keys position - back .. position + ahead, those of them
    that have its segment and are not masked. `limits` are the first and the last key that it sees (limits.py). In a
    sequence that is not `irregular` it sees all keys between them.
    """

    num_queries: Any
    num_keys: Any
    back: Any  # int, or None: no limit
    ahead: Any  # int, or None: no limit
    query_segments: Any  # [B, T], or None
    key_segments: Any  # [B, S], or None
    key_mask: Any  # [B, S] int8, or None
    limits: Any  # [B, 2, T] int32, or None: no segments and no mask
    irregular: Any  # [B] int32: 1 if a query may see only some keys between its limits; None with `limits`


@triton.jit
def scheduled_block(program, num_blocks, num_heads, section, LONGEST_LAST: tl.constexpr):
    """(block, head) of a program: heads in sections whose loop operands fit the L2 cache, longest blocks first."""
    first_head = program // (num_blocks * section) * section
    rest = program % (num_blocks * section)
    heads_here = tl.minimum(section, num_heads - first_head)
    block = rest // heads_here
    if LONGEST_LAST:
        block = num_blocks - 1 - block
    return block, first_head + rest % heads_here


@triton.jit
def one_run(start, full_start, full_stop, stop):
    """The tiles [start, stop) and, among them, [full_start, full_stop) that need no mask, in order."""
    stop = tl.maximum(stop, start)
    full_start = tl.minimum(tl.maximum(full_start, start), stop)
    full_stop = tl.maximum(tl.minimum(full_stop, stop), full_start)
    return start, full_start, full_stop, stop


@triton.jit
def _positions_span(first, last, before, after, length, BLOCK: tl.constexpr, MASK_TAIL: tl.constexpr):
    """The span of owned rows at positions first..last: the row at p sees p - before .. p + after of `length` rows.

    MASK_TAIL: rows beyond `length` in the last tile are masked.
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
    return one_run(start, full_start, full_stop, stop)


@triton.jit
def query_positions_span(block, rule, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`query_span` of a call without segments and padding."""
    first = block * BLOCK_M + rule.num_keys - rule.num_queries
    last = tl.minimum(first + BLOCK_M, rule.num_keys) - 1
    return _positions_span(first, last, rule.back, rule.ahead, rule.num_keys, BLOCK_N, MASK_TAIL=True)


@triton.jit
def stored_span(ranges, block, num_blocks, batch):
    """The span of a block from an array [B, num_blocks, 4] of limits.py."""
    at = ranges + (batch * num_blocks + block) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def query_span(block, queries, batch, rule, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of BLOCK_N keys that a block of BLOCK_M queries visits; `queries` are their indices."""
    if rule.limits is None:
        span = query_positions_span(block, rule, BLOCK_M, BLOCK_N)
    else:
        inside = queries < rule.num_queries
        at = rule.limits + batch * 2 * rule.num_queries + queries
        low = tl.load(at, mask=inside, other=rule.num_keys)
        high = tl.load(at + rule.num_queries, mask=inside, other=-1)
        # A query beyond the end is never stored, so it does not prevent a tile from being full.
        full_start = tl.cdiv(tl.max(tl.where(inside, low, 0), 0), BLOCK_N)
        full_stop = (tl.min(tl.where(inside, high, rule.num_keys - 1), 0) + 1) // BLOCK_N
        full_stop = tl.where(tl.load(rule.irregular + batch) == 0, full_stop, 0)
        start = tl.min(low, 0) // BLOCK_N
        span = one_run(start, full_start, full_stop, tl.cdiv(tl.max(high, 0) + 1, BLOCK_N))
    return span


@triton.jit
def key_span(block, num_blocks, batch, rule, ranges, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of BLOCK_M queries that a block of BLOCK_N keys visits. `ranges` come from `key_ranges_kernel`."""
    if rule.limits is None:
        # A key at j is seen by the queries at positions j - ahead .. j + back.
        first = block * BLOCK_N - (rule.num_keys - rule.num_queries)
        last = tl.minimum(first + BLOCK_N, rule.num_queries) - 1
        span = _positions_span(first, last, rule.ahead, rule.back, rule.num_queries, BLOCK_M, MASK_TAIL=False)
    else:
        span = stored_span(ranges, block, num_blocks, batch)
    return span


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
def mask_pairs(x, other, queries, keys, batch, rule, KEYS_FIRST: tl.constexpr = False):
    """A tile of pairs with `other` at those that are not visible, whatever they contain.

    The tile is [queries, keys], or with KEYS_FIRST [keys, queries]. The branch returns the tile and not a mask, which
    would need registers of its own.
    """
    low, high = row_limits(queries, batch, rule)
    x = mask_outside(x, other, _along_keys(low, KEYS_FIRST), _along_keys(high, KEYS_FIRST), keys, rule, KEYS_FIRST)
    return mask_irregular(x, other, queries, keys, batch, rule, KEYS_FIRST)


@triton.jit
def row_limits(queries, batch, rule):
    """The first and the last key that each query sees. It sees no key if the first one is behind the last one."""
    if rule.limits is None:
        position = queries + (rule.num_keys - rule.num_queries)
        low = position * 0
        high = position * 0 + (rule.num_keys - 1)
        if rule.back is not None:
            low = tl.maximum(low, position - rule.back)
        if rule.ahead is not None:
            high = tl.minimum(high, position + rule.ahead)
    else:
        inside = queries < rule.num_queries
        at = rule.limits + batch * 2 * rule.num_queries + queries
        low = tl.load(at, mask=inside, other=rule.num_keys)
        high = tl.load(at + rule.num_queries, mask=inside, other=-1)
    return low, high


@triton.jit
def mask_outside(x, other, low, high, keys, rule, KEYS_FIRST: tl.constexpr):
    """`mask_pairs` by limits that broadcast along the keys."""
    keys = _along_queries(keys, KEYS_FIRST)
    visible = keys <= high
    if (rule.back is not None) or (rule.limits is not None):
        visible = visible & (keys >= low)
    return tl.where(visible, x, other)


@triton.jit
def mask_irregular(x, other, queries, keys, batch, rule, KEYS_FIRST: tl.constexpr):
    """`mask_segments` of an irregular sequence; no effect on other sequences."""
    if rule.irregular is not None:  # noqa: SIM102 (one condition is compiled away, the other is not)
        if tl.load(rule.irregular + batch) != 0:
            x = mask_segments(x, other, queries, keys, batch, rule, KEYS_FIRST)
    return x


@triton.jit
def mask_segments(x, other, queries, keys, batch, rule, KEYS_FIRST: tl.constexpr):
    """A tile of pairs with `other` where the key has another segment than its query or is masked."""
    in_keys = keys < rule.num_keys
    if rule.query_segments is not None:
        of_queries = rule.query_segments + batch * rule.num_queries + queries
        of_queries = tl.load(of_queries, mask=queries < rule.num_queries, other=0)
        of_keys = tl.load(rule.key_segments + batch * rule.num_keys + keys, mask=in_keys, other=0)
        x = tl.where(_along_queries(of_keys, KEYS_FIRST) == _along_keys(of_queries, KEYS_FIRST), x, other)
    if rule.key_mask is not None:
        unmasked = tl.load(rule.key_mask + batch * rule.num_keys + keys, mask=in_keys, other=0)
        x = tl.where(_along_queries(unmasked, KEYS_FIRST) != 0, x, other)
    return x


@triton.jit
def _along_keys(x, KEYS_FIRST: tl.constexpr):
    """Numbers of queries, in the shape that broadcasts along the keys of a tile."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _along_queries(x, KEYS_FIRST: tl.constexpr):
    """Numbers of keys, in the shape that broadcasts along the queries of a tile."""
    if KEYS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


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
    """1, 0 or -1 for each fp32 score, and 1 or -1 for NaN: 1 or 0 from a comparison, with the sign bit of the score."""
    sign_bit = scores.to(tl.int32, bitcast=True) & -0x80000000
    one_or_zero = tl.where(scores != 0.0, 1.0, 0.0).to(tl.int32, bitcast=True)
    return (one_or_zero | sign_bit).to(tl.float32, bitcast=True)


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
