"""Computes all row gradients from the gradient of the output, before dQ, dK and dV (B2, B5 to B8).

One memory-bound kernel over dOut and O, which precedes the Hopper backward or cuDNN's. Every [B, H, T, D] tensor is
read and written once. Sums and row quantities are fp32; no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .row_sums import load_row_sums
from .tile_functions import LOG2E, row_limits
from .value_sums import locate, sum_visible


@triton.jit
def prologue_kernel(
    grad_out, core, lse, marks, value, table, alpha, beta, sink, gate,
    grad_core, grad_alpha, grad_beta, grad_gate, sink_parts, weighted, weighted_table, row_numbers, zeroed,
    rule,
    go_b, go_h, go_t, core_b, core_h, core_t, lse_b, lse_h, lse_t, value_b, value_g, value_s,
    alpha_b, alpha_h, alpha_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t, gg_b, gg_h, gg_t,
    num_queries, num_blocks, key_blocks, heads, softmax_scale, row_length, num_parts, zeroed_length,
    HEADS: tl.constexpr, SHIFT: tl.constexpr, CAUSAL: tl.constexpr, SCANNED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, ZERO_CHUNK: tl.constexpr, LSE_IN_LOG2: tl.constexpr,
    RULED: tl.constexpr,
):  # fmt: skip
    """B2, B5, B6, B7, and the first step of B4's sums. One program owns BLOCK queries of all HEADS heads of one group.

    SHIFT: lse already includes log(alpha) (B7). `core` is O; with `marks` it is the output (B8), and values that depend
    on E . O are not written for marked rows. Outputs, each skipped if its pointer is None: row_numbers [B, H, NUM_ROWS,
    row_length], read by the Hopper backward; grad_core (strides of core) = alpha E, or E with SHIFT, or E times the
    sign of alpha with row_numbers (without grad_core, alpha must not be negative); grad_alpha, grad_beta (contiguous
    [B, H, T]); grad_gate; the first of sink_parts [B, H, num_parts]; weighted = the sum of beta E over the group's
    heads (contiguous [B, G, T, D]), and its block sums in reverse order: the sum of block n is row num_blocks - n of
    weighted_table, so that a prefix sum is a sum over *later* blocks. `zeroed`, zeroed_length elements in fp32, is set
    to 0 for the accumulation of dQ.

    RULED: there is a `rule`; without one, attention is plain causal or full. With a rule, `table` holds the sums of v
    of every row (row_sums.py), and a row with lse = -inf sees no key and has zero gradients, whatever its coefficients.
    The bits of the first and the last key that a row sees are rows 4 and 5 of row_numbers. NUM_ROWS is 8 with a rule,
    else 4.
    """
    slot, block = locate(num_blocks, True)
    groups = heads // HEADS
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    # 64-bit base offsets, 32-bit offsets inside the tile: half the registers of 64-bit offsets throughout.
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    row_ok, col_ok = first_row + rows < num_queries, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]

    go_inner = rows[:, None] * go_t + cols[None, :]
    core_inner = rows[:, None] * core_t + cols[None, :]
    gate_inner = rows[:, None] * gate_t + cols[None, :]
    grad_out += batch * go_b + group * HEADS * go_h + first_row * go_t
    core += batch * core_b + group * HEADS * core_h + first_row * core_t
    # Prefetch the next head's tiles before this head's arithmetic, since the kernel is memory-bound.
    next_grad = tl.load(grad_out + go_inner, mask=ok, other=0.0)
    next_core = tl.load(core + core_inner, mask=ok, other=0.0)
    if beta is not None:
        if not RULED:
            sums = sum_visible(
                value + batch * value_b + group * value_g + first_row * value_s,
                table + slot.to(tl.int64) * (key_blocks + 1) * HEAD_DIM,
                value_s, rows, cols, ok, col_ok, block, key_blocks, CAUSAL, SCANNED, HEAD_DIM,
            )  # fmt: skip
        else:
            sums = load_row_sums(table, slot, first_row + rows, num_queries, HEAD_DIM, BLOCK_D)
        # To save registers, keep a whole tile of sums only if all of it is written.
        if weighted is not None:
            weighted_sum = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        else:
            block_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
    NUM_ROWS: tl.constexpr = 8 if RULED else 4
    if RULED:
        low, high = row_limits(block * BLOCK + rows, batch, rule)
    for nth in range(HEADS):
        head = group * HEADS + nth
        row_offsets = (batch * heads + head) * num_queries + first_row + rows
        # Hoist all loads above the first store, so that the compiler can overlap them.
        if (sink is not None) or (row_numbers is not None):
            lse_ptrs = lse + (batch * lse_b + head * lse_h + first_row * lse_t) + rows * lse_t
            row_lse = tl.load(lse_ptrs, mask=row_ok, other=0.0)
            if LSE_IN_LOG2:
                row_lse = row_lse / LOG2E
        if alpha is not None:
            alpha_ptrs = alpha + (batch * alpha_b + head * alpha_h + first_row * alpha_t) + rows * alpha_t
            alpha_rows = tl.load(alpha_ptrs, mask=row_ok, other=0.0).to(tl.float32)
        if beta is not None:
            beta_ptrs = beta + (batch * beta_b + head * beta_h + first_row * beta_t) + rows * beta_t
            beta_rows = tl.load(beta_ptrs, mask=row_ok, other=0.0).to(tl.float32)
        known = row_ok
        if marks is not None:
            known = row_ok & (tl.load(marks + row_offsets, mask=row_ok, other=0) == 0)
        grad, o = next_grad.to(tl.float32), next_core.to(tl.float32)
        if HEADS > 1:
            grad_out += go_h
            core += core_h
            more = ok & (nth + 1 < HEADS)
            next_grad = tl.load(grad_out + go_inner, mask=more, other=0.0)
            next_core = tl.load(core + core_inner, mask=more, other=0.0)
        if RULED:
            sees = row_lse != float("-inf")
            if alpha is not None:
                alpha_rows = tl.where(sees, alpha_rows, 0.0)
            if beta is not None:
                beta_rows = tl.where(sees, beta_rows, 0.0)
        mixed = o
        if alpha is not None:
            mixed = mixed * alpha_rows[:, None]
        if beta is not None:
            mixed = mixed + beta_rows[:, None] * sums
        if gate is not None:
            gate_ptrs = gate + (batch * gate_b + head * gate_h + first_row * gate_t) + gate_inner
            gg_outer = grad_gate + (batch * gg_b + head * gg_h + first_row * gg_t)
            tl.store(gg_outer + rows[:, None] * gg_t + cols[None, :], grad * mixed, mask=ok)
            grad = grad * tl.load(gate_ptrs, mask=ok, other=0.0).to(tl.float32)
            if RULED:
                grad = tl.where(sees[:, None], grad, 0.0)
        dalpha = tl.sum(grad * o, axis=1)
        if beta is not None:
            dbeta = tl.sum(grad * sums, axis=1)
            tl.store(grad_beta + row_offsets, dbeta, mask=row_ok)
            if weighted is not None:
                weighted_sum += beta_rows[:, None] * grad
            else:
                block_sum += tl.sum(beta_rows[:, None] * grad, axis=0)
        if marks is not None:
            if beta is not None:
                dalpha -= beta_rows * dbeta
            if alpha is not None:
                dalpha = dalpha / alpha_rows
        if grad_alpha is not None:
            tl.store(grad_alpha + row_offsets, dalpha, mask=known)
        delta = dalpha
        if (alpha is not None) and (not SHIFT):
            delta = alpha_rows * dalpha
        if sink is not None:
            share = tl.exp(tl.load(sink + head).to(tl.float32) - row_lse)
            if RULED:
                share = tl.where(sees, share, 0.0)
            part = -tl.sum(tl.where(known, share * delta, 0.0), axis=0)
            tl.store(sink_parts + (batch * heads + head) * num_parts + block, part)
        if row_numbers is not None:
            new_lse = row_lse
            sign = tl.full([BLOCK], 1.0, tl.float32)
            if (alpha is not None) and (not SHIFT):
                if grad_core is not None:
                    new_lse -= tl.log(tl.abs(alpha_rows))
                    sign = tl.where(alpha_rows < 0, -1.0, 1.0)
                    grad = grad * sign[:, None]
                else:
                    new_lse -= tl.log(alpha_rows)
            signed = dalpha * sign
            if gate is not None:
                # Use E as rounded for the next kernel: where E . v and E . O cancel, both need the same rounding.
                signed = tl.sum(grad.to(grad_out.dtype.element_ty).to(tl.float32) * o, axis=1)
            numbers = row_numbers + (batch * heads + head) * NUM_ROWS * row_length + first_row + rows
            tl.store(numbers, -new_lse / softmax_scale, mask=row_ok)
            tl.store(numbers + row_length, -signed, mask=known)
            if beta is not None:
                tl.store(numbers + 2 * row_length, beta_rows * sign, mask=row_ok)
            if RULED:
                tl.store(numbers + 4 * row_length, low.to(tl.float32, bitcast=True), mask=row_ok)
                tl.store(numbers + 5 * row_length, high.to(tl.float32, bitcast=True), mask=row_ok)
        if grad_core is not None:
            if (alpha is not None) and (not SHIFT) and (row_numbers is None):
                grad = grad * alpha_rows[:, None]
            core_outer = batch * core_b + head * core_h + first_row * core_t
            tl.store(grad_core + core_outer + core_inner, grad, mask=ok)
    if beta is not None:
        weighted_table += slot.to(tl.int64) * (num_blocks + 1) * HEAD_DIM
        if weighted is not None:
            block_sum = tl.sum(weighted_sum, axis=0)
        tl.store(weighted_table + (num_blocks - block) * HEAD_DIM + cols, block_sum, mask=col_ok)
        if block == 0:
            tl.store(weighted_table + cols, tl.zeros([BLOCK_D], dtype=tl.float32), mask=col_ok)
        if weighted is not None:
            weighted += (slot.to(tl.int64) * num_queries + first_row) * HEAD_DIM
            tl.store(weighted + rows[:, None] * HEAD_DIM + cols[None, :], weighted_sum, mask=ok)
    if zeroed is not None:
        first = tl.program_id(0).to(tl.int64) * ZERO_CHUNK
        for start in range(0, ZERO_CHUNK, 1024):
            at = first + start + tl.arange(0, 1024)
            tl.store(zeroed + at, tl.zeros([1024], dtype=tl.float32), mask=at < zeroed_length)
