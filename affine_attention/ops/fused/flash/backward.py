"""The backward in Triton, for every visibility but dense masks: row gradients, then dQ, then dK and dV.

Three kernels: B2, B5 and B6 for the rows; dQ of B3; dK of B3 with B4. There is no division by alpha and there are no
atomics: every output element is written by one program, so results are deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...call import CallSpec, TensorSpec
from ..plan import WEIGHTS
from ..shared.descriptors import key_section, query_section, tile_descriptor
from ..shared.launch import ALIGNMENT, Launch, LaunchSet, Slot
from ..shared.limits import key_ranges
from ..shared.rule import can_have_empty_rows, make_rule
from ..shared.tile_functions import (
    FULL,
    GRID_NUMBERS,
    LEFT,
    LOG2E,
    SIGMOID,
    SIGNED,
    has_unseen_keys,
    key_span,
    load_row_scalars,
    load_sinks,
    load_tile,
    mask_pairs,
    query_span,
    scheduled_block,
    signs,
    span_phase,
    store_row_scalars,
    store_tile,
    sum_full_tiles,
    zero_nonfinite,
)
from ..shared.tile_sizes import Config
from ..shared.value_sums import padded
from ..shared.workspace import Workspace
from .forward import PRECISION, size_of

(GRAD, CORE, QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, QUERY_SEGMENTS, KEY_SEGMENTS, KEY_MASK, DQ, DK, DV, DALPHA,
 DBETA, DGATE, SINK_PARTS, NUM_TENSORS) = range(20)  # fmt: skip


@triton.jit(do_not_specialize=GRID_NUMBERS[:2])
def _row_kernel(
    o_desc, grad_desc, v_desc, gate_desc, alpha, alpha_strides, beta, beta_strides, sink, sink_strides, lse, sums,
    delta, dalpha, dalpha_strides, dbeta, dbeta_strides, dsink_parts, dgate, dgate_strides,
    scaled_grad, scaled_strides, rule, num_heads, num_kv_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """B2, B5, B6. One program owns BLOCK_M queries of one head; writes delta, dalpha, dbeta, dgate, E, a part of dsink.

    fp32 sums. The outputs of inputs that are None are None. `dsink_parts` is the gradient itself, [B, H, T], if every
    row has its own sink.
    """
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    block = tl.program_id(1)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_strides = (num_heads * rule.num_queries, rule.num_queries, 1)

    softmax_out = load_tile(o_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
    grad = load_tile(grad_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D)
    e = grad.to(tl.float32)
    row_lse = load_row_scalars(lse, row_strides, batch, head, queries, rule.num_queries)
    seen = row_lse != float("-inf")  # a row that sees no key has zero gradients, whatever its coefficients
    if gate_desc is not None:
        e *= load_tile(gate_desc, batch, head, block * BLOCK_M, BLOCK_M, BLOCK_D).to(tl.float32)
        e = tl.where(seen[:, None], e, 0.0)
        store_tile(scaled_grad, scaled_strides, batch, head, queries, rule.num_queries, e, HEAD_DIM, BLOCK_D)

    row_dalpha = tl.sum(e * softmax_out, 1)
    row_delta = row_dalpha
    if gate_desc is not None:
        # Use E as rounded for B3 and B4: where alpha E . v and delta cancel, both need the same rounding.
        row_delta = tl.sum(e.to(grad.dtype).to(tl.float32) * softmax_out, 1)
    mixed = softmax_out
    if alpha is not None:
        row_alpha = load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)
        row_delta = tl.where(seen, row_delta * row_alpha, 0.0)
        mixed = row_alpha[:, None] * softmax_out
        store_row_scalars(dalpha, dalpha_strides, batch, head, queries, rule.num_queries, row_dalpha)
    store_row_scalars(delta, row_strides, batch, head, queries, rule.num_queries, row_delta)
    if beta is not None:
        kv_head = head // (num_heads // num_kv_heads)
        span = query_span(block, queries, batch, rule, BLOCK_M, BLOCK_N)
        prefix: tl.constexpr = (rule.back is None) and (rule.limits is None)
        full_sum = sum_full_tiles(
            sums, span, batch, kv_head, num_kv_heads, tl.cdiv(rule.num_keys, BLOCK_N), HEAD_DIM, BLOCK_D, prefix
        )[None, :]
        row_dbeta = tl.sum(e * full_sum, 1)
        value_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + full_sum
        left = e.to(grad.dtype)
        for phase in tl.static_range(1, 3):
            begin, end = span_phase(span, phase)
            if (phase != LEFT) or (rule.back is not None) or (rule.limits is not None):
                for tile in tl.range(begin, end, num_stages=1):
                    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                    v = load_tile(v_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
                    if has_unseen_keys(rule, phase):
                        v = zero_nonfinite(v)
                    # dbeta needs E . v in the masked tiles only; the gate needs the sums themselves.
                    value_grads = tl.dot(left, v.T, input_precision=PRECISION)
                    row_dbeta += tl.sum(mask_pairs(value_grads, 0.0, queries, keys, batch, rule), 1)
                    if gate_desc is not None:
                        ones = tl.full([BLOCK_M, BLOCK_N], 1.0, tl.float32)
                        weights = mask_pairs(ones, 0.0, queries, keys, batch, rule)
                        value_sum = tl.dot(weights.to(v.dtype), v, value_sum, input_precision=PRECISION)
        store_row_scalars(dbeta, dbeta_strides, batch, head, queries, rule.num_queries, row_dbeta)
        if gate_desc is not None:
            mixed += load_row_scalars(beta, beta_strides, batch, head, queries, rule.num_queries)[:, None] * value_sum
    if gate_desc is not None:
        dgate_tile = tl.where(seen[:, None], grad.to(tl.float32) * mixed, 0.0)
        store_tile(dgate, dgate_strides, batch, head, queries, rule.num_queries, dgate_tile, HEAD_DIM, BLOCK_D)
    if sink is not None:
        sink_log2 = load_sinks(sink, sink_strides, batch, head, queries, rule.num_queries)
        weight = tl.where(seen, tl.exp2(sink_log2 - row_lse), 0.0)
        if sink_strides is None:
            part = -tl.sum(tl.where(queries < rule.num_queries, weight * row_delta, 0.0), 0)
            tl.store(dsink_parts + tl.program_id(0) * tl.num_programs(1) + block, part)
        else:
            store_row_scalars(dsink_parts, row_strides, batch, head, queries, rule.num_queries, -weight * row_delta)


@triton.jit
def _probabilities(scores, row_lse, scale_log2, WEIGHTS: tl.constexpr):
    """P of one tile in either orientation, with its signs, without its mask; row_lse broadcasts along the keys."""
    if WEIGHTS == SIGMOID:
        p = 1.0 / (1.0 + tl.exp2(row_lse - scores * scale_log2))
    elif WEIGHTS == SIGNED:
        p = tl.exp2(tl.abs(scores) * scale_log2 - row_lse) * signs(scores)
    else:
        p = tl.exp2(scores * scale_log2 - row_lse)
    return p


@triton.jit
def _score_grads(p, value_grads, row_alpha, row_delta, WEIGHTS: tl.constexpr):
    """dS of one tile in either orientation, without its mask, from P with its signs and E . v."""
    if row_alpha is not None:
        value_grads = value_grads * row_alpha
    if WEIGHTS == SIGMOID:
        ds = p * (1.0 - p) * value_grads
    elif WEIGHTS == SIGNED:
        # P carries its signs through the second MMA: its scores need no registers.
        ds = tl.abs(p) * value_grads - p * row_delta
    else:
        ds = p * (value_grads - row_delta)
    return ds


@triton.jit
def _query_grad_step(
    dq, q, e, row_alpha, row_delta, row_lse, k_desc, v_desc, tile, batch, kv_head, queries, rule, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, UNSEEN: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """B3, dQ, for one tile of keys."""
    k = load_tile(k_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    v = load_tile(v_desc, batch, kv_head, tile * BLOCK_N, BLOCK_N, BLOCK_D)
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if UNSEEN:
        # Rows that see a non-finite key are NaN through lse; the MMA must not propagate it to other rows.
        k = zero_nonfinite(k)
    p = _probabilities(scores, row_lse, scale_log2, WEIGHTS)
    value_grads = tl.dot(e, v.T, input_precision=PRECISION)
    ds = _score_grads(p, value_grads, row_alpha, row_delta, WEIGHTS)
    if MASKED:
        # Select instead of multiplying by 0: a masked key may be NaN, and an empty row has lse = -inf.
        ds = mask_pairs(ds, 0.0, queries, tile * BLOCK_N + tl.arange(0, BLOCK_N), batch, rule)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=GRID_NUMBERS)
def _query_grad_kernel(
    q_desc, k_desc, v_desc, e_desc, alpha, alpha_strides, lse, delta, dq, dq_strides, rule,
    softmax_scale, scale_log2, num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """B3, dQ. One program owns BLOCK_M queries of one head; writes dq. fp32 sums."""
    num_blocks = tl.cdiv(rule.num_queries, BLOCK_M)
    block, batch_head = scheduled_block(tl.program_id(0), num_blocks, num_programs, section, LONGEST_LAST=True)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    kv_head = head // (num_heads // num_kv_heads)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    span = query_span(block, queries, batch, rule, BLOCK_M, BLOCK_N)

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
        if (phase != LEFT) or (rule.back is not None) or (rule.limits is not None):
            for tile in tl.range(begin, end):
                total = _query_grad_step(
                    total, q, e, row_alpha, row_delta, row_lse, k_desc, v_desc, tile, batch, kv_head, queries, rule,
                    scale_log2, BLOCK_N, BLOCK_D, PRECISION, phase != FULL, has_unseen_keys(rule, phase), WEIGHTS,
                )  # fmt: skip
    store_tile(dq, dq_strides, batch, head, queries, rule.num_queries, total * softmax_scale, HEAD_DIM, BLOCK_D)


@triton.jit
def _key_grad_step(
    dk, dv, k, v, q_desc, e_desc, alpha, alpha_strides, beta, beta_strides, lse, delta, tile, batch, head, num_heads,
    keys, rule, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    EMPTY_ROWS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """B3, dK, and B4 for one tile of queries. Tiles are transposed, so that P and dS are left operands of the MMAs.

    EMPTY_ROWS: some queries of the tile may see no key. They may contain anything, and 0 times NaN is NaN.
    """
    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_tile(q_desc, batch, head, tile * BLOCK_M, BLOCK_M, BLOCK_D)
    e = load_tile(e_desc, batch, head, tile * BLOCK_M, BLOCK_M, BLOCK_D)
    row_strides = (num_heads * rule.num_queries, rule.num_queries, 1)
    # Rows beyond the end are loaded as 0 (q, E, alpha, beta, delta, lse), so they contribute nothing.
    row_lse = load_row_scalars(lse, row_strides, batch, head, queries, rule.num_queries)[None, :]
    row_delta = load_row_scalars(delta, row_strides, batch, head, queries, rule.num_queries)[None, :]
    row_alpha = None
    if alpha is not None:
        row_alpha = load_row_scalars(alpha, alpha_strides, batch, head, queries, rule.num_queries)[None, :]
    scores = tl.dot(k, q.T, input_precision=PRECISION)
    p = _probabilities(scores, row_lse, scale_log2, WEIGHTS)
    weights = p
    if row_alpha is not None:
        weights = weights * row_alpha
    if beta is not None:
        weights += load_row_scalars(beta, beta_strides, batch, head, queries, rule.num_queries)[None, :]
    if MASKED:
        weights = mask_pairs(weights, 0.0, queries, keys, batch, rule, KEYS_FIRST=True)
    dv = tl.dot(weights.to(e.dtype), e, dv, input_precision=PRECISION)
    value_grads = tl.dot(v, e.T, input_precision=PRECISION)
    ds = _score_grads(p, value_grads, row_alpha, row_delta, WEIGHTS)
    if MASKED:
        ds = mask_pairs(ds, 0.0, queries, keys, batch, rule, KEYS_FIRST=True)
    if EMPTY_ROWS:
        # A row that sees a key keeps its NaN: its dS is NaN.
        q = zero_nonfinite(q)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=GRID_NUMBERS)
def _key_grad_kernel(
    q_desc, k_desc, v_desc, e_desc, alpha, alpha_strides, beta, beta_strides, lse, delta, ranges,
    dk, dk_strides, dv, dv_strides, rule, softmax_scale, scale_log2, num_heads, num_kv_heads, num_programs, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, EMPTY_ROWS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """B3, dK, and B4. One program owns BLOCK_N keys of one key-value head, for every query head of its group.

    Writes dk and dv. fp32 sums.
    """
    num_blocks = tl.cdiv(rule.num_keys, BLOCK_N)
    block, batch_head = scheduled_block(tl.program_id(0), num_blocks, num_programs, section, LONGEST_LAST=False)
    batch = (batch_head // num_kv_heads).to(tl.int64)
    kv_head = (batch_head % num_kv_heads).to(tl.int64)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    span = key_span(block, num_blocks, batch, rule, ranges, BLOCK_M, BLOCK_N)

    k = load_tile(k_desc, batch, kv_head, block * BLOCK_N, BLOCK_N, BLOCK_D)
    v = load_tile(v_desc, batch, kv_head, block * BLOCK_N, BLOCK_N, BLOCK_D)
    dk_total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    group = num_heads // num_kv_heads
    for member in tl.range(group, num_stages=1):
        head = kv_head * group + member
        for phase in tl.static_range(3):
            begin, end = span_phase(span, phase)
            # A masked edge that cannot occur is not compiled.
            if (
                (phase == FULL)
                or (rule.limits is not None)
                or ((rule.ahead if phase == LEFT else rule.back) is not None)
            ):
                for tile in tl.range(begin, end):
                    dk_total, dv_total = _key_grad_step(
                        dk_total, dv_total, k, v, q_desc, e_desc, alpha, alpha_strides, beta, beta_strides, lse, delta,
                        tile, batch, head, num_heads, keys, rule, scale_log2,
                        BLOCK_M, BLOCK_D, PRECISION, phase != FULL, EMPTY_ROWS and (phase != FULL), WEIGHTS,
                    )  # fmt: skip
    store_tile(dk, dk_strides, batch, kv_head, keys, rule.num_keys, dk_total * softmax_scale, HEAD_DIM, BLOCK_D)
    store_tile(dv, dv_strides, batch, kv_head, keys, rule.num_keys, dv_total, HEAD_DIM, BLOCK_D)


class FlashBackward:
    """The gradients of query, key, value, alpha, beta, sink and gate, for calls with one signature.

    Args:
        call: the first call with a signature, with addressable tensors; all its calls have the same specs.
        grad_out, core: the gradient of the output and the softmax output of the first backward, addressable.
        state: the layout of the forward's state.
        sizes: tile sizes by kernel, instead of the tuned or shipped ones.
    """

    def __init__(
        self, call: CallSpec, grad_out: TensorSpec, core: TensorSpec, state: Workspace,
        sizes: dict[str, Config] | None = None,
    ):  # fmt: skip
        self.call, self.device = call, call.query.get_device()
        # The sink slot of sigmoid weights holds a bias that has no gradient.
        self.has_sink = call.rows.sink is not None and call.weights != "sigmoid"
        tensors = (Slot(QUERY_SEGMENTS), Slot(KEY_SEGMENTS), Slot(KEY_MASK))
        self.rule = make_rule(call.visibility, tensors, lambda name: Slot(NUM_TENSORS + state.index(name)))
        self.rows = size_of("rows", call, sizes)
        self.num_blocks = -(-call.query.shape[2] // self.rows.block_m)
        first = NUM_TENSORS + len(state.arrays)
        delta, self.scaled = Slot(first), Slot(GRAD)
        if call.rows.gate is not None:
            self.scaled = Slot(first + 1)
        of_keys = size_of("key_grads", call, sizes)
        arrays, ranges, preparation = key_ranges(self.rule, call.query.shape[0], of_keys, first + len(self._arrays()))
        lse = Slot(NUM_TENSORS)
        table = Slot(NUM_TENSORS + state.index("table")) if "table" in state.arrays else None
        launches = [
            *preparation,
            self._rows(grad_out, core, lse, table, delta),
            self._query_grads(grad_out, lse, delta, size_of("query_grads", call, sizes)),
            self._key_grads(grad_out, lse, delta, ranges, of_keys),
        ]
        self.workspace = Workspace(self._arrays() | arrays, call.query.device)
        self.launches = LaunchSet({"backward": launches}, state, self.workspace)

    def __call__(
        self, grad_out: Tensor, core: Tensor, state: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """`inputs` are query, key, value, alpha, beta, sink, gate, query segments, key segments and the key mask."""
        sink, gate = inputs[5] if self.has_sink else None, inputs[6]
        grads: list[Tensor | None] = [torch.empty_like(x) for x in inputs[:3]]  # type: ignore[arg-type]
        grads += [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[3:5]]
        grad_gate = None if gate is None else torch.empty_like(gate)
        parts = None
        if sink is not None:
            by_row = self.call.rows.has_row_sinks
            shape, dtype = (sink.shape, sink.dtype) if by_row else ((*core.shape[:2], self.num_blocks), torch.float32)
            parts = torch.empty(shape, dtype=dtype, device=core.device)
        values = self.launches.values((grad_out, core, *inputs, *grads, grad_gate, parts), state, self.workspace.new())
        self.launches.run("backward", values, self.device)
        grad_sink = parts
        if parts is not None and sink is not None and not by_row:
            grad_sink = parts.sum((0, 2)).to(sink.dtype)
        return *grads, grad_sink, grad_gate

    def _arrays(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The arrays delta and, with a gate, E; without a gate E is the gradient itself."""
        query = self.call.query
        arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"delta": (query.shape[:3], torch.float32)}
        if self.call.rows.gate is not None:
            arrays["scaled"] = (self._scaled_shape(), query.dtype)
        return arrays

    def _scaled_shape(self) -> tuple[int, ...]:
        query = self.call.query
        unit = ALIGNMENT // query.element_size()
        return *query.shape[:3], -(-query.shape[3] // unit) * unit

    def _e(self, grad_out: TensorSpec) -> TensorSpec:
        """The spec of E."""
        if self.call.rows.gate is None:
            return grad_out
        _, heads, length, width = self._scaled_shape()
        strides = (heads * length * width, length * width, width, 1)
        return TensorSpec(grad_out.shape, strides, grad_out.dtype, grad_out.device)

    def _rows(self, grad_out: TensorSpec, core: TensorSpec, lse: Slot, table: Slot | None, delta: Slot) -> Launch:
        query, key, value, (alpha, beta, sink, gate) = self.call[:4]
        if not self.has_sink:
            sink = None
        batch, heads, _, dim = query.shape
        rows = self.rows
        row_strides = (heads * query.shape[2], query.shape[2], 1)
        # Heads are on the first axis of the grid, because the others are limited to 65535.
        return Launch(
            _row_kernel, (batch * heads, self.num_blocks),
            (
                Slot(CORE, tile_descriptor(core, rows.block_m)), Slot(GRAD, tile_descriptor(grad_out, rows.block_m)),
                Slot(VALUE, tile_descriptor(value, rows.block_n)),
                None if gate is None else Slot(GATE, tile_descriptor(gate, rows.block_m)),
                *_with_strides(alpha, ALPHA), *_with_strides(beta, BETA), None if sink is None else Slot(SINK),
                None if sink is None else self.call.rows.sink_strides, lse, table, delta,
                None if alpha is None else Slot(DALPHA), row_strides,
                None if beta is None else Slot(DBETA), row_strides,
                None if sink is None else Slot(SINK_PARTS), *_with_strides(gate, DGATE, fresh=True),
                self.scaled, self._e(grad_out).stride(), self.rule, heads, key.shape[1],
                rows.block_m, rows.block_n, dim, padded(dim), PRECISION,
            ),
            num_warps=rows.num_warps,
        )  # fmt: skip

    def _query_grads(self, grad_out: TensorSpec, lse: Slot, delta: Slot, config: Config) -> Launch:
        query, key, value, (alpha, _, _, _) = self.call[:4]
        batch, heads, num_queries, dim = query.shape
        tile = tile_descriptor(self._e(grad_out), config.block_m)
        scale = self.call.softmax_scale
        return Launch(
            _query_grad_kernel, (-(-num_queries // config.block_m) * batch * heads,),
            (
                Slot(QUERY, tile_descriptor(query, config.block_m)), Slot(KEY, tile_descriptor(key, config.block_n)),
                Slot(VALUE, tile_descriptor(value, config.block_n)), Slot(self.scaled.index, tile),
                *_with_strides(alpha, ALPHA), lse, delta,
                *_with_strides(query, DQ, fresh=True), self.rule, scale, scale * LOG2E.value, heads, key.shape[1],
                batch * heads, query_section(query, key), config.block_m, config.block_n, dim, padded(dim), PRECISION,
                WEIGHTS.index(self.call.weights),
            ),
            **config.options,
        )  # fmt: skip

    def _key_grads(self, grad_out: TensorSpec, lse: Slot, delta: Slot, ranges: Slot | None, config: Config) -> Launch:
        query, key, value, (alpha, beta, _, _) = self.call[:4]
        batch, heads, _, dim = query.shape
        kv_heads, num_keys = key.shape[1:3]
        tile = tile_descriptor(self._e(grad_out), config.block_m)
        scale = self.call.softmax_scale
        return Launch(
            _key_grad_kernel, (-(-num_keys // config.block_n) * batch * kv_heads,),
            (
                Slot(QUERY, tile_descriptor(query, config.block_m)), Slot(KEY, tile_descriptor(key, config.block_n)),
                Slot(VALUE, tile_descriptor(value, config.block_n)), Slot(self.scaled.index, tile),
                *_with_strides(alpha, ALPHA), *_with_strides(beta, BETA), lse, delta, ranges,
                *_with_strides(key, DK, fresh=True), *_with_strides(value, DV, fresh=True), self.rule,
                scale, scale * LOG2E.value, heads, kv_heads, batch * kv_heads, key_section(query, key),
                config.block_m, config.block_n, dim, padded(dim), PRECISION, can_have_empty_rows(self.rule),
                WEIGHTS.index(self.call.weights),
            ),
            **config.options,
        )  # fmt: skip


def _with_strides(x: TensorSpec | None, slot: int, fresh: bool = False) -> tuple[Slot | None, tuple[int, ...] | None]:
    """The slot and the strides of a tensor; with `fresh` the strides of a new tensor like it."""
    if x is None:
        return None, None
    return Slot(slot), x.fresh_strides if fresh else x.stride()
