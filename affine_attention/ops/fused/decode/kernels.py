"""Attention of a few queries to a long cache: split over the keys, one pass over K and V, then a merge. No gradients.

With the keys of a sequence divided into splits c = 1..C, for each packed query row
D1  m_c = max s_j,  l_c = sum exp(s_j - m_c),  a_c = sum exp(s_j - m_c) v_j   over the visible keys j of split c
D2  a row whose query is zero has s = 0 for every visible key, so its a_c is the sum of visible v. With `beta`, such
    rows form one more head of the tile, and the sum of values needs neither a second pass nor a second MMA.
D3  m = max(m_1..m_C, sink),  O = sum_c exp(m_c - m) a_c / (sum_c exp(m_c - m) l_c + exp(sink - m))
D4  out = gate * (alpha O + beta sum of v)
D5  signed weights: D1 with |s_j| for s_j, and a_c = sum sign(s_j) exp(|s_j| - m_c) v_j
D6  sigmoid weights: a_c = sum sigmoid(s_j - log n) v_j, n the number of keys that the row sees, and O = sum_c a_c. m_c
    is 0, and l_c is the number of visible keys of the split: it is 0 for all splits only if the row sees no key

The T queries of the R = H / G heads that share a key-value head are the rows of one tile. Scores are in units of log2.

Caches. Dense: key and value [B, G, S, D], any strides; `lengths` [B] is the number of filled keys of each sequence.
Paged: key and value [pages, page_size, G, D], and an integer `block_table` [B, n]: key j of sequence b is in page
block_table[b, j // page_size], slot j % page_size; then S = n * page_size. Query t has position length - T + t, so the
last query is at the last filled key. Keys beyond the length are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..shared.tile_functions import LOG2E, SIGMOID, SIGNED, signs


@triton.jit
def _bias_of_rows(
    key_mask, mask_b, mask_s, batch, position, length, low, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """D6's log2 of n for the row at each position; 0 for rows that see no key. Every split counts all keys of a row."""
    first, stop = position * 0, position * 0 + length
    if CAUSAL:
        stop = tl.minimum(stop, position + 1)
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
        stop = tl.minimum(stop, position + window)
    count = tl.maximum(stop - first, 0)
    if key_mask is not None:
        count = position * 0
        for start in range(low, length, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            ok = keys < length
            ok &= tl.load(key_mask + batch * mask_b + keys.to(tl.int64) * mask_s, mask=ok, other=0) != 0
            inside = (keys[None, :] >= first[:, None]) & (keys[None, :] < stop[:, None])
            count += tl.sum((inside & ok[None, :]).to(tl.int32), 1)
    return tl.log2(tl.maximum(count, 1).to(tl.float32))


@triton.jit
def split_kernel(
    query, key, value, key_mask, lengths, block_table, part_max, part_sum, part_acc, alpha, beta, sink, sink_strides,
    gate, out,
    query_b, query_h, query_t, key_page, key_g, key_s, value_page, value_g, value_s, mask_b, mask_s, table_b,
    alpha_b, alpha_h, beta_b, beta_h, gate_b, gate_h, out_b, out_h,
    num_queries, num_keys, groups, heads_per_group, num_rows, num_splits, window, scale_log2,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, ONE_PAGE: tl.constexpr, FINISH: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """D1 (D5, D6), D2. One program owns one split of the keys for BLOCK_M packed rows of one group; writes m, l and a.

    Packed row r is query r % T of head r // T; the head after the group's last one is the zero query of D2. Parts are
    [B, G, splits, rows], part_acc [B, G, splits, rows, D]. fp32 state. ONE_PAGE: no tile of keys crosses a page end.
    FINISH: there is one query, one split and one tile of rows, so this kernel also computes D3 and D4 and writes `out`.
    """
    tiles = tl.cdiv(num_rows, BLOCK_M)
    split, tile_m = tl.program_id(0) % num_splits, (tl.program_id(0) // num_splits) % tiles
    slot = tl.program_id(0) // (num_splits * tiles)
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    col_ok = cols < HEAD_DIM
    head, query_at = rows // num_queries, rows % num_queries
    query_ok = head < heads_per_group
    offsets = (group * heads_per_group + head) * query_h + query_at.to(tl.int64) * query_t
    q = tl.load(query + batch * query_b + offsets[:, None] + cols[None, :], mask=query_ok[:, None] & col_ok, other=0.0)

    length = num_keys
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + batch).to(tl.int32), num_keys)
    position = length - num_queries + query_at
    low, high = 0, length
    if WINDOW:
        low = tl.maximum(length - num_queries - window + 1, 0)
    # Each sequence is split by its own length, so that no program of a short sequence is idle.
    steps = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), num_splits)
    start = low + split * steps * BLOCK_N
    stop = tl.minimum(start + steps * BLOCK_N, high)

    key += group * key_g
    value += group * value_g
    if block_table is None:
        key += batch * key_page
        value += batch * value_page
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if WEIGHTS == SIGMOID:
        row_max = tl.zeros([BLOCK_M], dtype=tl.float32)
        bias = _bias_of_rows(key_mask, mask_b, mask_s, batch, position, length, low, window, CAUSAL, WINDOW, BLOCK_N)
    if ONE_PAGE:
        entries = block_table + batch * table_b
        next_page = tl.load(entries + start // PAGE_SIZE, mask=start < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        key_ok = keys < stop
        if key_mask is not None:
            key_ok &= tl.load(key_mask + batch * mask_b + keys.to(tl.int64) * mask_s, mask=key_ok, other=0) != 0
        # Keys that no row sees are not loaded: stale memory may contain NaN, and 0 * NaN is NaN.
        tile_ok = key_ok[:, None] & col_ok[None, :]
        if ONE_PAGE:
            # One page look-up per tile, prefetched; the offsets inside a tile are 32-bit and loop-invariant.
            page = next_page.to(tl.int64)
            next_page = tl.load(entries + (first + BLOCK_N) // PAGE_SIZE, mask=first + BLOCK_N < stop, other=0)
            in_page = page * 0 + first % PAGE_SIZE
            inner = tl.arange(0, BLOCK_N)[:, None]
            key_at, value_at = page * key_page + in_page * key_s, page * value_page + in_page * value_s
            k = tl.load(key + key_at + (inner * key_s + cols[None, :]), mask=tile_ok, other=0.0)
            v = tl.load(value + value_at + (inner * value_s + cols[None, :]), mask=tile_ok, other=0.0)
        else:
            if block_table is None:
                key_at, value_at = keys.to(tl.int64) * key_s, keys.to(tl.int64) * value_s
            else:
                entry = block_table + batch * table_b + keys // PAGE_SIZE
                page = tl.load(entry, mask=keys < stop, other=0).to(tl.int64)
                key_at = page * key_page + (keys % PAGE_SIZE) * key_s
                value_at = page * value_page + (keys % PAGE_SIZE) * value_s
            k = tl.load(key + key_at[:, None] + cols[None, :], mask=tile_ok, other=0.0)
            v = tl.load(value + value_at[:, None] + cols[None, :], mask=tile_ok, other=0.0)

        visible = key_ok[None, :] & (rows < num_rows)[:, None]
        if CAUSAL:
            visible &= keys[None, :] <= position[:, None]
        if WINDOW:
            visible &= (position[:, None] - keys[None, :] < window) & (keys[None, :] - position[:, None] < window)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if WEIGHTS == SIGMOID:
            weights = 1.0 / (1.0 + tl.exp2(bias[:, None] - scores))
            # The zero query of D2 has weights of 1.
            weights = tl.where(visible, tl.where(query_ok[:, None], weights, 1.0), 0.0)
            row_sum += tl.sum(visible.to(tl.float32), axis=1)
            acc = tl.dot(weights.to(v.dtype), v, acc=acc, input_precision="ieee")
        else:
            if WEIGHTS == SIGNED:
                sign = tl.where(query_ok[:, None], signs(scores), 1.0)
                scores = tl.abs(scores)
            scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            # A row that has seen no key yet has -inf here, and -inf - -inf is NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(row_max - shift)
            row_sum = row_sum * rescale + tl.sum(weights, axis=1)
            if WEIGHTS == SIGNED:
                weights = weights * sign
            acc = tl.dot(weights.to(v.dtype), v, acc=acc * rescale[:, None], input_precision="ieee")
            row_max = new_max

    if FINISH:
        if beta is not None:
            # The scores of the zero query and their maximum are 0, so its accumulator is the sum of v.
            sums = tl.sum(tl.where((head == heads_per_group)[:, None], acc, 0.0), 0)
        own_head = (group * heads_per_group + head).to(tl.int64)
        is_empty = row_sum == 0.0  # no key is visible; the sum of a row with a NaN is NaN
        if sink is not None:
            sink_ptrs = sink + own_head
            if sink_strides is not None:
                sink_ptrs = sink + batch * sink_strides[0] + own_head * sink_strides[1]
            sink_log2 = tl.load(sink_ptrs, mask=query_ok, other=float("-inf")).to(tl.float32) * LOG2E
            top = tl.maximum(row_max, sink_log2)
            base = tl.where(top == float("-inf"), 0.0, top)
            rescale = tl.exp2(row_max - base)
            row_sum = row_sum * rescale + tl.exp2(sink_log2 - base)
            acc *= rescale[:, None]
        if WEIGHTS != SIGMOID:
            # A row that sees nothing, and has no sink, has row_sum = 0 and acc = 0.
            acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        if alpha is not None:
            ptrs = alpha + batch * alpha_b + own_head * alpha_h
            acc *= tl.load(ptrs, mask=query_ok, other=0.0).to(tl.float32)[:, None]
        if beta is not None:
            ptrs = beta + batch * beta_b + own_head * beta_h
            acc += tl.load(ptrs, mask=query_ok, other=0.0).to(tl.float32)[:, None] * sums[None, :]
        tile_ok = query_ok[:, None] & col_ok[None, :]
        if gate is not None:
            ptrs = gate + batch * gate_b + own_head[:, None] * gate_h + cols[None, :]
            acc *= tl.load(ptrs, mask=tile_ok, other=0.0).to(tl.float32)
        # The coefficients of a row that sees no key may be NaN, and 0 times NaN is NaN.
        acc = tl.where(is_empty[:, None], 0.0, acc)
        tl.store(out + batch * out_b + own_head[:, None] * out_h + cols[None, :], acc, mask=tile_ok)
    else:
        row_ok = rows < num_rows
        part = (slot.to(tl.int64) * num_splits + split) * num_rows + rows
        tl.store(part_max + part, row_max, mask=row_ok)
        tl.store(part_sum + part, row_sum, mask=row_ok)
        tl.store(part_acc + part[:, None] * HEAD_DIM + cols[None, :], acc, mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def merge_kernel(
    part_max, part_sum, part_acc, alpha, beta, sink, sink_strides, gate, out,
    alpha_b, alpha_h, alpha_t, beta_b, beta_h, beta_t, gate_b, gate_h, gate_t, out_b, out_h, out_t,
    num_queries, heads, heads_per_group, num_rows, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """D3 or D6, D4. One program owns one query of one head; merges its splits and writes out. fp32 sums."""
    query_at, head = tl.program_id(0) % num_queries, (tl.program_id(0) // num_queries) % heads
    batch = (tl.program_id(0) // (num_queries * heads)).to(tl.int64)
    group, member = head // heads_per_group, head % heads_per_group
    cols = tl.arange(0, BLOCK_D)
    col_ok = cols < HEAD_DIM
    first = (batch * (heads // heads_per_group) + group) * num_splits * num_rows
    splits = tl.arange(0, BLOCK_C)
    own = first + member * num_queries + query_at

    # The sink is a split without values: l = 1, a = 0.
    top, total, key_sum = float("-inf"), 0.0, 0.0
    if sink is not None:
        sink_ptr = sink + head
        if sink_strides is not None:
            sink_ptr = sink + batch * sink_strides[0] + head * sink_strides[1] + query_at * sink_strides[2]
        top, total = tl.load(sink_ptr).to(tl.float32) * LOG2E, 1.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    sums = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, num_splits, BLOCK_C):
        ok = start + splits < num_splits
        part = own + (start + splits) * num_rows
        tile_ok = ok[:, None] & col_ok[None, :]
        maxima = tl.load(part_max + part, mask=ok, other=float("-inf"))
        part_total = tl.load(part_sum + part, mask=ok, other=0.0)
        tile = tl.load(part_acc + part[:, None] * HEAD_DIM + cols[None, :], mask=tile_ok, other=0.0)
        if beta is not None:
            part += (heads_per_group - member) * num_queries
            sums_tile = tl.load(part_acc + part[:, None] * HEAD_DIM + cols[None, :], mask=tile_ok, other=0.0)
            sums += tl.sum(sums_tile, axis=0)
        key_sum += tl.sum(part_total, axis=0)
        new_top = tl.maximum(top, tl.max(maxima, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale, weight = tl.exp2(top - shift), tl.exp2(maxima - shift)
        total = total * rescale + tl.sum(weight * part_total, axis=0)
        acc = acc * rescale + tl.sum(weight[:, None] * tile, axis=0)
        top = new_top

    if WEIGHTS != SIGMOID:
        # A row that sees no key and has no sink has total = 0 and acc = 0.
        acc = acc / tl.where(total == 0.0, 1.0, total)
    if alpha is not None:
        acc *= tl.load(alpha + batch * alpha_b + head * alpha_h + query_at * alpha_t).to(tl.float32)
    if beta is not None:
        acc += tl.load(beta + batch * beta_b + head * beta_h + query_at * beta_t).to(tl.float32) * sums
    if gate is not None:
        gate_ptrs = gate + batch * gate_b + head * gate_h + query_at * gate_t + cols
        acc *= tl.load(gate_ptrs, mask=col_ok, other=0.0).to(tl.float32)
    # The coefficients of a row that sees no key may be NaN, and 0 times NaN is NaN.
    acc = tl.where(key_sum == 0.0, tl.zeros_like(acc), acc)
    tl.store(out + batch * out_b + head * out_h + query_at * out_t + cols, acc, mask=col_ok)
