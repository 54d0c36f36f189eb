"""The forward in Triton, for every visibility but dense masks: F1 to F8 in one pass over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import CallSpec
from ..plan import WEIGHTS
from ..shared import row_sums, value_sums
from ..shared.allocation import like
from ..shared.descriptors import query_section, tile_descriptor
from ..shared.launch import Launch, LaunchSet, Slot
from ..shared.limits import limit_arrays, limit_launches
from ..shared.row_sums import load_row_sums
from ..shared.rule import is_causal_only, make_rule
from ..shared.tile_functions import (
    FULL,
    GRID_NUMBERS,
    LEFT,
    LOG2E,
    SIGMOID,
    SIGNED,
    Rule,
    has_unseen_keys,
    is_finite,
    load_row_scalars,
    load_sinks,
    load_tile,
    mask_pairs,
    query_span,
    row_limits,
    scheduled_block,
    signs,
    span_phase,
    start_softmax,
    store_tile,
    zero_nonfinite,
)
from ..shared.tile_sizes import Config
from ..shared.tuned import chosen_config
from ..shared.value_sums import padded
from ..shared.workspace import Arrays, Workspace

PRECISION = "ieee"  # tf32 would reduce the precision of fp32 calls
(QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, QUERY_SEGMENTS, KEY_SEGMENTS, KEY_MASK, OUT, CORE, NUM_TENSORS) = range(13)


@triton.jit
def _softmax_step(
    output, row_max, row_sum, q, k_desc, v_desc, tile, batch, kv_head, queries, rule, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, UNSEEN: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """F1, F2 for one tile of keys: the online softmax, in units of log2.

    WEIGHTS: signed weights are a softmax of absolute scores, times the signs. For sigmoid weights the sink of a row is
    minus its bias: it is row_max, which stays as it is, and row_sum stays 1.
    """
    k = load_tile(k_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    signed = scores
    if WEIGHTS == SIGNED:
        scores = tl.abs(scores)
    v = load_tile(v_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    if MASKED:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if UNSEEN:
            # A non-finite value becomes a NaN score, which propagates to every row that sees it.
            nonfinite = tl.min(is_finite(v).to(tl.int32), 1) == 0
            scores = tl.where(nonfinite[None, :], float("nan"), scores)
            v = zero_nonfinite(v)
        scores = mask_pairs(scores, float("-inf"), queries, keys, batch, rule)
    if WEIGHTS == SIGMOID:
        new_max = row_max
        p = 1.0 / (1.0 + tl.exp2(row_max[:, None] - scores * scale_log2))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        base = new_max
        if MASKED:
            # A row that has seen no key yet: -inf - (-inf) is NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale_log2 - base[:, None])
        tile_sum = tl.sum(p, 1)
        if WEIGHTS == SIGNED:
            p = p * signs(signed)
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tile_sum
        output = output * rescale[:, None]
    output = tl.dot(p.to(v.dtype), v, output, input_precision=PRECISION)
    return output, new_max, row_sum


@triton.jit(do_not_specialize=GRID_NUMBERS)
def _forward_kernel(
    q_desc, k_desc, v_desc, gate_desc, alpha, alpha_strides, beta, beta_strides, sink, sink_strides, row_sums,
    out, out_strides, softmax_out, softmax_strides, lse, rule, scale_log2,
    num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """F1 to F8. One program owns BLOCK_M queries of one head; writes out, the softmax output and lse (in log2).

    fp32 sums. `softmax_out` is None if it equals `out` or is not saved. `row_sums` are the sums of v of every row.
    """
    num_blocks = tl.cdiv(rule.num_queries, BLOCK_M)
    block, batch_head = scheduled_block(tl.program_id(0), num_blocks, num_programs, section, LONGEST_LAST=True)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // (num_heads // num_kv_heads)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    span = query_span(block, queries, batch, rule, BLOCK_M, BLOCK_N)

    sink_log2 = None
    if sink is not None:
        sink_log2 = load_sinks(sink, sink_strides, batch, head, queries, rule.num_queries)
    row_max, row_sum = start_softmax(sink_log2, BLOCK_M)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    q = load_tile(q_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    for phase in tl.static_range(3):
        begin, end = span_phase(span, phase)
        # Only windows and segments have a left edge.
        if (phase != LEFT) or (rule.back is not None) or (rule.limits is not None):
            for tile in tl.range(begin, end):
                output, row_max, row_sum = _softmax_step(
                    output, row_max, row_sum, q, k_desc, v_desc, tile, batch, kv_head, queries, rule, scale_log2,
                    BLOCK_N, BLOCK_D, PRECISION, phase != FULL, has_unseen_keys(rule, phase), WEIGHTS,
                )  # fmt: skip

    low, high = row_limits(queries, batch, rule)
    seen = low <= high
    output = output * (1.0 / tl.where(seen, row_sum, 1.0))[:, None]
    # A row that sees no key has lse = -inf, even with a sink; the backward detects it by that.
    row_lse = tl.where(seen, row_max + tl.log2(row_sum), float("-inf"))
    tl.store(lse + batch_head.to(tl.int64) * rule.num_queries + queries, row_lse, mask=queries < rule.num_queries)
    if sink_strides is not None:
        output = tl.where(seen[:, None], output, 0.0)  # the sink of a row that sees no key may be NaN
    if softmax_out is not None:
        store_tile(softmax_out, softmax_strides, batch, head, queries, rule.num_queries, output, HEAD_DIM, BLOCK_D)
    if alpha is not None:
        output *= load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)[:, None]
    if beta is not None:
        value_sum = load_row_sums(
            row_sums, batch * num_kv_heads + kv_head, queries, rule.num_queries, HEAD_DIM, BLOCK_D
        )
        output += load_row_scalars(beta, beta_strides, batch, head, queries, rule.num_queries)[:, None] * value_sum
    if gate_desc is not None:
        output *= load_tile(gate_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
    # Its alpha, beta and gate may hold anything, and 0 times NaN is NaN.
    output = tl.where(seen[:, None], output, 0.0)
    store_tile(out, out_strides, batch, head, queries, rule.num_queries, output, HEAD_DIM, BLOCK_D)


class FlashForward:
    """(out, softmax output or None, None, state) of one kind of call. The state holds lse in log2 and the sums of v.

    Args:
        call: the first call with a signature, with addressable tensors; all its calls have the same specs.
        keeps_core: the softmax output is written in addition to the output.
        sizes: tile sizes by kernel, instead of the tuned or shipped ones.
    """

    def __init__(self, call: CallSpec, *, keeps_core: bool, sizes: dict[str, Config] | None = None):
        query, key, value, (alpha, beta, sink, gate) = call[:4]
        batch, heads, num_queries, dim = query.shape
        self.keeps_core, self.device, self.new_out = keeps_core, query.get_device(), like(query)
        self.state = Workspace(flash_state(call, sizes), query.device)
        rule = flash_rule(call, self.state)
        config = size_of("causal" if is_causal_only(rule) else "forward", call, sizes)
        launches = limit_launches(rule, batch)
        arrays: Arrays = {}
        sums = None
        if beta is not None:
            table, sums = Slot(NUM_TENSORS + self.state.index("table")), Slot(NUM_TENSORS + len(self.state.arrays))
            arrays["row sums"] = (row_sums.row_sums_shape(query.shape, value.shape), torch.float32)
            block = size_of("forward", call, sizes).block_n
            launches += row_sums.row_sum_launches(value, Slot(VALUE), table, sums, rule, block)
        self.workspace = Workspace(arrays, query.device)
        out_strides = query.fresh_strides
        programs = batch * heads
        launches.append(Launch(
            _forward_kernel, (-(-num_queries // config.block_m) * programs,),
            (
                Slot(QUERY, tile_descriptor(query, config.block_m)), Slot(KEY, tile_descriptor(key, config.block_n)),
                Slot(VALUE, tile_descriptor(value, config.block_n)),
                None if gate is None else Slot(GATE, tile_descriptor(gate, config.block_m)),
                None if alpha is None else Slot(ALPHA), None if alpha is None else alpha.stride(),
                None if beta is None else Slot(BETA), None if beta is None else beta.stride(),
                None if sink is None else Slot(SINK), call.rows.sink_strides,
                sums,
                Slot(OUT), out_strides, Slot(CORE) if keeps_core else None, out_strides if keeps_core else None,
                Slot(NUM_TENSORS), rule, call.softmax_scale * LOG2E.value, heads, key.shape[1], programs,
                query_section(query, key), config.block_m, config.block_n, dim, padded(dim), PRECISION,
                WEIGHTS.index(call.weights),
            ),
            **config.options,
        ))  # fmt: skip
        self.launches = LaunchSet({"forward": launches}, self.state, self.workspace)

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """`inputs` are query, key, value, alpha, beta, sink, gate, query segments, key segments and the key mask."""
        out = self.new_out()
        core = self.new_out() if self.keeps_core else None
        state = self.state.new()
        values = self.launches.values((*inputs, out, core), state, self.workspace.new())
        self.launches.run("forward", values, self.device)
        return out, core, None, state


def flash_state(call: CallSpec, sizes: dict[str, Config] | None) -> Arrays:
    """The state saved for the backward: lse [B, H, T], the table of the sums of v over the tiles, and the limits."""
    arrays: Arrays = {"lse": (call.query.shape[:3], torch.float32)}
    if call.rows.beta is not None:
        block = size_of("forward", call, sizes).block_n
        arrays["table"] = (value_sums.table_shape(call.value.shape, block), torch.float32)
    return arrays | limit_arrays(call.visibility)


def flash_rule(call: CallSpec, state: Workspace) -> Rule:
    """The rule of a call whose state follows its tensors."""
    tensors = (Slot(QUERY_SEGMENTS), Slot(KEY_SEGMENTS), Slot(KEY_MASK))
    return make_rule(call.visibility, tensors, lambda name: Slot(NUM_TENSORS + state.index(name)))


def size_of(kernel: str, call: CallSpec, sizes: dict[str, Config] | None) -> Config:
    """The tile sizes of "forward", "causal", "rows", "query_grads" or "key_grads"."""
    if kernel == "rows":
        # The row gradients read the tile sums of the forward, so block_n is equal; fewer queries, for occupancy.
        forward = size_of("forward", call, sizes)
        return forward._replace(block_m=min(64, forward.block_m), num_warps=4)
    if sizes is not None:
        return sizes[kernel]
    return chosen_config(kernel, call.query.shape[-1], call.query.dtype, call.query.device)
