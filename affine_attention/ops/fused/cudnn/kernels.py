"""The epilogues of cuDNN's plain attention: memory-bound kernels after its forward and after its backward.

After the forward: F6 and F7, from O and lse. After the backward: the rest of B4. Every [B, H, T, D] tensor is read and
written once. Sums and row quantities are fp32; no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..hopper.recompute_kernels import cancellation_marks
from ..shared.value_sums import locate, sum_before, sum_visible


@triton.jit
def epilogue_kernel(
    core, lse, corrected, out, marks, value, table, alpha, beta, sink, gate,
    core_b, core_h, core_t, lse_b, lse_h, lse_t, value_b, value_g, value_s,
    alpha_b, alpha_h, alpha_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t,
    num_queries, num_blocks, key_blocks, heads, repeats,
    HEADS: tl.constexpr, SHIFT: tl.constexpr, CAUSAL: tl.constexpr, SCANNED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """F6 and F7. One program owns BLOCK queries of HEADS heads of one group; corrects lse, with SHIFT as in B7.

    Outputs with the strides of core, skipped if the pointer is None: corrected = O with the sink, and out. Both may be
    core. marks [B, H, T] is set to 1 for the rows of out in which O is lost to cancellation.
    """
    slot, block = locate(num_blocks, True)
    slots = heads // HEADS
    batch, first = (slot // slots).to(tl.int64), ((slot % slots) * HEADS).to(tl.int64)
    group = first // repeats
    # 64-bit base offsets, 32-bit offsets inside the tile: half the registers of 64-bit offsets throughout.
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    row_ok, col_ok = first_row + rows < num_queries, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]

    inner = rows[:, None] * core_t + cols[None, :]
    gate_inner = rows[:, None] * gate_t + cols[None, :]
    # Prefetch the next head's tile before this head's arithmetic, since the kernel is memory-bound.
    next_tile = tl.load(core + (batch * core_b + first * core_h + first_row * core_t) + inner, mask=ok, other=0.0)
    if beta is not None:
        sums = sum_visible(
            value + batch * value_b + group * value_g + first_row * value_s,
            table + (batch * (heads // repeats) + group) * (key_blocks + 1) * HEAD_DIM,
            value_s, rows, cols, ok, col_ok, block, key_blocks, CAUSAL, SCANNED, HEAD_DIM,
        )  # fmt: skip
    for nth in range(HEADS):
        head = first + nth
        outer = batch * core_b + head * core_h + first_row * core_t
        tile = next_tile.to(tl.float32)
        if HEADS > 1:
            next_tile = tl.load(core + outer + core_h + inner, mask=ok & (nth + 1 < HEADS), other=0.0)
        lse_ptrs = lse + (batch * lse_b + head * lse_h + first_row * lse_t) + rows * lse_t
        if (sink is not None) or SHIFT:
            new_lse = tl.load(lse_ptrs, mask=row_ok, other=0.0)
        if sink is not None:
            sink_h = tl.load(sink + head).to(tl.float32)
            tile = tile / (1.0 + tl.exp(sink_h - new_lse))[:, None]
            top = tl.maximum(new_lse, sink_h)
            new_lse = top + tl.log(tl.exp(new_lse - top) + tl.exp(sink_h - top))
            if corrected is not None:
                tl.store(corrected + outer + inner, tile, mask=ok)
        if alpha is not None:
            alpha_ptrs = alpha + (batch * alpha_b + head * alpha_h + first_row * alpha_t) + rows * alpha_t
            alpha_rows = tl.load(alpha_ptrs, mask=row_ok, other=1.0).to(tl.float32)
            tile = tile * alpha_rows[:, None]
            if SHIFT:
                new_lse -= tl.log(alpha_rows)
        if marks is not None:
            of_softmax = tl.sum(tile * tile, axis=1)
        if (sink is not None) or SHIFT:
            # Several threads may hold the same row of lse: all must have read it before one overwrites it.
            tl.debug_barrier()
            tl.store(lse_ptrs, new_lse, mask=row_ok)
        if beta is not None:
            beta_ptrs = beta + (batch * beta_b + head * beta_h + first_row * beta_t) + rows * beta_t
            tile += tl.load(beta_ptrs, mask=row_ok, other=0.0).to(tl.float32)[:, None] * sums
        if gate is not None:
            gate_ptrs = gate + (batch * gate_b + head * gate_h + first_row * gate_t) + gate_inner
            tile = tile * tl.load(gate_ptrs, mask=ok, other=0.0).to(tl.float32)
        if marks is not None:
            of_output = tl.sum(tile * tile, axis=1)
            lost = cancellation_marks(first_row + rows, of_softmax, of_output, out.dtype.element_ty, HEAD_DIM)
            tl.store(marks + (batch * heads + head) * num_queries + first_row + rows, lost, mask=row_ok)
        if out is not None:
            tl.store(out + outer + inner, tile, mask=ok)


@triton.jit
def add_later_kernel(
    grad_value, source, beta, gate, table,
    gv_b, gv_g, gv_s, source_b, source_g, source_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t,
    num_keys, num_blocks, query_blocks, groups,
    CAUSAL: tl.constexpr, SCANNED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """B4, last step. One program owns BLOCK keys of one key-value head; adds to grad_value in ptrs.

    `source` holds the sum of beta E over the heads of a group; for groups of one head it is dOut, and `beta` and `gate`
    are applied here.
    """
    slot, block = locate(num_blocks, True)
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    # With rows in descending order, a plain scan sums over later rows: a quarter of the shuffles of a reversed scan.
    rows, cols = BLOCK - 1 - tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    row_ok, col_ok = first_row + rows < num_keys, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]
    table += slot.to(tl.int64) * (query_blocks + 1) * HEAD_DIM

    ptrs = grad_value + (batch * gv_b + group * gv_g + first_row * gv_s) + rows[:, None] * gv_s + cols[None, :]
    total = tl.load(ptrs, mask=ok, other=0.0).to(tl.float32)
    if CAUSAL:
        source += batch * source_b + group * source_g + first_row * source_t
        tile = tl.load(source + rows[:, None] * source_t + cols[None, :], mask=ok, other=0.0)
        if gate is not None:
            gate += batch * gate_b + group * gate_h + first_row * gate_t
            gate_ptrs = gate + rows[:, None] * gate_t + cols[None, :]
            tile = tile.to(tl.float32) * tl.load(gate_ptrs, mask=ok, other=0.0).to(tl.float32)
        if beta is not None:
            beta_ptrs = beta + (batch * beta_b + group * beta_h + first_row * beta_t) + rows * beta_t
            tile = tile.to(tl.float32) * tl.load(beta_ptrs, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        later = sum_before(table, num_blocks - 1 - block, cols, col_ok, HEAD_DIM, SCANNED)
        total += tl.cumsum(tile.to(tl.float32), axis=0)
    else:
        later = sum_before(table, query_blocks, cols, col_ok, HEAD_DIM, SCANNED)
    tl.debug_barrier()
    tl.store(ptrs, total + later[None, :], mask=ok)
