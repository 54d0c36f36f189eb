"""Computes F1 to F7 of a plain causal call in one kernel.

For a query block of BLOCK_M rows, the kernel loops over tiles of WIDE keys as long as they fit before the block, then
over a remaining tile of BLOCK_M keys, then over the block's own keys, the only tile that needs a mask. The sum of v
(F8) is read from the table for the keys before the block, and computed by an MMA for its own keys. lse is natural.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..shared.tile_functions import (
    GRID_NUMBERS,
    LOG2E,
    load_row_scalars,
    load_sinks,
    load_tile,
    scheduled_block,
    start_softmax,
    store_tile,
)
from ..shared.value_sums import sum_before
from .recompute_kernels import cancellation_marks


@triton.jit
def _attend_tile(output, row_max, row_sum, scores, v, scale_log2):
    """F1, F2: the online softmax over one tile of scores, in units of log2. Every row sees a key."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    output = tl.dot(p.to(v.dtype), v, output * rescale[:, None], input_precision="ieee")
    return output, new_max, row_sum


@triton.jit
def _write_block_sums(
    table, v, member, block, table_length, cols,
    BLOCK_M: tl.constexpr, TABLE_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of the blocks of one tile of v, for the backward: row n + 1 of the table is the sum of block n.

    The heads of a group share their values, so only the first one writes. Rows beyond the end of the table are skipped.
    """
    PARTS: tl.constexpr = BLOCK_M // TABLE_BLOCK
    sums = tl.sum(tl.reshape(v, PARTS, TABLE_BLOCK, BLOCK_D).to(tl.float32), 1)
    rows = block * PARTS + 1 + tl.arange(0, PARTS)
    inside = (rows < table_length)[:, None] & (cols < HEAD_DIM)[None, :] & (member == 0)
    tl.store(table + rows[:, None] * HEAD_DIM + cols[None, :], sums, mask=inside)
    tl.store(table + cols, tl.zeros([BLOCK_D], tl.float32), mask=(cols < HEAD_DIM) & (member == 0) & (block == 0))


@triton.jit(do_not_specialize=GRID_NUMBERS)
def causal_kernel(
    q_desc, wide_k_desc, wide_v_desc, k_desc, v_desc, gate_desc, alpha, beta, sink, table, out, softmax_out, lse, marks,
    alpha_strides, beta_strides, out_strides, length, table_length, scale_log2,
    num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, WIDE: tl.constexpr, TABLE_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SHIFT: tl.constexpr, SCANNED: tl.constexpr, SUMS_HERE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """F1 to F7. One program owns BLOCK_M queries of one head; writes out, O, and lse (with SHIFT lse - log(alpha), B7).

    `softmax_out` is None if O is `out` or is not saved; it has the strides of `out`. `marks` [B, H, T], if not None, is
    set to 1 for the rows of out in which O is lost to cancellation. SUMS_HERE: the values are summed in the loop, by an
    MMA with ones, and the sums of the block's own values are written to the table. fp32 sums.
    """
    block, batch_head = scheduled_block(
        tl.program_id(0), tl.cdiv(length, BLOCK_M), num_programs, section, LONGEST_LAST=True
    )
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // (num_heads // num_kv_heads)
    rows = tl.arange(0, BLOCK_M)
    queries = block * BLOCK_M + rows

    sink_log2 = None
    if sink is not None:
        sink_log2 = load_sinks(sink, None, batch, head, None, None)
    row_max, row_sum = start_softmax(sink_log2, BLOCK_M)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if SUMS_HERE:
        before_rows = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    q = load_tile(q_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    wide_tiles = block * BLOCK_M // WIDE
    for tile in tl.range(0, wide_tiles):
        k = load_tile(wide_k_desc, batch, kv_head, tile * WIDE, WIDE, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = load_tile(wide_v_desc, batch, kv_head, tile * WIDE, WIDE, BLOCK_D)
        if SUMS_HERE:
            before_rows = tl.dot(tl.full([BLOCK_M, WIDE], 1.0, v.dtype), v, before_rows, input_precision="ieee")
        output, row_max, row_sum = _attend_tile(output, row_max, row_sum, scores, v, scale_log2)
    for tile in tl.range(wide_tiles * (WIDE // BLOCK_M), block):
        k = load_tile(k_desc, batch, kv_head, tile * BLOCK_M, BLOCK_M, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision="ieee")
        v = load_tile(v_desc, batch, kv_head, tile * BLOCK_M, BLOCK_M, BLOCK_D)
        if SUMS_HERE:
            before_rows = tl.dot(tl.full([BLOCK_M, BLOCK_M], 1.0, v.dtype), v, before_rows, input_precision="ieee")
        output, row_max, row_sum = _attend_tile(output, row_max, row_sum, scores, v, scale_log2)

    if beta is not None:
        cols = tl.arange(0, BLOCK_D)
        table += (batch * num_kv_heads + kv_head) * table_length * HEAD_DIM
        if SUMS_HERE:
            before = before_rows
        else:
            # Load before the last tile, whose arithmetic hides the latency.
            if EARLY:
                gdc_wait()
            first = block * (BLOCK_M // TABLE_BLOCK)
            before = sum_before(table, first, cols, cols < HEAD_DIM, HEAD_DIM, SCANNED)[None, :]
    k = load_tile(k_desc, batch, kv_head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    scores = tl.dot(q, k.T, input_precision="ieee")
    v = load_tile(v_desc, batch, kv_head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    if SUMS_HERE and (table is not None):
        _write_block_sums(
            table, v, head % (num_heads // num_kv_heads), block, table_length, cols, BLOCK_M, TABLE_BLOCK, HEAD_DIM,
            BLOCK_D,
        )  # fmt: skip
    scores = tl.where(rows[:, None] >= rows[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    row_lse = (new_max + tl.log2(row_sum)) / LOG2E
    factor = 1.0 / row_sum
    # This is the last tile, so row_sum is complete and the weights can be normalised.
    output = output * (rescale * factor)[:, None]
    p = p * factor[:, None]
    if alpha is not None:
        alpha_rows = load_row_scalars(alpha, alpha_strides, batch, head, queries, length)
        if SHIFT:
            row_lse -= tl.log(alpha_rows)
    if beta is not None:
        beta_rows = load_row_scalars(beta, beta_strides, batch, head, queries, length)
        # The mask in the register layout of the scores, which feeds the MMA without a conversion.
        seen = tl.where(scores != float("-inf"), 1.0, 0.0)
    if (softmax_out is not None) or (marks is not None):
        output = tl.dot(p.to(v.dtype), v, output, input_precision="ieee")
        if softmax_out is not None:
            store_tile(softmax_out, out_strides, batch, head, queries, length, output, HEAD_DIM, BLOCK_D)
        if alpha is not None:
            output *= alpha_rows[:, None]
        if marks is not None:
            of_softmax = tl.sum(output * output, 1)
        if beta is not None:
            value_sum = tl.dot(seen.to(v.dtype), v, input_precision="ieee") + before
            output += beta_rows[:, None] * value_sum
    else:
        # O is not needed: one MMA for both terms, with the weights alpha p + beta of the paper's formula.
        if alpha is not None:
            output *= alpha_rows[:, None]
            p *= alpha_rows[:, None]
        if beta is not None:
            output += beta_rows[:, None] * before
            p += beta_rows[:, None] * seen
        output = tl.dot(p.to(v.dtype), v, output, input_precision="ieee")
    if gate_desc is not None:
        output *= load_tile(gate_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
    store_tile(out, out_strides, batch, head, queries, length, output, HEAD_DIM, BLOCK_D)
    row_offsets = batch_head.to(tl.int64) * length + queries
    tl.store(lse + row_offsets, row_lse, mask=queries < length)
    if marks is not None:
        lost = cancellation_marks(queries, of_softmax, tl.sum(output * output, 1), out.dtype.element_ty, HEAD_DIM)
        tl.store(marks + row_offsets, lost, mask=queries < length)
