"""Computes the sum of the values that each query sees (F8) under windows, segments, padding and T != S.

One kernel writes the sums of all rows of a key-value head, [B, G, T, D] in fp32, and the forward and the prologue of
the backward read them. The query heads of a group have the same sums, and a kernel of its own has enough CTAs per SM to
hide the latency of its loads. In the epilogue of the forward, the masked tiles took as long as the attention itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...call import TensorSpec
from .launch import Launch, Slot
from .rule import sums_are_prefixes
from .tile_functions import FULL, LEFT, Rule, has_unseen_keys, mask_pairs, query_span, span_phase, zero_nonfinite
from .value_sums import locate, padded, sum_blocks, sum_launches

BLOCK = 64  # queries of a program, and keys of a block of the table, where the reader of the table does not matter


def row_sums_shape(query_shape: tuple[int, ...], value_shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The shape [B, G, T, D] of the sums of v of every row."""
    batch, groups, _, dim = value_shape
    return batch, groups, query_shape[2], dim


def row_sum_launches(
    value: TensorSpec, source: Slot, table: Slot, row_sums: Slot, rule: Rule, block: int = BLOCK
) -> list[Launch]:
    """The launches that write a table with blocks of `block` keys, and with it the sums of v of every row.

    The rows of the heads of a group are the same, so this costs less than the sums of every query head in its own
    kernel, and hides the latency of their loads.
    """
    scans = sums_are_prefixes(rule)
    batch, groups, num_keys, dim = value.shape
    blocks = -(-rule.num_queries // block)
    return [
        *sum_launches(value.shape, value.stride(), source, table, block=block, scans=scans),
        Launch(
            row_sums_kernel, (batch * groups * blocks,),
            (source, table, row_sums, *value.stride()[:3], rule, blocks, -(-num_keys // block), groups,
             dim, block, padded(dim), scans),
            num_warps=4,
        ),
    ]  # fmt: skip


@triton.jit
def row_sums_kernel(
    value, table, row_sums, value_b, value_g, value_s, rule, num_blocks, key_blocks, groups,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, SCANNED: tl.constexpr,
):  # fmt: skip
    """F8 under a rule. One program owns BLOCK queries of one key-value head; writes their sums, [B, G, T, D] in fp32.

    Keys that all of these queries see are rows of the table, whose blocks have BLOCK keys. Unless they start at key 0,
    the table is not scanned: a difference of prefix sums would suffer from cancellation. Every other tile of keys is
    multiplied by its mask.
    """
    slot, block = locate(num_blocks, False)
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    queries, cols = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    col_ok = cols < HEAD_DIM
    span = query_span(block, queries, batch, rule, BLOCK, BLOCK)
    full_start, full_stop = span_phase(span, FULL)
    table += slot.to(tl.int64) * (key_blocks + 1) * HEAD_DIM
    if SCANNED:
        of_full = tl.load(table + full_stop * HEAD_DIM + cols, mask=col_ok, other=0.0)
    else:
        of_full = sum_blocks(table, full_start, full_stop, cols, col_ok, HEAD_DIM)
    sums = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32) + of_full[None, :]
    value += batch * value_b + group * value_g
    for phase in tl.static_range(1, 3):
        begin, end = span_phase(span, phase)
        # Only windows, segments and padding have a left edge.
        if (phase != LEFT) or (rule.back is not None) or (rule.limits is not None):
            for tile in range(begin, end):
                keys = tile * BLOCK + tl.arange(0, BLOCK)
                inside = (keys < rule.num_keys)[:, None] & col_ok[None, :]
                v = tl.load(value + keys.to(tl.int64)[:, None] * value_s + cols[None, :], mask=inside, other=0.0)
                if has_unseen_keys(rule, phase):
                    v = zero_nonfinite(v)
                weights = mask_pairs(tl.full([BLOCK, BLOCK], 1.0, tl.float32), 0.0, queries, keys, batch, rule)
                sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee")
    row_sums += slot.to(tl.int64) * rule.num_queries * HEAD_DIM
    at = queries.to(tl.int64)[:, None] * HEAD_DIM + cols[None, :]
    tl.store(row_sums + at, sums, mask=(queries < rule.num_queries)[:, None] & col_ok[None, :])


@triton.jit
def load_row_sums(row_sums, slot, rows, num_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums of some rows of a key-value head, as `row_sums_kernel` writes them; 0 beyond `num_rows`."""
    cols = tl.arange(0, BLOCK_D)
    at = row_sums + slot.to(tl.int64) * num_rows * HEAD_DIM
    at += rows.to(tl.int64)[:, None] * HEAD_DIM + cols[None, :]
    return tl.load(at, mask=(rows < num_rows)[:, None] & (cols < HEAD_DIM)[None, :], other=0.0)
