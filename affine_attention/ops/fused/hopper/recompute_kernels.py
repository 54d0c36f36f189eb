"""Marks the rows in which O is lost to cancellation, lists them, and recomputes E . O for them from the scores.

out = alpha O + beta n is rounded to 16 bits. A row is marked unless |out|^2 + D tiny^2 < 4 |alpha O|^2, with D elements
per row and tiny the smallest normal number of its dtype: the error of E . O from rounding out is then at most twice the
error from rounding O itself. The first row is always marked: it sees one key, so E . O = E . v, and the gradient of its
score is 0 only if both are bitwise equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..shared.tile_functions import LOG2E, load_tile

MAX_SQUARED_RATIO = tl.constexpr(4.0)


@triton.jit
def cancellation_marks(queries, of_softmax, of_output, dtype: tl.constexpr, HEAD_DIM: tl.constexpr):
    """1 for rows to list, else 0, from the squares of |alpha O| and |out|. Rows with NaN are listed."""
    tiny: tl.constexpr = 2.0**-14 if dtype == tl.float16 else 2.0**-60  # its square is normal in fp32
    is_clear = of_output + HEAD_DIM * tiny * tiny < of_softmax * MAX_SQUARED_RATIO
    return tl.where(is_clear & (queries > 0), 0, 1).to(tl.int8)


@triton.jit
def list_kernel(marks, rows, counts, length, BLOCK: tl.constexpr):
    """One program owns one head; writes the indices of its marked rows, in order, and their count."""
    head = tl.program_id(0).to(tl.int64)
    marks += head * length
    rows += head * length
    count = 0
    for start in range(0, length, BLOCK):
        here = start + tl.arange(0, BLOCK)
        marked = tl.load(marks + here, mask=here < length, other=0).to(tl.int32)
        index = count + tl.cumsum(marked, axis=0) - marked
        tl.store(rows + index, here, mask=marked != 0)
        count += tl.sum(marked, axis=0)
    tl.store(counts + head, count)


@triton.jit(do_not_specialize=("num_heads", "num_kv_heads", "num_slots"))
def recompute_kernel(
    query, grad_out, k_desc, v_desc, lse, alpha, sink, listed, counts, grad_alpha, row_numbers, sink_parts,
    query_b, query_h, query_t, go_b, go_h, go_t, lse_b, lse_h, lse_t, alpha_b, alpha_h, alpha_t,
    length, row_length, num_parts, scale_log2, num_heads, num_kv_heads, num_slots,
    SIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """B2 as dalpha_i = sum_j P_ij (E_i . v_j), and B6, B7 from it. One program owns BLOCK_M listed rows.

    The rows are consecutive in the list of their head, not in the sequence. Outputs, each skipped if its pointer is
    None: grad_alpha (contiguous [B, H, T]), the second of row_numbers [B, H, 4, row_length], one of the last of
    sink_parts [B, H, num_parts]. fp32 sums.
    """
    nth = tl.program_id(0) // num_slots
    slot = (tl.program_id(0) % num_slots).to(tl.int64)
    count = tl.load(counts + slot)
    # The last rows see the most keys, so they are scheduled first, and programs without rows last.
    tile = tl.cdiv(count, BLOCK_M) - 1 - nth
    if sink_parts is not None:
        sink_parts += (slot + 1) * num_parts - 1 - nth
    if tile < 0:
        if sink_parts is not None:
            tl.store(sink_parts, 0.0)
        return
    batch, head = slot // num_heads, slot % num_heads
    kv_head = head // (num_heads // num_kv_heads)
    listed += slot * length
    indices = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    listed_here = indices < count
    last_row = tl.load(listed + tl.minimum(tile * BLOCK_M + BLOCK_M, count) - 1)
    near_rows = tl.load(listed + indices, mask=listed_here, other=last_row)
    rows = near_rows.to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    inside = listed_here[:, None] & (cols < HEAD_DIM)[None, :]
    q_ptrs = query + (batch * query_b + head * query_h) + rows[:, None] * query_t + cols[None, :]
    e_ptrs = grad_out + (batch * go_b + head * go_h) + rows[:, None] * go_t + cols[None, :]
    q, e = tl.load(q_ptrs, mask=inside, other=0.0), tl.load(e_ptrs, mask=inside, other=0.0)
    row_lse = tl.load(lse + (batch * lse_b + head * lse_h) + rows * lse_t) * LOG2E
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Splitting off a first loop without a mask was not faster.
    for key_tile in tl.range(0, last_row // BLOCK_N + 1):
        k = load_tile(k_desc, batch, kv_head, key_tile * BLOCK_N, BLOCK_N, BLOCK_D)
        v = load_tile(v_desc, batch, kv_head, key_tile * BLOCK_N, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision="ieee")
        value_grads = tl.dot(e, v.T, input_precision="ieee")
        keys = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Select instead of multiplying by 0: a key that only later rows see may be NaN.
        seen = keys[None, :] <= near_rows[:, None]
        total += tl.where(seen, tl.exp2(scores * scale_log2 - row_lse[:, None]) * value_grads, 0.0)
    dalpha = tl.sum(total, axis=1)
    alpha_rows = tl.full([BLOCK_M], 1.0, tl.float32)
    if alpha is not None:
        tl.store(grad_alpha + slot * length + rows, dalpha, mask=listed_here)
        alpha_rows = tl.load(alpha + (batch * alpha_b + head * alpha_h) + rows * alpha_t).to(tl.float32)
    if sink_parts is not None:
        share = tl.exp2(tl.load(sink + head).to(tl.float32) * LOG2E - row_lse)
        tl.store(sink_parts, -tl.sum(tl.where(listed_here, share * alpha_rows * dalpha, 0.0), axis=0))
    if SIGNED:
        dalpha = tl.where(alpha_rows < 0, -dalpha, dalpha)
    tl.store(row_numbers + (slot * 4 + 1) * row_length + rows, -dalpha, mask=listed_here)
