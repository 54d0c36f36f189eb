"""Turns queries, keys and values into the output and what the backward needs: F1 to F4 in one pass over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import GRID_NUMBERS, Call
from .tiles import (
    FULL,
    LEFT,
    LOG2E,
    is_finite,
    load_row_scalars,
    load_tile,
    needs_shield,
    scheduled_block,
    span_phase,
    start_softmax,
    store_tile,
    sum_full_tiles,
    tile_span,
    visible_pairs,
    without_broken,
)

SCAN_TILES = 64
SCAN_COLUMNS = 16
SUM_ELEMENTS = 64  # of a tile, to a thread: the tile sums are bound by memory


@triton.jit(do_not_specialize=["num_kv_heads", "num_tiles", "num_keys"])
def _tile_sum_kernel(
    v, v_strides, sums, num_kv_heads, num_tiles, num_keys,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """F4, sum of v. One program owns BLOCK_N keys of one key-value head; writes their sum. fp32."""
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    tile = tl.program_id(1)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    # Straight into registers: read once and added up, a tile gains nothing from the copy engine.
    at = (
        v + batch * v_strides[0] + kv_head * v_strides[1] + keys.to(tl.int64)[:, None] * v_strides[2] + columns[None, :]
    )
    inside = (keys[:, None] < num_keys) & (columns[None, :] < HEAD_DIM)
    total = tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    row = tl.program_id(0).to(tl.int64) * num_tiles + tile
    tl.store(sums + row * HEAD_DIM + columns, total, mask=columns < HEAD_DIM)


@triton.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(sums, num_tiles, HEAD_DIM: tl.constexpr, SCAN_TILES: tl.constexpr, SCAN_COLUMNS: tl.constexpr):
    """F4, sum of v. One program owns SCAN_COLUMNS columns of one key-value head; makes the tile sums prefix sums."""
    columns = tl.program_id(1) * SCAN_COLUMNS + tl.arange(0, SCAN_COLUMNS)
    base = sums + tl.program_id(0).to(tl.int64) * num_tiles * HEAD_DIM + columns[None, :]
    carry = tl.zeros([SCAN_COLUMNS], tl.float32)
    for first in range(0, num_tiles, SCAN_TILES):
        tiles = first + tl.arange(0, SCAN_TILES)
        inside = (tiles[:, None] < num_tiles) & (columns[None, :] < HEAD_DIM)
        at = base + tiles[:, None] * HEAD_DIM
        rows = tl.load(at, mask=inside, other=0.0)
        tl.store(at, tl.cumsum(rows, 0) + carry[None, :], mask=inside)
        carry += tl.sum(rows, 0)


@triton.jit
def _softmax_step(
    output, value_sum, row_max, row_sum, q, k_desc, v_desc, tile, batch, kv_head, queries, rule, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, SHIELD: tl.constexpr,
    SUM_VALUES: tl.constexpr,
):  # fmt: skip
    """F1, F2 for one tile of keys: the online softmax, in units of log2; where asked, a masked tile's part of sum v."""
    k = load_tile(k_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    v = load_tile(v_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    if MASKED:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = visible_pairs(queries[:, None], keys[None, :], batch, rule)
        if SHIELD:
            # A value that is not finite leaves the product and reaches, by its score, the rows that see it.
            broken = tl.min(is_finite(v).to(tl.int32), 1) == 0
            scores = tl.where(broken[None, :], float("nan"), scores)
            v = without_broken(v)
        scores = tl.where(visible, scores, float("-inf"))
        if SUM_VALUES:
            # The mask, read back from the scores: in their register layout it feeds the product without a copy.
            seen = tl.where(scores != float("-inf"), 1.0, 0.0).to(v.dtype)
            value_sum = tl.dot(seen, v, value_sum, input_precision=PRECISION)
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    base = new_max
    if MASKED:
        # A row that has seen nothing yet: -inf - (-inf) is NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * scale_log2 - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    output = output * rescale[:, None]
    output = tl.dot(p.to(v.dtype), v, output, input_precision=PRECISION)
    return output, value_sum, new_max, row_sum


@triton.jit(do_not_specialize=GRID_NUMBERS)
def _forward_kernel(
    q_desc, k_desc, v_desc, gate_desc, alpha, alpha_strides, beta, beta_strides, sink, sums, ranges,
    out, out_strides, softmax_out, softmax_strides, lse, rule, scale_log2,
    num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """F1 to F4. One program owns BLOCK_M queries of one head; writes out, the softmax output and lse (in log2).

    fp32 sums. `softmax_out` is None where it equals `out` or nobody will need it.
    """
    num_blocks = tl.cdiv(rule.num_queries, BLOCK_M)
    block, batch_head = scheduled_block(num_blocks, num_programs, section, LONGEST_LAST=True)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // (num_heads // num_kv_heads)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offset = rule.num_keys - rule.num_queries
    first = block * BLOCK_M + offset
    last = tl.minimum(first + BLOCK_M, rule.num_keys) - 1
    of_block = None
    if ranges is not None:
        of_block = ranges + (batch * num_blocks + block) * 4
    span = tile_span(first, last, rule.back, rule.ahead, rule.num_keys, of_block, BLOCK_N, MASK_TAIL=True)

    row_max, row_sum = start_softmax(sink, head, BLOCK_M)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    q = load_tile(q_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    value_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(3):
        begin, end = span_phase(span, phase)
        # The left edge is there for windows and segments only.
        if (phase != LEFT) or (rule.back is not None) or (ranges is not None):
            for tile in tl.range(begin, end):
                output, value_sum, row_max, row_sum = _softmax_step(
                    output, value_sum, row_max, row_sum, q, k_desc, v_desc, tile, batch, kv_head, queries, rule,
                    scale_log2, BLOCK_N, BLOCK_D, PRECISION, phase != FULL, needs_shield(rule, phase), beta is not None,
                )  # fmt: skip

    output = output * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    row_lse = row_max + tl.log2(row_sum)
    tl.store(lse + batch_head.to(tl.int64) * rule.num_queries + queries, row_lse, mask=queries < rule.num_queries)
    if softmax_out is not None:
        store_tile(softmax_out, softmax_strides, batch, head, queries, rule.num_queries, output, HEAD_DIM, BLOCK_D)
    if alpha is not None:
        output *= load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)[:, None]
    if beta is not None:
        prefix: tl.constexpr = (rule.back is None) and (ranges is None)
        value_sum += sum_full_tiles(
            sums, span, batch, kv_head, num_kv_heads, tl.cdiv(rule.num_keys, BLOCK_N), HEAD_DIM, BLOCK_D, prefix
        )[None, :]
        output += load_row_scalars(beta, beta_strides, batch, head, queries, rule.num_queries)[:, None] * value_sum
    if gate_desc is not None:
        output *= load_tile(gate_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
    store_tile(out, out_strides, batch, head, queries, rule.num_queries, output, HEAD_DIM, BLOCK_D)


def sum_tiles(call: Call) -> Tensor:
    """Sums of v over the forward's tiles of keys, [B, G, tiles, D] fp32; prefix sums where rows start at key 0."""
    value = call.value
    batch, kv_heads, num_keys, head_dim = value.shape
    config = call.config("forward")
    num_tiles = triton.cdiv(num_keys, config.block_n)
    sums = torch.empty(batch, kv_heads, num_tiles, head_dim, dtype=torch.float32, device=value.device)
    _tile_sum_kernel[(batch * kv_heads, num_tiles)](
        value, value.stride(), sums, kv_heads, num_tiles, num_keys,
        BLOCK_N=config.block_n, HEAD_DIM=head_dim, BLOCK_D=call.block_d,
        num_warps=max(config.block_n * call.block_d // (32 * SUM_ELEMENTS), 1),
    )  # fmt: skip
    if call.sums_are_prefixes:
        _scan_kernel[(batch * kv_heads, triton.cdiv(head_dim, SCAN_COLUMNS))](
            sums, num_tiles, HEAD_DIM=head_dim, SCAN_TILES=SCAN_TILES, SCAN_COLUMNS=SCAN_COLUMNS
        )
    return sums


def launch_forward(
    call: Call,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    keep_softmax: bool,
    like: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output, the softmax output where it is kept, and lse [B, H, T] in units of log2.

    The outputs have the layout of `like`, the query as the caller gave it.
    """
    query = call.query
    # With beta, the sums of v of the masked tiles need the registers that the wider tile takes.
    config = call.config("causal" if beta is None and call.is_causal_only else "forward")
    out = torch.empty_like(like)
    softmax_out = torch.empty_like(like) if keep_softmax else None
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    sums = None if beta is None else sum_tiles(call)
    num_programs = query.shape[0] * query.shape[1]
    _forward_kernel[(triton.cdiv(call.rule.num_queries, config.block_m) * num_programs,)](
        call.describe(query, config.block_m),
        call.describe(call.key, config.block_n),
        call.describe(call.value, config.block_n),
        call.describe(gate, config.block_m),
        alpha, call.strides(alpha), beta, call.strides(beta), sink,
        sums, call.ranges("forward"),
        out, out.stride(), softmax_out, call.strides(softmax_out), lse,
        call.rule, call.softmax_scale * LOG2E.value, query.shape[1], call.key.shape[1],
        num_programs, call.query_section,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, HEAD_DIM=query.shape[3], BLOCK_D=call.block_d,
        PRECISION=call.precision, **config.options,
    )  # fmt: skip
    return out, softmax_out, lse
