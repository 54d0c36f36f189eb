"""Computes dQ, dK and dV in one Gluon kernel on Hopper.

One CTA owns BLOCK_N keys of one key-value head and loops over the tiles of BLOCK_M queries that see some of them, for
each query head of its group, with five MMAs per tile. With the gradient E (including gate and sign of alpha),
P' = |alpha| P and delta = E . O (B7):

S = K Q^T - lse'/softmax_scale     P' = exp2(S * scale_log2)     lse' = lse - log|alpha|
dV += (P' + beta) E                dP = V E^T - delta            dS = P' dP
dK += dS Q                         dQ += dS^T K                  (both * softmax_scale at the end)

All tiles of scores are transposed, [keys, queries], so that P' and dS feed the MMAs of dV and dK from registers. The
row quantities lse' and delta are the initial values of accumulators and need no registers. beta is constant along the
keys: its term is a sum over a table for tiles without a mask (B4), and a small MMA in tiles with one.

In plain causal calls the tiles at the block's own positions are masked, and all later ones are not. With a rule
(RULED: windows, segments, padding, T != S), `key_span` says which tiles are visited and which of them are masked.

Warps are specialised: one loads tiles by TMA, one adds finished tiles of dQ to global memory in fp32 by TMA, eight run
the MMAs. They synchronise through mbarriers. The order of the additions is not fixed, unless there are `turns`: each
tile of dQ then has a counter, and CTAs add to it from the block of the last keys to that of the first. A CTA reaches
the tiles of later blocks one step after the owner of those blocks does, so that it seldom waits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..shared.tile_functions import GRID_NUMBERS
from .visible_tiles import finite_or_zero, key_span, mask_irregular, mask_outside

WARPS = tl.constexpr(8)  # warps that run MMAs: two warp groups, 64 keys each
ADDED = tl.constexpr(256)  # elements of dQ per row of its descriptor (backward.py)
BETA_PART = tl.constexpr(32)  # queries per MMA with beta: few, so that its weights do not spill
SUM_ROWS = tl.constexpr(16)  # rows per load of a table without prefix sums
WORKER_REGISTERS = tl.constexpr(24)
LOW = tl.constexpr(4)  # the rows of the first and the last visible key among the row numbers
HIGH = tl.constexpr(5)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7


@builtin
def async_add(tensor_desc, coord, source, _semantic=None):
    """Adds a tile of shared memory to global memory by TMA."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, source.handle)


@gluon.constexpr_function
def thread_order(BLOCK_M, BLOCK_D):
    """The layout of a flat tile of dQ as its 256 threads hold it: 16 bytes per thread, contiguous within a warp."""
    higher = [[2**bit] for bit in range(7, (BLOCK_M * BLOCK_D).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], *higher[:-3]],
        lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=higher[-3:],
        block_bases=[],
        shape=[BLOCK_M * BLOCK_D],
    )


@gluon.jit
def in_thread_order(tile, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """Flattens the MMA result of a tile of dQ in thread order: a relabelling of registers, no data movement.

    The row index is composed of warp (16), half (8) and thread // 4; the column index of chunk (16), half (8),
    thread % 4 (2) and the element of a pair.
    """
    PARTS: gl.constexpr = 128 // BLOCK_M
    tile = tile.reshape([BLOCK_M // 16, 2, 8, PARTS, BLOCK_D // PARTS // 16, 2, 4, 2])
    tile = gl.permute(tile, [3, 0, 4, 1, 2, 6, 5, 7])
    return gl.convert_layout(tile.reshape([BLOCK_M * BLOCK_D]), thread_order(BLOCK_M, BLOCK_D))


@gluon.jit
def nth_tile(n, group, left, full, right):
    """(query head within the group, tile relative to the first one) of step n; all masked tiles come first.

    A head has `left` masked tiles, `full` tiles without a mask, and `right` masked ones, in this order.
    """
    masked = group * (left + right)
    is_masked = n < masked
    rest = gl.where(is_masked, n, n - masked)
    width = gl.maximum(gl.where(is_masked, left + right, full), 1)
    tile = rest % width
    return rest // width, tile + gl.where(is_masked, gl.where(tile < left, 0, full), left)


@gluon.jit
def _load_tiles(
    q_desc, k_desc, v_desc, e_desc, rows_desc, q_smem, k_smem, v_smem, e_smem, rows_smem, full, empty,
    batch, kv_head, block, num_heads, group, first_tile, left, unmasked, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp loads the block's keys and values, then tiles of queries, gradients and row numbers."""
    own = full.index(STAGES)
    mbarrier.expect(own, 2 * k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, block * BLOCK_N, 0], own, k_smem.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, block * BLOCK_N, 0], own, v_smem.index(0))
    NBYTES: gl.constexpr = 2 * q_desc.block_type.nbytes + rows_desc.block_type.nbytes
    for n in range(group * (left + unmasked + right)):
        member, tile = nth_tile(n, group, left, unmasked, right)
        head = kv_head * group + member
        row = (first_tile + tile) * BLOCK_M
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, NBYTES)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], ready, q_smem.index(stage))
        tma.async_copy_global_to_shared(rows_desc, [batch * num_heads + head, 0, row], ready, rows_smem.index(stage))
        tma.async_copy_global_to_shared(e_desc, [batch, head, row, 0], ready, e_smem.index(stage))


@gluon.jit
def wait_for_turn(counter, turn):
    """Waits until `turn` other CTAs have added to a tile."""
    done = gl.atomic_add(counter, 0.0, sem="acquire", scope="gpu")
    while done < turn:
        done = gl.atomic_add(counter, 0.0, sem="acquire", scope="gpu")
    # TMA is another proxy than the atomic operation.
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, $1;", "=f,f", [done], gl.float32, False, 1)
    barrier()


@gluon.jit
def end_turn(counter):
    """Waits until the additions of this warp are in global memory, which `tma.store_wait` does not do, and says so."""
    one = gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=f,f", [1.0], gl.float32, False, 1
    )
    barrier()
    gl.atomic_add(counter, one, sem="release", scope="gpu")


@gluon.jit
def _add_query_grads(
    dq_desc, turns, dq_smem, dq_full, dq_empty, slot, group, num_tiles, first_tile, left, unmasked, right,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """One warp adds each tile of dQ to global memory. `slot` is the first query head, relative to the launch.

    turns: for each tile of dQ the number of CTAs that have added to it, in fp32; None: the order is not fixed.
    """
    for n in range(group * (left + unmasked + right)):
        member, tile = nth_tile(n, group, left, unmasked, right)
        mbarrier.wait(dq_full, n & 1)
        of_dq = (slot + member) * num_tiles + first_tile + tile
        if turns is not None:
            # The blocks of later keys come first. They start earlier, and reach this tile in fewer steps.
            wait_for_turn(turns + of_dq, (tile // (BLOCK_N // BLOCK_M)).to(gl.float32))
        async_add(dq_desc, [of_dq * (BLOCK_M * BLOCK_D // ADDED), 0], dq_smem)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty, count=1)
        if turns is not None:
            end_turn(turns + of_dq)


@gluon.jit
def _row_numbers(rows_smem, stage, WHICH: gl.constexpr, BLOCK_M: gl.constexpr):
    return rows_smem.index(stage).reshape([rows_smem.shape[2], BLOCK_M]).slice(WHICH, 1, dim=0)


@gluon.jit
def _masked(
    x, first_query, first_key, batch, rule, rows_smem, stage,
    FIRST: gl.constexpr, NUM_QUERIES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr, RULED: gl.constexpr,
):  # fmt: skip
    """A tile [keys, queries] with 0 at invisible pairs, for NUM_QUERIES queries from query FIRST of the tile on.

    Without a rule, the first query of the tile counts from the first key.
    """
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    queries = first_query + FIRST + gl.arange(0, NUM_QUERIES, gl.SliceLayout(0, LAYOUT))
    if RULED:
        # Limits from shared memory take fewer instructions and registers than positions or `rule.limits`.
        low = _row_numbers(rows_smem, stage, LOW, BLOCK_M).slice(FIRST, NUM_QUERIES, dim=1).load(LAYOUT)
        high = _row_numbers(rows_smem, stage, HIGH, BLOCK_M).slice(FIRST, NUM_QUERIES, dim=1).load(LAYOUT)
        keys = first_key + keys
        x = mask_outside(x, 0.0, low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True), keys, rule, True)
        x = mask_irregular(x, 0.0, queries, keys, batch.to(gl.int64), rule, True)
    else:
        x = gl.where(queries[None, :] >= keys[:, None], x, 0.0)
    return x


@gluon.jit
def _step(
    n, total, dk, dv, scores, first_query, first_key, batch, rule, scale_log2,
    q_smem, k_smem, v_smem, e_smem, rows_smem, ds_smem, dq_smem, full, empty, dq_full, dq_empty,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, HAS_BETA: gl.constexpr, RULED: gl.constexpr,
):  # fmt: skip
    """All MMAs of query tile n except its scores, which are an argument, and the scores of tile n + 1.

    MMAs are issued early and waited for late, but before the registers of their operands are reused. `first_query` and
    `first_key` locate a MASKED tile (`_masked`).
    """
    dtype: gl.constexpr = k_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    left_layout: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16]), 2
    )
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [BLOCK_M // 16, 128 // BLOCK_M], [16, BLOCK_D // (128 // BLOCK_M), 16]
    )
    # Always 0, but the compiler cannot know that: it recomputes shared memory addresses in every step instead of
    # keeping them in registers that the MMAs need.
    zero = n >> 30
    k = k_smem.index(zero).reshape([BLOCK_N, BLOCK_D])
    v = v_smem.index(zero).reshape([BLOCK_N, BLOCK_D])
    ds_tile = ds_smem.index(zero)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
    stage = n % STAGES
    q = q_smem.index(stage).reshape([BLOCK_M, BLOCK_D])
    e = e_smem.index(stage).reshape([BLOCK_M, BLOCK_D])

    if MASKED and HAS_BETA:
        part_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BETA_PART, 16])
        for part in gl.static_range(BLOCK_M // BETA_PART):
            beta = _row_numbers(rows_smem, stage, 2, BLOCK_M).slice(part * BETA_PART, BETA_PART, dim=1)
            weights = gl.zeros([BLOCK_N, BETA_PART], gl.float32, part_layout) + beta.load(part_layout)
            weights = _masked(
                weights, first_query, first_key, batch, rule, rows_smem, stage, part * BETA_PART, BETA_PART, BLOCK_M,
                BLOCK_N, part_layout, RULED,
            ).to(dtype)  # fmt: skip
            of_part = e.slice(part * BETA_PART, BETA_PART, dim=0)
            dv = warpgroup_mma(gl.convert_layout(weights, left_layout), of_part, dv)

    dp = nothing + _row_numbers(rows_smem, stage, 1, BLOCK_M).load(score_layout)
    dp = warpgroup_mma(v, e.permute((1, 0)), dp, is_async=True)
    p = gl.exp2(scores * scale_log2)
    if MASKED:
        p = _masked(
            p, first_query, first_key, batch, rule, rows_smem, stage, 0, BLOCK_M, BLOCK_M, BLOCK_N, score_layout, RULED,
        )  # fmt: skip
    p_left = gl.convert_layout(p.to(dtype), left_layout)
    dv = warpgroup_mma(p_left, e, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * dp).to(dtype)
    ds_tile.store(ds)
    fence_async_shared()
    barrier()
    # After the barrier no warp reads tile n - 1.
    mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0)
    ds_left = gl.convert_layout(ds, left_layout)
    dk = warpgroup_mma(ds_left, q, dk, is_async=True)
    dv, p_left = warpgroup_mma_wait(1, deps=[dv, p_left])
    dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, dq_layout)
    dq = warpgroup_mma(ds_tile.permute((1, 0)), k, dq, use_acc=False, is_async=True)
    dk, ds_left = warpgroup_mma_wait(1, deps=[dk, ds_left])

    later = (n + 1) % STAGES
    mbarrier.wait(full.index(later), ((n + 1) // STAGES) & 1, pred=n + 1 < total)
    scores = nothing + _row_numbers(rows_smem, later, 0, BLOCK_M).load(score_layout)
    q = q_smem.index(later).reshape([BLOCK_M, BLOCK_D])
    scores = warpgroup_mma(k, q.permute((1, 0)), scores, is_async=True)  # unused after the last tile

    dq = warpgroup_mma_wait(1, deps=[dq])
    mbarrier.wait(dq_empty, (n & 1) ^ 1)
    dq_smem.reshape([BLOCK_M * BLOCK_D]).store(in_thread_order(dq, BLOCK_M, BLOCK_D))
    fence_async_shared()
    barrier()
    mbarrier.arrive(dq_full, count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    return dk, dv, scores


@gluon.jit
def _replace_nonfinite(tile, BLOCK_D: gl.constexpr):
    """Replaces NaN and infinity in a tile of shared memory.

    Rows that see such a key or value are NaN through lse and delta; the MMAs must not propagate it to other rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BLOCK_D // 8), BLOCK_D // 8], [WARPS, 1], [1, 0])
    finite = finite_or_zero(tile.load(layout))
    barrier()
    tile.store(finite)
    fence_async_shared()
    barrier()


@gluon.jit
def _multiply(
    dk_desc, dv_desc, later_sums, q_smem, k_smem, v_smem, e_smem, rows_smem, ds_smem, dq_smem,
    full, empty, dq_full, dq_empty, batch, kv_head, block, num_kv_heads, num_sums, group,
    first_tile, left, unmasked, right, rule, softmax_scale, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    SUM_BLOCK: gl.constexpr, STAGES: gl.constexpr, SCANNED: gl.constexpr, RULED: gl.constexpr,
):  # fmt: skip
    """Eight warps run all MMAs and write the block's dK and dV."""
    dtype: gl.constexpr = k_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    HAS_BETA: gl.constexpr = later_sums is not None
    k = k_smem.index(0).reshape([BLOCK_N, BLOCK_D])
    v = v_smem.index(0).reshape([BLOCK_N, BLOCK_D])
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sum_layout)
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sum_layout)
    total = group * (left + unmasked + right)

    mbarrier.wait(full.index(STAGES), 0)
    if RULED:  # noqa: SIM102 (`rule` is None otherwise)
        # Windows, segments and padding hide keys from all queries of a tile.
        if (rule.back is not None) or (rule.limits is not None):
            _replace_nonfinite(k, BLOCK_D)
            _replace_nonfinite(v, BLOCK_D)
    # A block that no query sees has no tiles; its first scores are not used.
    mbarrier.wait(full.index(0), 0, pred=total > 0)
    scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
    scores += _row_numbers(rows_smem, 0, 0, BLOCK_M).load(score_layout)
    scores = warpgroup_mma(k, q_smem.index(0).reshape([BLOCK_M, BLOCK_D]).permute((1, 0)), scores)
    masked = group * (left + right)
    for n in range(masked):
        if RULED:
            first_query = (first_tile + nth_tile(n, group, left, unmasked, right)[1]) * BLOCK_M
        else:
            first_query = n % left * BLOCK_M
        dk, dv, scores = _step(
            n, total, dk, dv, scores, first_query, block * BLOCK_N, batch, rule, scale_log2,
            q_smem, k_smem, v_smem, e_smem, rows_smem, ds_smem, dq_smem, full, empty, dq_full, dq_empty,
            BLOCK_M, BLOCK_N, BLOCK_D, STAGES, True, HAS_BETA, RULED,
        )  # fmt: skip
    for n in range(masked, total):
        dk, dv, scores = _step(
            n, total, dk, dv, scores, 0, 0, batch, rule, scale_log2,
            q_smem, k_smem, v_smem, e_smem, rows_smem, ds_smem, dq_smem, full, empty, dq_full, dq_empty,
            BLOCK_M, BLOCK_N, BLOCK_D, STAGES, False, HAS_BETA, RULED,
        )  # fmt: skip
    if HAS_BETA:
        # The table is in reverse order: its first rows belong to the last query blocks.
        if RULED:
            first_full = (first_tile + left) * (BLOCK_M // SUM_BLOCK)
            first_row = gl.maximum(num_sums - first_full - unmasked * (BLOCK_M // SUM_BLOCK), 0) + 1
            last_row = num_sums - first_full
        else:
            first_row = 1
            last_row = gl.maximum(num_sums - (block + 1) * (BLOCK_N // SUM_BLOCK), 0)
        table = later_sums + (batch * num_kv_heads + kv_head).to(gl.int64) * (num_sums + 1) * HEAD_DIM
        if SCANNED:
            columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, sum_layout))
            later = gl.load(table + last_row * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0)
        else:
            row_layout: gl.constexpr = gl.BlockedLayout(
                [1, 4], [32 // (BLOCK_D // 4), BLOCK_D // 4], [WARPS, 1], [1, 0]
            )
            rows = gl.arange(0, SUM_ROWS, gl.SliceLayout(1, row_layout))
            columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, row_layout))
            sums = gl.zeros([SUM_ROWS, BLOCK_D], gl.float32, row_layout)
            for first in range(first_row, last_row + 1, SUM_ROWS):
                inside = (first + rows <= last_row)[:, None] & (columns < HEAD_DIM)[None, :]
                at = (first + rows)[:, None] * HEAD_DIM + columns[None, :]
                sums += gl.load(table + at, mask=inside, other=0.0)
            later = gl.convert_layout(gl.sum(sums, 0), gl.SliceLayout(0, sum_layout))
        dv += later[None, :]
    barrier()  # wait until the last MMAs of all warps have read the keys
    k.store((dk * softmax_scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, block * BLOCK_N, 0], k_smem.index(0))
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, block * BLOCK_N, 0], v_smem.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*GRID_NUMBERS, "first_slot", "num_sums"])
def gradients_kernel(
    q_desc, k_desc, v_desc, e_desc, rows_desc, dk_desc, dv_desc, dq_desc, turns, later_sums, ranges, rule,
    softmax_scale, scale_log2, length, num_sums, first_slot, num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    SUM_BLOCK: gl.constexpr, STAGES: gl.constexpr, SCANNED: gl.constexpr, RULED: gl.constexpr,
):  # fmt: skip
    """One CTA owns BLOCK_N keys of one key-value head; writes dK and dV, adds to dQ.

    A launch processes `num_programs` key-value heads of the batch, starting at `first_slot`. rows_desc: [B * H, 4, T]
    in fp32, -lse'/softmax_scale, -delta, beta, unused. dq_desc: the launch's query heads, tiles in thread order.
    turns: if the sums of dQ shall have a fixed order (plain causal calls only), the memory of dq_desc, behind whose
    tiles there is a counter for each of them, all zero at the start.
    `length` is the number of keys. RULED: there is a `rule`, with segments or padding there are `ranges` of tiles, and
    rows_desc is [B * H, 8, T] with the bits of the first and the last visible key in rows LOW and HIGH.
    """
    num_blocks = gl.cdiv(length, BLOCK_N)
    program = gl.program_id(0)
    # Heads in sections whose queries fit the L2 cache, longest blocks first, as in `scheduled_block`.
    first = program // (num_blocks * section) * section
    rest = program % (num_blocks * section)
    here = gl.minimum(section, num_programs - first)
    block = rest // here
    if turns is not None:
        # A CTA waits for those of later keys, which must have started before it.
        block = num_blocks - 1 - block
    slot = first_slot + first + rest % here
    batch = slot // num_kv_heads
    kv_head = slot % num_kv_heads
    group = num_heads // num_kv_heads
    if RULED:
        num_tiles = gl.cdiv(rule.num_queries, BLOCK_M)
        span = key_span(block, num_blocks, batch.to(gl.int64), rule, ranges, BLOCK_M, BLOCK_N)
        first_tile = span[0]
        left = span[1] - span[0]
        unmasked = span[2] - span[1]
        right = span[3] - span[2]
    else:
        num_tiles = gl.cdiv(length, BLOCK_M)
        first_tile = block * (BLOCK_N // BLOCK_M)
        left = gl.minimum(BLOCK_N // BLOCK_M, num_tiles - first_tile)
        unmasked = num_tiles - first_tile - left
        right = 0

    if turns is not None:
        turns += (num_programs * group * num_tiles).to(gl.int64) * (BLOCK_M * BLOCK_D)

    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    e_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], e_desc.layout)
    NUM_ROWS: gl.constexpr = 8 if RULED else 4
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, NUM_ROWS, BLOCK_M], rows_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M * BLOCK_D // ADDED, ADDED], dq_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(full.index(STAGES), count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)

    gl.warp_specialize(
        [
            (_multiply, (
                dk_desc, dv_desc, later_sums, q_smem, k_smem, v_smem, e_smem, rows_smem, ds_smem, dq_smem,
                full, empty, dq_full, dq_empty, batch, kv_head, block, num_kv_heads, num_sums, group,
                first_tile, left, unmasked, right, rule, softmax_scale, scale_log2,
                BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_D, SUM_BLOCK, STAGES, SCANNED, RULED,
            )),
            (_load_tiles, (
                q_desc, k_desc, v_desc, e_desc, rows_desc, q_smem, k_smem, v_smem, e_smem, rows_smem,
                full, empty, batch, kv_head, block, num_heads, group, first_tile, left, unmasked, right,
                BLOCK_M, BLOCK_N, STAGES,
            )),
            (_add_query_grads, (
                dq_desc, turns, dq_smem, dq_full, dq_empty, (slot - first_slot) * group, group, num_tiles,
                first_tile, left, unmasked, right, BLOCK_M, BLOCK_N, BLOCK_D,
            )),
        ],
        [1, 1],
        [WORKER_REGISTERS, WORKER_REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_slot", "num_heads", "num_tiles"])
def convert_kernel(
    sums, dq, dq_strides, softmax_scale, length, num_tiles, num_heads, first_slot,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program owns one tile of dQ; converts fp32 in thread order to rows in the dtype of `dq`.

    `first_slot` is the first query head of the launch, which has its own `sums`.
    """
    slot = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    PARTS: tl.constexpr = 128 // BLOCK_M
    at = sums + (slot.to(tl.int64) * num_tiles + tile) * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
    # The inverse of `in_thread_order`.
    numbers = tl.load(at).reshape(PARTS, BLOCK_M // 16, BLOCK_D // PARTS // 16, 2, 8, 4, 2, 2)
    numbers = numbers.permute(1, 3, 4, 0, 2, 6, 5, 7).reshape(BLOCK_M, BLOCK_D) * softmax_scale
    rows, columns = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    batch, head = ((first_slot + slot) // num_heads).to(tl.int64), ((first_slot + slot) % num_heads).to(tl.int64)
    ptrs = dq + batch * dq_strides[0] + head * dq_strides[1] + rows.to(tl.int64)[:, None] * dq_strides[2]
    inside = (rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(ptrs + columns[None, :], numbers.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def zero_kernel(pointer, size, BLOCK: tl.constexpr):
    """One program sets BLOCK elements to 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + at, tl.zeros([BLOCK], dtype=tl.float32), mask=at < size)
