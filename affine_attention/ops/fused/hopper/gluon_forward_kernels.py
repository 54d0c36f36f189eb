"""Computes F1 to F8 in one warp-specialised Gluon kernel on Hopper, for full and causal attention, T != S included.

A CTA processes blocks of 64 * CONSUMERS queries of one head. Each consumer is a warp group that owns 64 of the queries.
One warp loads queries, keys and values by TMA; K and V pass through rings of STAGES tiles. In every step a consumer
issues the scores of tile t and the output of tile t - 1, and computes the softmax of tile t while the latter runs:

S_t = Q K_t^T      O += P_{t-1} V_{t-1}      P_t = exp2(S_t * scale_log2 - max)      O *= exp2(old max - max)

Tiles are visited from the last one to the first; `positions_span` says which of them need a mask. The sums of v (F8)
are not part of this loop, where they would need the registers of a second output. The epilogue reads a row of the table
of block sums for the keys that all 64 queries see, and multiplies every other tile of 64 keys with its mask. It applies
sink, alpha, beta and gate as well.

The grid may be smaller than the number of blocks: a CTA then continues with another block, whose tiles are loaded while
the epilogue of the previous one runs.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..shared.tile_functions import GRID_NUMBERS
from .backward_kernels import barrier
from .recompute_kernels import cancellation_marks as triton_marks
from .visible_tiles import mask_pairs, positions_span, row_limits, scheduled_block

LOG2E = tl.constexpr(1.4426950408889634)
ROWS = tl.constexpr(64)  # queries of a consumer, and keys of a tile of the sums
SUM_ROWS = tl.constexpr(16)  # rows per load of the table

cancellation_marks = gluon.jit(triton_marks.fn)


@gluon.jit
def _place(work, rule, num_heads, num_kv_heads, num_slots, section, BLOCK_M: gl.constexpr):
    """(block, batch, head, key-value head) of a piece of work. Causal blocks with many keys come first."""
    block, slot = scheduled_block(work, gl.cdiv(rule.num_queries, BLOCK_M), num_slots, section, True)
    head = slot % num_heads
    return block, slot // num_heads, head, head // (num_heads // num_kv_heads)


@gluon.jit
def _tiles(block, rule, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(number of tiles, the last tile, masked tiles at the end) of a block; at least one tile. The others have no mask.

    Without windows and padding the tiles start at key 0.
    """
    span = positions_span(block, rule, BLOCK_M, BLOCK_N)
    stop = gl.maximum(span[3], 1)
    return stop, stop - 1, stop - span[2]


@gluon.jit
def _load_tiles(
    q_desc, k_desc, v_desc, tiles, barriers, rule, grid,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp loads the queries of each block, then its keys and values, tile by tile."""
    q_smem, k_smem, v_smem = tiles[0], tiles[1], tiles[2]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers[:6]
    num_works, num_heads, num_kv_heads, num_slots, section = grid
    n = 0
    nth = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        block, batch, head, kv_head = _place(work, rule, num_heads, num_kv_heads, num_slots, section, CONSUMERS * ROWS)
        total, last, _ = _tiles(block, rule, CONSUMERS * ROWS, BLOCK_N)
        mbarrier.wait(q_empty, (nth & 1) ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q_desc.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            row = (block * CONSUMERS + consumer) * ROWS
            tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], q_full, q_smem.index(consumer))
        for t in range(total):
            stage = n % STAGES
            phase = ((n // STAGES) & 1) ^ 1
            row = (last - t) * BLOCK_N
            k_ready = k_full.index(stage)
            v_ready = v_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_ready, k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, row, 0], k_ready, k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_ready, v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, row, 0], v_ready, v_smem.index(stage))
            n += 1
        nth += 1  # noqa: SIM113 (a kernel has no enumerate)


@gluon.jit
def _softmax(
    scores, row_max, row_sum, queries, first_key, batch, rule, scale_log2,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """F1, F2 for one tile: (P, the factor for earlier tiles, largest score, sum), in units of log2."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    if MASKED:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = mask_pairs(scores, float("-inf"), queries, keys, batch.to(gl.int64), rule, False)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    base = new_max
    if MASKED:
        # A row that has seen no key yet: -inf - (-inf) is NaN.
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - base[:, None])
    rescale = gl.exp2(row_max - base)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def _step(
    t, n, last, acc, p, row_max, row_sum, queries, batch, rule, scale_log2, tiles, barriers,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The scores and the softmax of tile t, and the output of tile t - 1. `n` counts the tiles before this block."""
    q_smem, k_smem, v_smem, _ = tiles
    _, _, k_full, k_empty, v_full, v_empty, _ = barriers
    dtype: gl.constexpr = k_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    stage = (n + t) % STAGES
    phase = ((n + t) // STAGES) & 1
    before = (n + t - 1) % STAGES
    q = q_smem.index(CONSUMER).reshape([ROWS, BLOCK_D])
    k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
    v = v_smem.index(before).reshape([BLOCK_N, BLOCK_D])
    mbarrier.wait(k_full.index(stage), phase)
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((n + t - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    new_p, rescale, row_max, row_sum = _softmax(
        scores, row_max, row_sum, queries, (last - t) * BLOCK_N, batch, rule, scale_log2, BLOCK_N, MASKED
    )
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
    new_p = gl.convert_layout(new_p.to(dtype), gl.DotOperandLayout(0, acc_layout, 2))
    return acc, new_p, row_max, row_sum


@gluon.jit
def _sum_of_full_tiles(
    table, stop, batch, kv_head, num_kv_heads, table_length,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, TABLE_BLOCK: gl.constexpr, SCANNED: gl.constexpr,
):  # fmt: skip
    """F8's sum over the tiles of 64 keys before `stop`, from the table: [BLOCK_D] in fp32."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    table += (batch * num_kv_heads + kv_head).to(gl.int64) * table_length * HEAD_DIM
    last = gl.minimum(stop * (ROWS // TABLE_BLOCK), table_length - 1)
    if SCANNED:
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, acc_layout))
        total = gl.load(table + last * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (BLOCK_D // 4), BLOCK_D // 4], [4, 1], [1, 0])
        rows = gl.arange(0, SUM_ROWS, gl.SliceLayout(1, layout))
        columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
        sums = gl.zeros([SUM_ROWS, BLOCK_D], gl.float32, layout)
        for first in range(1, last + 1, SUM_ROWS):
            inside = (first + rows <= last)[:, None] & (columns < HEAD_DIM)[None, :]
            at = (first + rows)[:, None] * HEAD_DIM + columns[None, :]
            sums += gl.load(table + at, mask=inside, other=0.0)
        total = gl.convert_layout(gl.sum(sums, 0), gl.SliceLayout(0, acc_layout))
    return total


@gluon.jit
def _store_rows(desc, tile, o_smem, batch, head, row):
    """Writes the rows of a consumer through its staging tile. The copy may still read the tile on return."""
    staging = o_smem.reshape([ROWS, tile.shape[1]])
    staging.store(tile.to(o_smem.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(desc, [batch, head, row, 0], o_smem)


@gluon.jit
def _attend(
    descriptors, rows, strides, table_length, scale_log2, tiles, barriers, rule, grid,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, TABLE_BLOCK: gl.constexpr, STAGES: gl.constexpr, SHIFT: gl.constexpr,
    SCANNED: gl.constexpr,
):  # fmt: skip
    """Four warps compute the output of 64 queries of each block."""
    sum_desc, out_desc, core_desc = descriptors
    gate, alpha, beta, sink, table, lse, marks = rows
    alpha_strides, beta_strides, gate_strides = strides
    q_smem, k_smem, v_smem, o_smem = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full = barriers
    num_works, num_heads, num_kv_heads, num_slots, section = grid
    dtype: gl.constexpr = k_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    own = o_smem.index(CONSUMER)
    own_full = o_full.index(CONSUMER)
    n = 0
    nth = 0
    num_loaded = 0  # tiles of the sums
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        block, batch, head, kv_head = _place(work, rule, num_heads, num_kv_heads, num_slots, section, CONSUMERS * ROWS)
        total, last, masked = _tiles(block, rule, CONSUMERS * ROWS, BLOCK_N)
        first_row = (block * CONSUMERS + CONSUMER) * ROWS
        queries = first_row + gl.arange(0, ROWS, row_layout)
        tma.store_wait(0)
        barrier()  # the staging tile is free
        if beta is not None:
            sum_span = positions_span(block * CONSUMERS + CONSUMER, rule, ROWS, ROWS)
            num_sums = sum_span[3] - sum_span[2]
            mbarrier.expect(own_full, sum_desc.block_type.nbytes, pred=num_sums > 0)
            tma.async_copy_global_to_shared(
                sum_desc, [batch, kv_head, sum_span[2] * ROWS, 0], own_full, own, pred=num_sums > 0
            )

        # The first tile
        stage = n % STAGES
        mbarrier.wait(q_full, nth & 1)
        mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
        scores = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
        q = q_smem.index(CONSUMER).reshape([ROWS, BLOCK_D])
        k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        row_sum = gl.zeros([ROWS], gl.float32, row_layout)
        p, rescale, row_max, row_sum = _softmax(
            scores, row_max, row_sum, queries, last * BLOCK_N, batch, rule, scale_log2, BLOCK_N, True
        )
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc_layout, 2))
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, acc_layout)

        for t in range(1, masked):
            acc, p, row_max, row_sum = _step(
                t, n, last, acc, p, row_max, row_sum, queries, batch, rule, scale_log2, tiles, barriers,
                CONSUMER, BLOCK_N, BLOCK_D, STAGES, True,
            )  # fmt: skip
        for t in range(gl.maximum(masked, 1), total):
            acc, p, row_max, row_sum = _step(
                t, n, last, acc, p, row_max, row_sum, queries, batch, rule, scale_log2, tiles, barriers,
                CONSUMER, BLOCK_N, BLOCK_D, STAGES, False,
            )  # fmt: skip
        mbarrier.arrive(q_empty, count=1)
        n += total
        nth += 1  # noqa: SIM113
        stage = (n - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((n - 1) // STAGES) & 1)
        v = v_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(p, v, acc, is_async=True)

        # Row quantities, while the last MMA runs
        inside = queries < rule.num_queries
        low, high = row_limits(queries, batch.to(gl.int64), rule)
        sees = low <= high
        if sink is not None:
            # The sink acts as one more key without a value.
            sink_log2 = gl.load(sink + head).to(gl.float32) * LOG2E
            new_max = gl.maximum(row_max, sink_log2)
            base = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - base)
            row_sum = row_sum * rescale + gl.exp2(sink_log2 - base)
            row_max = new_max
            factor = rescale / row_sum
        else:
            factor = 1.0 / row_sum
        row_lse = gl.where(sees, (row_max + gl.log2(row_sum)) / LOG2E, float("-inf"))
        row_offsets = (batch * num_heads + head).to(gl.int64) * rule.num_queries + queries
        factor = gl.convert_layout(gl.where(sees, factor, 0.0), acc_rows)
        of_acc = gl.convert_layout(sees, acc_rows)
        acc_queries = first_row + gl.arange(0, ROWS, acc_rows)
        acc_inside = acc_queries < rule.num_queries
        if alpha is not None:
            at = alpha + batch.to(gl.int64) * alpha_strides[0] + head.to(gl.int64) * alpha_strides[1]
            row_alpha = gl.load(at + queries.to(gl.int64) * alpha_strides[2], mask=inside, other=0.0).to(gl.float32)
            if SHIFT:
                row_lse -= gl.where(sees, gl.log(row_alpha), 0.0)
        if beta is not None:
            of_full = _sum_of_full_tiles(
                table, sum_span[2], batch, kv_head, num_kv_heads, table_length, HEAD_DIM, BLOCK_D, TABLE_BLOCK, SCANNED
            )
            at = beta + batch.to(gl.int64) * beta_strides[0] + head.to(gl.int64) * beta_strides[1]
            row_beta = gl.load(at + acc_queries.to(gl.int64) * beta_strides[2], mask=acc_inside, other=0.0)
        gl.store(lse + row_offsets, row_lse, mask=inside)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(stage), count=1)
        acc = gl.where(of_acc[:, None], acc * factor[:, None], 0.0)

        if beta is not None:
            # F8: the staging tile holds the values of tiles with a mask.
            value_sum = gl.zeros([ROWS, BLOCK_D], gl.float32, acc_layout) + of_full[None, :]
            sum_queries = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, sum_layout))
            for at_sum in range(num_sums):
                tile = sum_span[2] + at_sum
                mbarrier.wait(own_full, num_loaded & 1)
                num_loaded += 1
                values = own.reshape([ROWS, BLOCK_D])
                keys = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, sum_layout))
                weights = gl.full([ROWS, ROWS], 1.0, gl.float32, sum_layout)
                weights = mask_pairs(weights, 0.0, sum_queries, keys, batch.to(gl.int64), rule, False)
                weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, acc_layout, 2))
                value_sum = warpgroup_mma(weights, values, value_sum)
                more = at_sum + 1 < num_sums
                mbarrier.expect(own_full, sum_desc.block_type.nbytes, pred=more)
                tma.async_copy_global_to_shared(
                    sum_desc, [batch, kv_head, (tile + 1) * ROWS, 0], own_full, own, pred=more
                )
        if core_desc is not None:
            _store_rows(core_desc, acc, own, batch, head, first_row)
            tma.store_wait(0)
            barrier()
        if alpha is not None:
            acc *= gl.convert_layout(row_alpha, acc_rows)[:, None]
        if marks is not None:
            of_softmax = gl.sum(acc * acc, 1)
        if beta is not None:
            acc += row_beta.to(gl.float32)[:, None] * value_sum
        if marks is not None:
            of_output = gl.sum(acc * acc, 1)
            lost = cancellation_marks(acc_queries, of_softmax, of_output, dtype, HEAD_DIM)
            acc_offsets = (batch * num_heads + head).to(gl.int64) * rule.num_queries + acc_queries
            gl.store(marks + acc_offsets, lost, mask=acc_inside)
        if gate is not None:
            columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, acc_layout))
            at = gate + batch.to(gl.int64) * gate_strides[0] + head.to(gl.int64) * gate_strides[1]
            at += acc_queries.to(gl.int64)[:, None] * gate_strides[2] + columns[None, :]
            gates = gl.load(at, mask=acc_inside[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
            acc *= gates.to(gl.float32)
        # Coefficients of a row that sees no key may hold anything, and 0 times NaN is NaN.
        acc = gl.where(of_acc[:, None], acc, 0.0)
        _store_rows(out_desc, acc, own, batch, head, first_row)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*GRID_NUMBERS[:2], "num_slots", "section", "num_works"])
def attend_kernel(
    q_desc, k_desc, v_desc, sum_desc, out_desc, core_desc, gate, alpha, beta, sink, table, lse, marks,
    rule, alpha_strides, beta_strides, gate_strides, table_length, scale_log2,
    num_works, num_heads, num_kv_heads, num_slots, section,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    TABLE_BLOCK: gl.constexpr, STAGES: gl.constexpr, SHIFT: gl.constexpr, SCANNED: gl.constexpr,
    REGISTERS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """F1 to F8. A CTA owns every gridDim-th of `num_works` blocks of 64 * CONSUMERS queries; writes out, O and lse.

    core_desc is None if O is not saved, or is the output. With SHIFT lse - log(alpha) is written (B7). `marks`
    [B, H, T], if not None, is set to 1 for rows in which O is lost to cancellation. num_slots is B * H. fp32 sums.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, BLOCK_D], out_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(o_full.index(consumer), count=1)

    descriptors = (sum_desc, out_desc, core_desc)
    rows = (gate, alpha, beta, sink, table, lse, marks)
    strides = (alpha_strides, beta_strides, gate_strides)
    tiles = (q_smem, k_smem, v_smem, o_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full)
    grid = (num_works, num_heads, num_kv_heads, num_slots, section)
    gl.warp_specialize(
        [
            (_attend, (
                descriptors, rows, strides, table_length, scale_log2, tiles, barriers, rule, grid,
                0, CONSUMERS, BLOCK_N, HEAD_DIM, BLOCK_D, TABLE_BLOCK, STAGES, SHIFT, SCANNED,
            )),
            (_attend, (
                descriptors, rows, strides, table_length, scale_log2, tiles, barriers, rule, grid,
                1, CONSUMERS, BLOCK_N, HEAD_DIM, BLOCK_D, TABLE_BLOCK, STAGES, SHIFT, SCANNED,
            )),
            (_load_tiles, (q_desc, k_desc, v_desc, tiles, barriers, rule, grid, CONSUMERS, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip
