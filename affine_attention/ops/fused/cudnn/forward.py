"""The forward with cuDNN's plain attention: the sums of v on a side stream, F6 and F7 in an epilogue kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import CallSpec
from ..hopper.forward import slot_of, state_arrays, state_slots
from ..shared import value_sums
from ..shared.launch import Launch, LaunchSet, Slot
from ..shared.side_stream import WORTH_A_STREAM, SideStream
from ..shared.value_sums import block_of, padded, warps_of
from ..shared.workspace import Workspace
from .kernels import epilogue_kernel

ELEMENTS = 32  # elements of a tile per thread, measured on an H200: several 16-byte loads in flight
(VALUE, ALPHA, BETA, SINK, GATE, CORE, LSE, OUT, NUM_TENSORS) = range(9)


class CudnnForward:
    """Returns (out, O or None, lse, state or None). The state holds the table of sums and the marks.

    Args:
        call: the first call with a signature; all its calls have the same shapes, strides and dtypes.
        keeps_core: O is kept in addition to the output; otherwise the output overwrites it.
        keeps_marks: rows of the output in which O is lost to cancellation are marked.
        shift: lse - log(alpha) is written instead of lse (B7).
    """

    def __init__(self, call: CallSpec, *, keeps_core: bool, keeps_marks: bool, shift: bool):
        query = call.query
        self.call, self.shift, self.device = call, shift, query.get_device()
        self.is_plain = call.rows.is_plain
        alpha, beta, _, gate = call.rows
        # Without alpha, beta and gate the output is O itself, including the sink.
        self.out_is_core = (alpha is None and beta is None and gate is None) or not keeps_core
        self.has_side_stream = query.numel() >= WORTH_A_STREAM
        self.state = Workspace(state_arrays(call, False, keeps_marks), query.device)
        self.launches: LaunchSet | None = (
            None  # created at the first call, which determines the strides of cuDNN's results
        )

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """`inputs` are query, key, value, alpha, beta, sink and gate."""
        query, key, value, alpha, beta, sink, gate = inputs
        assert query is not None
        assert key is not None
        assert value is not None
        causal, scale = self.call.visibility.is_causal, self.call.softmax_scale
        if self.is_plain:
            core, lse = attend(query, key, value, causal, scale)
            return core, None, lse, None
        side_stream = SideStream(query.device, self.has_side_stream and beta is not None)
        core, lse = attend(query, key, value, causal, scale)
        out = core if self.out_is_core else torch.empty_like(core)
        state = self.state.new()
        if self.launches is None:
            self.launches = self._launches(core, lse)
        values = self.launches.values((value, alpha, beta, sink, gate, core, lse, out), state)
        if beta is not None:
            side_stream.run(lambda: self.launches.run("sums", values, self.device))  # type: ignore[union-attr]
            side_stream.join()
        self.launches.run("epilogue", values, self.device)
        return out, None if self.out_is_core else core, lse, state

    def _launches(self, core: Tensor, lse: Tensor) -> LaunchSet:
        query, key, value, (alpha, beta, sink, gate) = self.call[:4]
        batch, heads, num_queries, dim = query.shape
        groups, block = key.shape[1], block_of(dim)
        _, table, marks = state_slots(self.state, NUM_TENSORS)
        table_length = 0 if beta is None else value_sums.table_shape(value.shape)[2]
        scanned = value_sums.is_scanned(table_length, query.numel())
        sums: list[Launch] = []
        if beta is not None:
            assert table is not None
            sums = value_sums.sum_launches(
                value.shape, value.stride(), Slot(VALUE), table, scans=scanned
            )  # fmt: skip
        only_core = alpha is None and beta is None and gate is None
        # With beta, one CTA processes all heads of a group, because they share their sum of v.
        heads_per_cta = 1 if beta is None else heads // groups
        blocks = -(-num_queries // block)
        strides = [(0, 0, 0) if x is None else x.stride()[:3] for x in (alpha, beta, gate)]
        epilogue = Launch(
            epilogue_kernel, (batch * heads // heads_per_cta * blocks,),
            (
                Slot(CORE), Slot(LSE), Slot(CORE) if only_core or not self.out_is_core else None,
                None if only_core else Slot(OUT), marks, Slot(VALUE), table,
                slot_of(alpha, ALPHA), slot_of(beta, BETA), slot_of(sink, SINK), slot_of(gate, GATE),
                *core.stride()[:3], *lse.stride()[:3], *value.stride()[:3], *strides[0], *strides[1], *strides[2],
                num_queries, blocks, max(table_length - 1, 0), heads, heads // groups,
                heads_per_cta, self.shift, self.call.visibility.is_causal, scanned, dim, block, padded(dim),
            ),
            num_warps=warps_of(dim, ELEMENTS),
        )  # fmt: skip
        groups_of_launches = {"epilogue": [epilogue], **({"sums": sums} if sums else {})}
        return LaunchSet(groups_of_launches, self.state)


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention by cuDNN; returns O and lse [B, H, T, 1]."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=softmax_scale
    )[:2]
