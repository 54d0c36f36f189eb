"""The forward on Hopper in one warp-specialised Gluon kernel, for long causal calls with head dims above 64."""

from __future__ import annotations

from torch import Tensor

from ...call import CallSpec, TensorSpec
from ..shared import value_sums
from ..shared.allocation import like
from ..shared.descriptors import query_section, tile_descriptor
from ..shared.launch import Descriptor, Launch, LaunchSet, Slot
from ..shared.rule import make_rule, sums_are_prefixes
from ..shared.tile_functions import LOG2E
from ..shared.value_sums import block_of
from ..shared.workspace import Workspace
from .backward import fresh, num_sms
from .forward import slot_of, state_arrays, state_slots

CONSUMERS, ROWS = 2, 64  # warp groups of a CTA, and queries of each
BLOCK_N, STAGES = 128, 2
REGISTERS = 240, 24  # of a thread of a consumer, and of the warp that loads
HEAD_DIMS = range(72, 129, 8)
(QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, OUT, CORE, NUM_TENSORS) = range(10)


class GluonForward:
    """Returns (out, O or None, None, state). The state holds lse, the table of sums and the marks.

    Args:
        call: the first call with a signature; all its calls have the same shapes, strides and dtypes.
        keeps_core: O is written in addition to the output.
        keeps_marks: rows of the output in which O is lost to cancellation are marked.
        shift: lse - log(alpha) is written instead of lse (B7).
        num_ctas: CTAs of the launch; by default one per SM.
    """

    def __init__(
        self, call: CallSpec, *, keeps_core: bool, keeps_marks: bool, shift: bool, num_ctas: int | None = None
    ):
        from triton.experimental.gluon import language as gl

        from .gluon_forward_kernels import attend_kernel

        query, key, value, (alpha, beta, sink, gate) = call[:4]
        batch, heads, length, dim = query.shape
        self.device, self.new_out = query.get_device(), like(query)
        self.new_core = self.new_out if keeps_core else None
        self.state = Workspace(state_arrays(call, True, keeps_marks), query.device)
        lse, table, marks = state_slots(self.state, NUM_TENSORS)
        rule = make_rule(call.visibility)
        assert rule.limits is None
        assert sums_are_prefixes(rule)
        blocks = -(-length // (CONSUMERS * ROWS))
        launches = []
        table_length = 0 if beta is None else value_sums.table_shape(value.shape)[2]
        scanned = value_sums.is_scanned(table_length, query.numel())
        if beta is not None:
            assert table is not None
            launches += value_sums.sum_launches(value.shape, value.stride(), Slot(VALUE), table, scans=scanned)
        block_d = 64 if dim <= 64 else 128
        layout = gl.NVMMASharedLayout(128, 16, 4)

        def tile(x: TensorSpec, rows: int) -> Descriptor:
            return tile_descriptor(x, rows, layout, block_d)

        out = fresh(query)
        works = blocks * batch * heads
        launches.append(Launch(
            attend_kernel, (min(works, num_ctas or num_sms(query.device)),),
            (
                Slot(QUERY, tile(query, ROWS)), Slot(KEY, tile(key, BLOCK_N)), Slot(VALUE, tile(value, BLOCK_N)),
                Slot(VALUE, tile(value, ROWS)), Slot(OUT, tile(out, ROWS)),
                Slot(CORE, tile(out, ROWS)) if keeps_core else None, slot_of(gate, GATE),
                slot_of(alpha, ALPHA), slot_of(beta, BETA), slot_of(sink, SINK), table, lse, marks,
                rule,
                *(None if x is None else x.stride() for x in (alpha, beta, gate)),
                table_length, call.softmax_scale * LOG2E.value,
                works, heads, key.shape[1], batch * heads, query_section(query, key),
                CONSUMERS, BLOCK_N, dim, block_d, block_of(dim), STAGES, shift, scanned,
                *REGISTERS,
            ),
            num_warps=4,
        ))  # fmt: skip
        self.launches = LaunchSet({"forward": launches}, self.state)

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """`inputs` are query, key, value, alpha, beta, sink and gate."""
        out = self.new_out()
        core = None if self.new_core is None else self.new_core()
        state = self.state.new()
        values = self.launches.values((*inputs, out, core), state)
        self.launches.run("forward", values, self.device)
        return out, core, None, state
