"""Turns the gradient of the output into the gradients of every input: B1 rows, B2 queries, B3 keys and values.

With E = gate * dOut, P = exp2(scores - lse), O = P V the softmax output and n the visible sum of v:

B1  dalpha_i = E_i . O_i      delta_i = alpha_i dalpha_i      dbeta_i = E_i . n_i
    dgate = dOut * (alpha O + beta n)      dsink = -sum_i exp(sink - lse_i) delta_i
B2  dS_ij = P_ij (alpha_i E_i . v_j - delta_i)      dQ = dS K * softmax_scale
B3  dK = dS^T Q * softmax_scale      dV_j = sum_i (alpha_i P_ij + beta_i) E_i

Nothing is divided by alpha, and no sum is taken by atomics: every program owns what it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import sum_tiles
from .launch import GRID_NUMBERS, Call, align
from .tiles import (
    FULL,
    LEFT,
    LOG2E,
    load_row_scalars,
    load_tile,
    needs_shield,
    scheduled_block,
    span_phase,
    store_row_scalars,
    store_tile,
    sum_full_tiles,
    tile_span,
    visible_pairs,
    without_broken,
)


@triton.jit(do_not_specialize=GRID_NUMBERS[:2])
def _row_kernel(
    o_desc, grad_desc, v_desc, gate_desc, alpha, alpha_strides, beta, beta_strides, sink, lse, sums, ranges,
    delta, dalpha, dalpha_strides, dbeta, dbeta_strides, dsink_parts, dgate, dgate_strides,
    scaled_grad, scaled_strides, rule, num_heads, num_kv_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """B1. One program owns BLOCK_M queries of one head; writes delta, dalpha, dbeta, dgate, E and its part of dsink.

    fp32 sums. Outputs of absent inputs are None.
    """
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    block = tl.program_id(1)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_strides = (num_heads * rule.num_queries, rule.num_queries, 1)

    softmax_out = load_tile(o_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
    grad = load_tile(grad_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    e = grad.to(tl.float32)
    if gate_desc is not None:
        e *= load_tile(gate_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
        store_tile(scaled_grad, scaled_strides, batch, head, queries, rule.num_queries, e, HEAD_DIM, BLOCK_D)

    row_dalpha = tl.sum(e * softmax_out, 1)
    row_delta = row_dalpha
    if gate_desc is not None:
        # From E as B2 and B3 read it: where alpha E . v and delta cancel, they must have been rounded alike.
        row_delta = tl.sum(e.to(grad.dtype).to(tl.float32) * softmax_out, 1)
    mixed = softmax_out
    if alpha is not None:
        row_alpha = load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)
        row_delta *= row_alpha
        mixed = row_alpha[:, None] * softmax_out
        store_row_scalars(dalpha, dalpha_strides, batch, head, queries, rule.num_queries, row_dalpha)
    store_row_scalars(delta, row_strides, batch, head, queries, rule.num_queries, row_delta)
    if beta is not None:
        kv_head = head // (num_heads // num_kv_heads)
        first = block * BLOCK_M + rule.num_keys - rule.num_queries
        last = tl.minimum(first + BLOCK_M, rule.num_keys) - 1
        of_block = None
        if ranges is not None:
            of_block = ranges + (batch * tl.num_programs(1) + block) * 4
        span = tile_span(first, last, rule.back, rule.ahead, rule.num_keys, of_block, BLOCK_N, MASK_TAIL=True)
        prefix: tl.constexpr = (rule.back is None) and (ranges is None)
        full_sum = sum_full_tiles(
            sums, span, batch, kv_head, num_kv_heads, tl.cdiv(rule.num_keys, BLOCK_N), HEAD_DIM, BLOCK_D, prefix
        )[None, :]
        row_dbeta = tl.sum(e * full_sum, 1)
        value_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + full_sum
        left = e.to(grad.dtype)
        for phase in tl.static_range(1, 3):
            begin, end = span_phase(span, phase)
            if (phase != LEFT) or (rule.back is not None) or (ranges is not None):
                for tile in tl.range(begin, end, num_stages=1):
                    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                    visible = visible_pairs(queries[:, None], keys[None, :], batch, rule)
                    v = load_tile(v_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
                    if needs_shield(rule, phase):
                        v = without_broken(v)
                    # dbeta needs E . v on the edges only, not the sums themselves: they are for the gate.
                    value_grads = tl.dot(left, v.T, input_precision=PRECISION)
                    row_dbeta += tl.sum(tl.where(visible, value_grads, 0.0), 1)
                    if gate_desc is not None:
                        weights = tl.where(visible, 1.0, 0.0).to(v.dtype)
                        value_sum = tl.dot(weights, v, value_sum, input_precision=PRECISION)
        store_row_scalars(dbeta, dbeta_strides, batch, head, queries, rule.num_queries, row_dbeta)
        if gate_desc is not None:
            mixed += load_row_scalars(beta, beta_strides, batch, head, queries, rule.num_queries)[:, None] * value_sum
    if gate_desc is not None:
        dgate_tile = grad.to(tl.float32) * mixed
        store_tile(dgate, dgate_strides, batch, head, queries, rule.num_queries, dgate_tile, HEAD_DIM, BLOCK_D)
    if sink is not None:
        row_lse = load_row_scalars(lse, row_strides, batch, head, queries, rule.num_queries)
        sink_log2 = tl.load(sink + head).to(tl.float32) * LOG2E
        # A row whose lse is -inf saw neither keys nor sink.
        weight = tl.where(row_lse == float("-inf"), 0.0, tl.exp2(sink_log2 - row_lse))
        part = -tl.sum(tl.where(queries < rule.num_queries, weight * row_delta, 0.0), 0)
        tl.store(dsink_parts + tl.program_id(0) * tl.num_programs(1) + block, part)


@triton.jit
def _probabilities(scores, row_lse, visible, scale_log2, MASKED: tl.constexpr):
    """P of one tile, either way round; the numbers of a row come shaped to broadcast along the keys."""
    p = tl.exp2(scores * scale_log2 - row_lse)
    if MASKED:
        # By selection, not by product: an invisible key may hold NaN, an empty row has lse = -inf.
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
def _score_grads(p, value_grads, row_alpha, row_delta, visible, MASKED: tl.constexpr):
    """dS of one tile, either way round, from P and E . v."""
    if row_alpha is not None:
        value_grads = value_grads * row_alpha
    ds = p * (value_grads - row_delta)
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return ds


@triton.jit
def _query_grad_step(
    dq, q, e, row_alpha, row_delta, row_lse, k_desc, v_desc, tile, batch, kv_head, queries, rule, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, SHIELD: tl.constexpr,
):  # fmt: skip
    """B2 for one tile of keys."""
    k = load_tile(k_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    v = load_tile(v_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    visible = None
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = visible_pairs(queries[:, None], keys[None, :], batch, rule)
    if SHIELD:
        # Rows that see a key that is not finite are NaN through lse; the others must not meet it in the product.
        k = without_broken(k)
    p = _probabilities(scores, row_lse, visible, scale_log2, MASKED)
    value_grads = tl.dot(e, v.T, input_precision=PRECISION)
    ds = _score_grads(p, value_grads, row_alpha, row_delta, visible, MASKED)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=GRID_NUMBERS)
def _query_grad_kernel(
    q_desc, k_desc, v_desc, e_desc, alpha, alpha_strides, lse, delta, ranges, dq, dq_strides, rule,
    softmax_scale, scale_log2, num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """B2. One program owns BLOCK_M queries of one head; writes dq. fp32 sums."""
    num_blocks = tl.cdiv(rule.num_queries, BLOCK_M)
    block, batch_head = scheduled_block(num_blocks, num_programs, section, LONGEST_LAST=True)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // (num_heads // num_kv_heads)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first = block * BLOCK_M + rule.num_keys - rule.num_queries
    last = tl.minimum(first + BLOCK_M, rule.num_keys) - 1
    of_block = None
    if ranges is not None:
        of_block = ranges + (batch * num_blocks + block) * 4
    span = tile_span(first, last, rule.back, rule.ahead, rule.num_keys, of_block, BLOCK_N, MASK_TAIL=True)

    q = load_tile(q_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    e = load_tile(e_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    row_strides = (num_heads * rule.num_queries, rule.num_queries, 1)
    row_lse = load_row_scalars(lse, row_strides, batch, head, queries, rule.num_queries)[:, None]
    row_delta = load_row_scalars(delta, row_strides, batch, head, queries, rule.num_queries)[:, None]
    row_alpha = None
    if alpha is not None:
        row_alpha = load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(3):
        begin, end = span_phase(span, phase)
        if (phase != LEFT) or (rule.back is not None) or (ranges is not None):
            for tile in tl.range(begin, end):
                total = _query_grad_step(
                    total, q, e, row_alpha, row_delta, row_lse, k_desc, v_desc, tile, batch, kv_head, queries, rule,
                    scale_log2, BLOCK_N, BLOCK_D, PRECISION, phase != FULL, needs_shield(rule, phase),
                )  # fmt: skip
    store_tile(dq, dq_strides, batch, head, queries, rule.num_queries, total * softmax_scale, HEAD_DIM, BLOCK_D)


@triton.jit
def _key_grad_step(
    dk, dv, k, v, q_desc, e_desc, alpha, alpha_strides, beta, beta_strides, lse, delta, tile, batch, head, num_heads,
    keys, rule, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """B3 for one tile of queries, all tiles transposed: products take their left operand as it was computed."""
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_desc, batch, head, tile * BLOCK_M, BLOCK_M, BLOCK_D)
    e = load_tile(e_desc, batch, head, tile * BLOCK_M, BLOCK_M, BLOCK_D)
    row_strides = (num_heads * rule.num_queries, rule.num_queries, 1)
    # Rows beyond the end load as 0 everywhere (q, E, alpha, beta, delta, lse), so they add nothing.
    row_lse = load_row_scalars(lse, row_strides, batch, head, queries, rule.num_queries)[None, :]
    row_delta = load_row_scalars(delta, row_strides, batch, head, queries, rule.num_queries)[None, :]
    row_alpha = None
    if alpha is not None:
        row_alpha = load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)[None, :]
    visible = None
    if MASKED:
        visible = visible_pairs(queries[None, :], keys[:, None], batch, rule)
    scores = tl.dot(k, q.T, input_precision=PRECISION)
    p = _probabilities(scores, row_lse, visible, scale_log2, MASKED)
    weights = p
    if row_alpha is not None:
        weights = weights * row_alpha
    if beta is not None:
        weights += load_row_scalars(beta, beta_strides, batch, head, queries, rule.num_queries)[None, :]
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
    dv = tl.dot(weights.to(e.dtype), e, dv, input_precision=PRECISION)
    value_grads = tl.dot(v, e.T, input_precision=PRECISION)
    ds = _score_grads(p, value_grads, row_alpha, row_delta, visible, MASKED)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=GRID_NUMBERS)
def _key_grad_kernel(
    q_desc, k_desc, v_desc, e_desc, alpha, alpha_strides, beta, beta_strides, lse, delta, ranges,
    dk, dk_strides, dv, dv_strides, rule, softmax_scale, scale_log2, num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """B3. One program owns BLOCK_N keys of one key-value head and meets every query head of its group; writes dk, dv.

    fp32 sums.
    """
    num_blocks = tl.cdiv(rule.num_keys, BLOCK_N)
    block, batch_head = scheduled_block(num_blocks, num_programs, section, LONGEST_LAST=False)
    batch = (batch_head // num_kv_heads).to(tl.int64)
    kv_head = (batch_head % num_kv_heads).to(tl.int64)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # A key at j meets the queries at positions j - ahead .. j + back: the rule of the queries, seen from the keys.
    first = block * BLOCK_N - (rule.num_keys - rule.num_queries)
    last = tl.minimum(first + BLOCK_N, rule.num_queries) - 1
    of_block = None
    if ranges is not None:
        of_block = ranges + (batch * num_blocks + block) * 4
    span = tile_span(first, last, rule.ahead, rule.back, rule.num_queries, of_block, BLOCK_M, MASK_TAIL=False)

    k = load_tile(k_desc, batch, kv_head, block * BLOCK_N, BLOCK_N, BLOCK_D)
    v = load_tile(v_desc, batch, kv_head, block * BLOCK_N, BLOCK_N, BLOCK_D)
    dk_total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    group = num_heads // num_kv_heads
    for member in tl.range(group, num_stages=1):
        head = kv_head * group + member
        for phase in tl.static_range(3):
            begin, end = span_phase(span, phase)
            # An edge that nothing can mask is not compiled.
            if (phase == FULL) or (ranges is not None) or ((rule.ahead if phase == LEFT else rule.back) is not None):
                for tile in tl.range(begin, end):
                    dk_total, dv_total = _key_grad_step(
                        dk_total, dv_total, k, v, q_desc, e_desc, alpha, alpha_strides, beta, beta_strides, lse, delta,
                        tile, batch, head, num_heads, keys, rule, scale_log2,
                        BLOCK_M, BLOCK_D, PRECISION, MASKED=phase != FULL,
                    )  # fmt: skip
    store_tile(dk, dk_strides, batch, kv_head, keys, rule.num_keys, dk_total * softmax_scale, HEAD_DIM, BLOCK_D)
    store_tile(dv, dv_strides, batch, kv_head, keys, rule.num_keys, dv_total, HEAD_DIM, BLOCK_D)


def launch_backward(
    call: Call,
    grad_out: Tensor,
    softmax_out: Tensor,
    lse: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    grads: dict[str, Tensor],
) -> None:
    """Fills `grads`, empty gradients by the name of their input; absent inputs have none."""
    query, key, value = call.query, call.key, call.value
    batch, heads, num_queries, head_dim = query.shape
    kv_heads = key.shape[1]
    grad_out, softmax_out = align(grad_out), align(softmax_out)
    gate = None if gate is None else align(gate)
    scale_log2 = call.softmax_scale * LOG2E.value
    tiles = {"HEAD_DIM": head_dim, "BLOCK_D": call.block_d, "PRECISION": call.precision}

    rows = call.config("rows")
    num_blocks = triton.cdiv(num_queries, rows.block_m)
    delta = torch.empty_like(lse)
    dsink_parts = (
        None if sink is None else torch.empty(batch, heads, num_blocks, dtype=torch.float32, device=lse.device)
    )
    # Without a gate E is the gradient itself. In an aligned layout, for the descriptors of the next two kernels.
    scaled_grad = grad_out if gate is None else align(torch.empty_like(grad_out))
    # Heads along the first axis of the grid: the others end at 65535.
    _row_kernel[(batch * heads, num_blocks)](
        call.describe(softmax_out, rows.block_m), call.describe(grad_out, rows.block_m),
        call.describe(value, rows.block_n), call.describe(gate, rows.block_m),
        alpha, call.strides(alpha), beta, call.strides(beta), sink, lse,
        None if beta is None else sum_tiles(call), call.ranges("rows"),
        delta, grads.get("alpha"), call.strides(grads.get("alpha")), grads.get("beta"), call.strides(grads.get("beta")),
        dsink_parts, grads.get("gate"), call.strides(grads.get("gate")),
        scaled_grad, scaled_grad.stride(), call.rule, heads, kv_heads,
        BLOCK_M=rows.block_m, BLOCK_N=rows.block_n, **tiles, num_warps=rows.num_warps,
    )  # fmt: skip
    if dsink_parts is not None and sink is not None:
        grads["sink"].copy_(dsink_parts.sum((0, 2)))

    config = call.config("query_grads")
    _query_grad_kernel[(triton.cdiv(num_queries, config.block_m) * batch * heads,)](
        call.describe(query, config.block_m), call.describe(key, config.block_n),
        call.describe(value, config.block_n), call.describe(scaled_grad, config.block_m),
        alpha, call.strides(alpha), lse, delta, call.ranges("query_grads"),
        grads["query"], grads["query"].stride(), call.rule,
        call.softmax_scale, scale_log2, heads, kv_heads, batch * heads, call.query_section,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, **tiles, **config.options,
    )  # fmt: skip

    config = call.config("key_grads")
    _key_grad_kernel[(triton.cdiv(key.shape[2], config.block_n) * batch * kv_heads,)](
        call.describe(query, config.block_m), call.describe(key, config.block_n),
        call.describe(value, config.block_n), call.describe(scaled_grad, config.block_m),
        alpha, call.strides(alpha), beta, call.strides(beta), lse, delta, call.ranges("key_grads"),
        grads["key"], grads["key"].stride(), grads["value"], grads["value"].stride(), call.rule,
        call.softmax_scale, scale_log2, heads, kv_heads, batch * kv_heads, call.key_section,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, **tiles, **config.options,
    )  # fmt: skip
