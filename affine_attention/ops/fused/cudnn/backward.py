"""The backward with cuDNN: the row gradients before it or on a side stream, the beta term of dV after it.

cuDNN's backward takes the output and the log-sum-exp as inputs, so passing both with the sink and alpha included gives
exact gradients (B7). If the caller promises alpha >= 0, lse includes alpha, and the row gradients run on a side stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import CallSpec, TensorSpec
from ...sdpa import OWN_CUDNN_BACKWARD
from ..hopper.forward import slot_of, state_slots
from ..shared import value_sums
from ..shared.launch import Launch, LaunchSet, Slot
from ..shared.prologue import prologue_kernel
from ..shared.side_stream import PAUSE_PER_TRANSFER, START_CYCLES, WORTH_A_STREAM, SideStream, cycles_to_move
from ..shared.value_sums import block_of, padded, warps_of
from ..shared.workspace import Workspace
from .kernels import add_later_kernel

ELEMENTS = 32  # elements of a tile per thread
(GRAD, CORE, LSE, VALUE, ALPHA, BETA, SINK, GATE, DALPHA, DBETA, DGATE, GRAD_CORE, SINK_PARTS, WEIGHTED,
 NUM_TENSORS) = range(15)  # fmt: skip


class CudnnBackward:
    """The gradients of query, key, value, alpha, beta, sink and gate, for calls with one signature.

    Args:
        call: the first call with a signature; all its calls have the same shapes, strides and dtypes.
        grad_out, core, lse: the tensors of the first backward.
        state: the layout of the forward's state.
        shift: lse already includes log(alpha) (B7).
    """

    def __init__(
        self, call: CallSpec, grad_out: TensorSpec, core: TensorSpec, lse: TensorSpec, state: Workspace, *,
        shift: bool, wants_sink: bool,
    ):  # fmt: skip
        query, key, _, (alpha, beta, sink, gate) = call[:4]
        self.call, self.shift, self.state, self.device = call, shift, state, query.get_device()
        self.sink = sink if wants_sink else None
        self.is_plain = alpha is None and beta is None and gate is None and self.sink is None
        batch, heads, num_queries, dim = query.shape
        self.groups, self.block = key.shape[1], block_of(dim)
        self.blocks = -(-num_queries // self.block)
        # The gradient must have the strides of the output (OWN_CUDNN_BACKWARD), so the prologue writes one that has.
        self.reads_grad = gate is None and (alpha is None or shift) and grad_out.stride() == core.stride()
        self.makes_grad_core = not self.reads_grad
        self.later_shape = (batch, self.groups, self.blocks + 1, dim)
        self.workspace = Workspace({} if beta is None else {"later": (self.later_shape, torch.float32)}, query.device)
        # bf16 has the range of fp32; fp16 would flush small beta * E to 0.
        has_weighted = beta is not None and call.visibility.is_causal and heads > self.groups
        dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
        self.weighted_dtype = dtype if has_weighted else None
        self.later = Slot(NUM_TENSORS + len(state.arrays)) if beta is not None else None
        # The row gradients wait until cuDNN's main kernel runs, which is queued behind a kernel that reads dOut and O.
        num_bytes = 2 * query.numel() * query.element_size()
        self.pause = START_CYCLES + PAUSE_PER_TRANSFER * cycles_to_move(num_bytes, query.device)
        self.has_side_stream = query.numel() >= WORTH_A_STREAM
        prologue = [self._prologue(grad_out, core, lse)]
        self.scanned = value_sums.is_scanned(self.blocks + 1, query.numel())
        if self.later is not None and self.scanned:
            prologue.append(value_sums.scan_launch(self.later_shape, self.later))
        self.prologue = LaunchSet({"prologue": prologue}, state, self.workspace)
        self.add_later: LaunchSet | None = None  # created at the first call, which determines the strides of cuDNN's dV

    def __call__(
        self, grad_out: Tensor, core: Tensor, lse: Tensor, state: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, alpha, beta, sink, gate = inputs
        assert query is not None
        assert key is not None
        assert value is not None
        causal, scale = self.call.visibility.is_causal, self.call.softmax_scale
        if self.is_plain:
            grad_out = grad_out if self.reads_grad else torch.empty_like(core).copy_(grad_out)
            return *attend_backward(grad_out, query, key, value, core, lse, causal, scale), None, None, None, None
        grad_alpha = None if alpha is None else torch.empty(alpha.shape, dtype=alpha.dtype, device=alpha.device)
        grad_beta = None if beta is None else torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
        grad_gate = None if gate is None else torch.empty_like(gate)
        grad_core = torch.empty_like(core) if self.makes_grad_core else None
        parts = weighted = None
        if self.sink is not None:
            parts = torch.empty(*query.shape[:2], self.blocks, dtype=torch.float32, device=query.device)
        if self.weighted_dtype is not None:
            shape = (query.shape[0], self.groups, *query.shape[2:])
            weighted = torch.empty(shape, dtype=self.weighted_dtype, device=query.device)
        buffer = self.workspace.new()
        buffers = (buffer if state is None else state, buffer)
        values = self.prologue.values(
            (grad_out, core, lse, value, alpha, beta, sink, gate, grad_alpha, grad_beta, grad_gate, grad_core, parts,
             weighted), *buffers,
        )  # fmt: skip
        side_stream = SideStream(query.device, self.has_side_stream and not self.makes_grad_core)
        if self.makes_grad_core:
            self.prologue.run("prologue", values, self.device)
        inner = grad_out if grad_core is None else grad_core
        grads = attend_backward(inner, query, key, value, core, lse, causal, scale)
        if not self.makes_grad_core:
            side_stream.run(lambda: self.prologue.run("prologue", values, self.device), self.pause)
            side_stream.join()
        if beta is not None:
            if self.add_later is None:
                self.add_later = LaunchSet({"later": [self._add_later(grad_out, grads[2])]}, self.workspace)
            source = grad_out if weighted is None else weighted
            values = self.add_later.values((grads[2], source, beta, gate), buffer)
            self.add_later.run("later", values, self.device)
        grad_sink = None if parts is None or sink is None else parts.sum((0, 2)).to(sink.dtype)
        return *grads, grad_alpha, grad_beta, grad_sink, grad_gate

    def _prologue(self, grad_out: TensorSpec, core: TensorSpec, lse: TensorSpec) -> Launch:
        query, _, value, (alpha, beta, _, gate) = self.call[:4]
        batch, heads, num_queries, dim = query.shape
        _, table, _ = state_slots(self.state, NUM_TENSORS)
        table_length = 0 if beta is None else value_sums.table_shape(value.shape)[2]
        grad_gate_strides = (0, 0, 0) if gate is None else gate.fresh_strides[:3]
        strides = [(0, 0, 0) if x is None else x.stride()[:3] for x in (alpha, beta, gate)]
        return Launch(
            prologue_kernel, (batch * self.groups * self.blocks,),
            (
                Slot(GRAD), Slot(CORE), Slot(LSE), None, Slot(VALUE), table,
                slot_of(alpha, ALPHA), slot_of(beta, BETA), slot_of(self.sink, SINK), slot_of(gate, GATE),
                Slot(GRAD_CORE) if self.makes_grad_core else None, slot_of(alpha, DALPHA), slot_of(beta, DBETA),
                slot_of(gate, DGATE), slot_of(self.sink, SINK_PARTS),
                None if self.weighted_dtype is None else Slot(WEIGHTED), self.later, None, None, None,
                *grad_out.stride()[:3], *core.stride()[:3], *lse.stride()[:3], *value.stride()[:3],
                *strides[0], *strides[1], *strides[2], *grad_gate_strides,
                num_queries, self.blocks, max(table_length - 1, 0), heads, self.call.softmax_scale, 0, self.blocks, 0,
                heads // self.groups, self.shift, self.call.visibility.is_causal,
                value_sums.is_scanned(table_length, query.numel()), dim, self.block, padded(dim), 0, False, False,
            ),
            num_warps=warps_of(dim, ELEMENTS),
        )  # fmt: skip

    def _add_later(self, grad_out: Tensor, grad_value: Tensor) -> Launch:
        """Adds the beta term to dV in place, from the sum of beta E over a group or from dOut, beta and gate."""
        query, (_, beta, _, gate) = self.call.query, self.call.rows
        is_weighted = self.weighted_dtype is not None
        rows = query.shape[2] * query.shape[3]
        source_strides = (self.groups * rows, rows, query.shape[3]) if is_weighted else grad_out.stride()[:3]
        beta, gate = (None, None) if is_weighted else (beta, gate)
        strides = [(0, 0, 0) if x is None else x.stride()[:3] for x in (beta, gate)]
        num_keys, dim = grad_value.shape[2:]
        key_blocks = -(-num_keys // self.block)
        return Launch(
            add_later_kernel, (grad_value.shape[0] * self.groups * key_blocks,),
            (
                Slot(0), Slot(1), slot_of(beta, 2), slot_of(gate, 3), Slot(4),
                *grad_value.stride()[:3], *source_strides, *strides[0], *strides[1],
                num_keys, key_blocks, self.blocks, self.groups, self.call.visibility.is_causal,
                self.scanned, dim, self.block, padded(dim),
            ),
            num_warps=warps_of(dim, ELEMENTS),
        )  # fmt: skip


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    core: Tensor,
    lse: Tensor,
    is_causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of plain attention by cuDNN; `core` and `lse` may include a sink and alpha.

    `grad` has the strides of `core`, and `core` those that cuDNN's forward gave it.
    """
    # Without dropout the seed is not read; a scalar is cheaper than saving two more outputs of the forward.
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, core, lse, seed, seed, None, None, None, query.shape[2], key.shape[2],
        OWN_CUDNN_BACKWARD, is_causal, scale=softmax_scale,
    )  # fmt: skip
