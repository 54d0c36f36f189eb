"""Turns cuDNN's plain attention into the whole equation: the memory-bound Triton passes before and after it.

Forward, with O, lse the pair that cuDNN returns for plain softmax attention:
F6  O_i <- O_i / (1 + exp(sink - lse_i)),  lse_i <- log(exp(lse_i) + exp(sink))
F7  out_i = gate_i * (alpha_i O_i + beta_i sum_i)
F8  sum_i = sum of v_j over visible j  (causal: table of block sums + a scan inside the block)

Backward, with E = gate * dOut and the O, lse of F6:
B1  dalpha_i = E_i . O_i      B2  dbeta_i = E_i . sum_i      B3  dgate_i = dOut_i * (alpha_i O_i + beta_i sum_i)
B4  dsink = -sum_i exp(sink - lse_i) alpha_i dalpha_i
B5  the gradient that cuDNN gets: alpha E. Or E itself with lse_i - log(alpha_i), which is the same in exact arithmetic:
    cuDNN then forms exp(s - lse + log alpha) = alpha P, and alpha P (dP - E.O) = P (alpha dP - delta). alpha = 0 gives
    lse = +inf, and weights of 0. In B4 exp(sink - lse) then holds alpha already.
B6  dV_j += sum of beta_i E_i over the queries i that see j  (the transpose of F8)
B7  what the backward in one kernel (alone_backward_kernels.py) gets in cuDNN's place: E with the sign of alpha, and for
    every row -(lse_i - log|alpha_i|) / softmax_scale, -E_i . O_i and beta_i, both with that sign
B8  B1 without O, where there is no gate: dalpha_i = (E_i . out_i - beta_i dbeta_i) / alpha_i; not so for the rows that
    the forward has marked as faint, whose part is done by a kernel beside this one (faint_kernels.py)

Every pass reads and writes its [B, H, T, D] tensors once. Sums and row quantities are fp32; no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .faint_kernels import faint_marks


@triton.jit
def locate(num_blocks, BACKWARDS: tl.constexpr):
    """(batch and head slot, block) of this program; blocks are neighbours.

    BACKWARDS walks from the end of memory: what the kernel before wrote last is then still in the L2 cache, and what
    the kernel after reads first is written last.
    """
    program = tl.program_id(0)
    if BACKWARDS:
        program = tl.num_programs(0) - 1 - program
    return program // num_blocks, program % num_blocks


@triton.jit
def sum_visible(
    value, table, value_s, rows, cols, ok, col_ok, block, key_blocks,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """F8 for a block of queries: [BLOCK, D] when causal, [1, D] when every query sees every key.

    `value` points at the block's first row when causal; `rows` count from there. A scan, not a product with a triangle
    of ones: the product leaves its result in the layout of the matrix units, and every head then pays to leave it.
    """
    if CAUSAL:
        before = tl.load(table + block * HEAD_DIM + cols, mask=col_ok, other=0.0)
        tile = tl.load(value + rows[:, None] * value_s + cols[None, :], mask=ok, other=0.0)
        summed = tl.cumsum(tile.to(tl.float32), axis=0) + before[None, :]
    else:
        summed = tl.load(table + key_blocks * HEAD_DIM + cols, mask=col_ok, other=0.0)[None, :]
    return summed


@triton.jit
def block_sums_kernel(
    value, table, value_b, value_g, value_s, num_keys, num_blocks, groups,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """F8, first step. One program owns BLOCK keys of one key-value head; writes their sum to row block + 1.

    EARLY: the next kernel may begin when the last program has; it waits (`gdc_wait`) before it reads what this writes.
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
    """F8 and B6, second step. One program owns BLOCK_D columns of one table [length, D]; prefix sums in place.

    Row 0, the empty sum, is there already: row n then holds the sum of the n blocks before block n. EARLY: this kernel
    has begun before the one that writes the sums has ended, and lets the next one do the same.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    table += tl.program_id(0).to(tl.int64) * length * HEAD_DIM
    carry = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(1, length, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        place = table + rows[:, None] * HEAD_DIM + cols[None, :]
        inside = (rows < length)[:, None] & (cols < HEAD_DIM)[None, :]
        tile = tl.load(place, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(place, tl.cumsum(tile, axis=0) + carry[None, :], mask=inside)
        carry += tl.sum(tile, axis=0)


@triton.jit
def epilogue_kernel(
    core, lse, corrected, out, marks, value, table, alpha, beta, sink, gate,
    core_b, core_h, core_t, lse_b, lse_h, lse_t, value_b, value_g, value_s,
    alpha_b, alpha_h, alpha_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t,
    num_queries, num_blocks, key_blocks, heads, repeats,
    HEADS: tl.constexpr, SHIFT: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """F6 and F7. One program owns BLOCK queries of HEADS heads of one group; corrects lse, with SHIFT as B5 wants it.

    Writes, where the pointer is not None, with core's strides: corrected = O with the sink, out. Both may be core.
    marks [B, H, T] gets which rows are faint in out.
    """
    slot, block = locate(num_blocks, True)
    slots = heads // HEADS
    batch, first = (slot // slots).to(tl.int64), ((slot % slots) * HEADS).to(tl.int64)
    group = first // repeats
    # 64-bit offsets for what a program owns, 32-bit ones inside its tile: half the registers of 64-bit pointers.
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    row_ok, col_ok = first_row + rows < num_queries, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]

    inner = rows[:, None] * core_t + cols[None, :]
    gate_inner = rows[:, None] * gate_t + cols[None, :]
    # The next head's tile is asked for before this head's work: the pass is bound by memory, not by arithmetic.
    next_tile = tl.load(core + (batch * core_b + first * core_h + first_row * core_t) + inner, mask=ok, other=0.0)
    if beta is not None:
        sums = sum_visible(
            value + batch * value_b + group * value_g + first_row * value_s,
            table + (batch * (heads // repeats) + group) * (key_blocks + 1) * HEAD_DIM,
            value_s, rows, cols, ok, col_ok, block, key_blocks, CAUSAL, HEAD_DIM,
        )  # fmt: skip
    for nth in range(HEADS):
        head = first + nth
        outer = batch * core_b + head * core_h + first_row * core_t
        tile = next_tile.to(tl.float32)
        if HEADS > 1:
            next_tile = tl.load(core + outer + core_h + inner, mask=ok & (nth + 1 < HEADS), other=0.0)
        lse_place = lse + (batch * lse_b + head * lse_h + first_row * lse_t) + rows * lse_t
        if (sink is not None) or SHIFT:
            new_lse = tl.load(lse_place, mask=row_ok, other=0.0)
        if sink is not None:
            sink_h = tl.load(sink + head).to(tl.float32)
            tile = tile / (1.0 + tl.exp(sink_h - new_lse))[:, None]
            top = tl.maximum(new_lse, sink_h)
            new_lse = top + tl.log(tl.exp(new_lse - top) + tl.exp(sink_h - top))
            if corrected is not None:
                tl.store(corrected + outer + inner, tile, mask=ok)
        if alpha is not None:
            alpha_place = alpha + (batch * alpha_b + head * alpha_h + first_row * alpha_t) + rows * alpha_t
            alpha_rows = tl.load(alpha_place, mask=row_ok, other=1.0).to(tl.float32)
            tile = tile * alpha_rows[:, None]
            if SHIFT:
                new_lse -= tl.log(alpha_rows)
        if marks is not None:
            of_softmax = tl.sum(tile * tile, axis=1)
        if (sink is not None) or SHIFT:
            # A row of lse may be held by several threads: all must have read it before one writes.
            tl.debug_barrier()
            tl.store(lse_place, new_lse, mask=row_ok)
        if beta is not None:
            beta_place = beta + (batch * beta_b + head * beta_h + first_row * beta_t) + rows * beta_t
            tile += tl.load(beta_place, mask=row_ok, other=0.0).to(tl.float32)[:, None] * sums
        if gate is not None:
            gate_place = gate + (batch * gate_b + head * gate_h + first_row * gate_t) + gate_inner
            tile = tile * tl.load(gate_place, mask=ok, other=0.0).to(tl.float32)
        if marks is not None:
            of_output = tl.sum(tile * tile, axis=1)
            faint = faint_marks(first_row + rows, of_softmax, of_output, out.dtype.element_ty, HEAD_DIM)
            tl.store(marks + (batch * heads + head) * num_queries + first_row + rows, faint, mask=row_ok)
        if out is not None:
            tl.store(out + outer + inner, tile, mask=ok)


@triton.jit
def prologue_kernel(
    grad_out, core, lse, marks, value, table, alpha, beta, sink, gate,
    grad_core, grad_alpha, grad_beta, grad_gate, sink_parts, weighted, weighted_table, row_numbers,
    go_b, go_h, go_t, core_b, core_h, core_t, lse_b, lse_h, lse_t, value_b, value_g, value_s,
    alpha_b, alpha_h, alpha_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t, gg_b, gg_h, gg_t,
    num_queries, num_blocks, key_blocks, heads, softmax_scale, row_length, num_parts,
    HEADS: tl.constexpr, SHIFT: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """B1 to B5 or B7, B6's first step. One program owns BLOCK queries of all HEADS heads of one group.

    SHIFT: lse holds alpha (B5). `core` is O; with marks it is out (B8), and what E . O gives is not written for marked
    rows. Writes, where the pointer is not None: row_numbers, [B, H, 4, row_length] (B7); grad_core = alpha E, with
    SHIFT E, with row_numbers E and alpha's sign (strides of core), without which alpha must not be negative;
    grad_alpha, grad_beta (contiguous [B, H, T]); grad_gate; the first of sink_parts [B, H, num_parts]; weighted = the
    sum of beta E over the group's heads (contiguous [B, G, T, D]), and its block sums, mirrored: block n's is row
    num_blocks - n of weighted_table, so that one forward scan gives sums over *later* blocks.
    """
    slot, block = locate(num_blocks, True)
    groups = heads // HEADS
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    # 64-bit offsets for what a program owns, 32-bit ones inside its tile: half the registers of 64-bit pointers.
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    row_ok, col_ok = first_row + rows < num_queries, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]

    go_inner = rows[:, None] * go_t + cols[None, :]
    core_inner = rows[:, None] * core_t + cols[None, :]
    gate_inner = rows[:, None] * gate_t + cols[None, :]
    grad_out += batch * go_b + group * HEADS * go_h + first_row * go_t
    core += batch * core_b + group * HEADS * core_h + first_row * core_t
    # The next head's tiles are asked for before this head's work: the pass is bound by memory, not by arithmetic.
    next_grad = tl.load(grad_out + go_inner, mask=ok, other=0.0)
    next_core = tl.load(core + core_inner, mask=ok, other=0.0)
    if beta is not None:
        sums = sum_visible(
            value + batch * value_b + group * value_g + first_row * value_s,
            table + slot.to(tl.int64) * (key_blocks + 1) * HEAD_DIM,
            value_s, rows, cols, ok, col_ok, block, key_blocks, CAUSAL, HEAD_DIM,
        )  # fmt: skip
        # Registers are short: a tile of sums only where all of it is asked for.
        if weighted is not None:
            weighted_sum = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        else:
            block_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
    for nth in range(HEADS):
        head = group * HEADS + nth
        row_place = (batch * heads + head) * num_queries + first_row + rows
        # All that a head needs is asked for before anything is written: no load passes a store.
        if (sink is not None) or (row_numbers is not None):
            lse_place = lse + (batch * lse_b + head * lse_h + first_row * lse_t) + rows * lse_t
            row_lse = tl.load(lse_place, mask=row_ok, other=0.0)
        if alpha is not None:
            alpha_place = alpha + (batch * alpha_b + head * alpha_h + first_row * alpha_t) + rows * alpha_t
            alpha_rows = tl.load(alpha_place, mask=row_ok, other=0.0).to(tl.float32)
        if beta is not None:
            beta_place = beta + (batch * beta_b + head * beta_h + first_row * beta_t) + rows * beta_t
            beta_rows = tl.load(beta_place, mask=row_ok, other=0.0).to(tl.float32)
        known = row_ok
        if marks is not None:
            known = row_ok & (tl.load(marks + row_place, mask=row_ok, other=0) == 0)
        grad, o = next_grad.to(tl.float32), next_core.to(tl.float32)
        if HEADS > 1:
            grad_out += go_h
            core += core_h
            more = ok & (nth + 1 < HEADS)
            next_grad = tl.load(grad_out + go_inner, mask=more, other=0.0)
            next_core = tl.load(core + core_inner, mask=more, other=0.0)
        mixed = o
        if alpha is not None:
            mixed = mixed * alpha_rows[:, None]
        if beta is not None:
            mixed = mixed + beta_rows[:, None] * sums
        if gate is not None:
            gate_place = gate + (batch * gate_b + head * gate_h + first_row * gate_t) + gate_inner
            gg_outer = grad_gate + (batch * gg_b + head * gg_h + first_row * gg_t)
            tl.store(gg_outer + rows[:, None] * gg_t + cols[None, :], grad * mixed, mask=ok)
            grad = grad * tl.load(gate_place, mask=ok, other=0.0).to(tl.float32)
        dalpha = tl.sum(grad * o, axis=1)
        if beta is not None:
            dbeta = tl.sum(grad * sums, axis=1)
            tl.store(grad_beta + row_place, dbeta, mask=row_ok)
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
            tl.store(grad_alpha + row_place, dalpha, mask=known)
        delta = dalpha
        if (alpha is not None) and (not SHIFT):
            delta = alpha_rows * dalpha
        if sink is not None:
            share = tl.exp(tl.load(sink + head).to(tl.float32) - row_lse)
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
                # From E as the next kernel reads it: where E . v and E . O cancel, they must have been rounded alike.
                signed = tl.sum(grad.to(grad_out.dtype.element_ty).to(tl.float32) * o, axis=1)
            numbers = row_numbers + (batch * heads + head) * 4 * row_length + first_row + rows
            tl.store(numbers, -new_lse / softmax_scale, mask=row_ok)
            tl.store(numbers + row_length, -signed, mask=known)
            if beta is not None:
                tl.store(numbers + 2 * row_length, beta_rows * sign, mask=row_ok)
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


@triton.jit
def add_later_kernel(
    grad_value, source, beta, gate, table,
    gv_b, gv_g, gv_s, source_b, source_g, source_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t,
    num_keys, num_blocks, query_blocks, groups,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """B6, last step. One program owns BLOCK keys of one key-value head; adds to grad_value in place.

    `source` holds sum over heads of beta E; where a group has one head it is dOut, with `beta` and `gate` to apply.
    """
    slot, block = locate(num_blocks, True)
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    # Rows in descending order: a plain scan then sums over later rows, at a quarter of a reversed scan's shuffles.
    rows, cols = BLOCK - 1 - tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    first_row = (block * BLOCK).to(tl.int64)
    row_ok, col_ok = first_row + rows < num_keys, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]
    table += slot.to(tl.int64) * (query_blocks + 1) * HEAD_DIM

    place = grad_value + (batch * gv_b + group * gv_g + first_row * gv_s) + rows[:, None] * gv_s + cols[None, :]
    total = tl.load(place, mask=ok, other=0.0).to(tl.float32)
    if CAUSAL:
        source += batch * source_b + group * source_g + first_row * source_t
        tile = tl.load(source + rows[:, None] * source_t + cols[None, :], mask=ok, other=0.0)
        if gate is not None:
            gate += batch * gate_b + group * gate_h + first_row * gate_t
            gate_place = gate + rows[:, None] * gate_t + cols[None, :]
            tile = tile.to(tl.float32) * tl.load(gate_place, mask=ok, other=0.0).to(tl.float32)
        if beta is not None:
            beta_place = beta + (batch * beta_b + group * beta_h + first_row * beta_t) + rows * beta_t
            tile = tile.to(tl.float32) * tl.load(beta_place, mask=row_ok, other=0.0).to(tl.float32)[:, None]
        later = tl.load(table + (num_blocks - 1 - block) * HEAD_DIM + cols, mask=col_ok, other=0.0)
        total += tl.cumsum(tile.to(tl.float32), axis=0)
    else:
        later = tl.load(table + query_blocks * HEAD_DIM + cols, mask=col_ok, other=0.0)
    tl.debug_barrier()
    tl.store(place, total + later[None, :], mask=ok)
