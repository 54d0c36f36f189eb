"""The forward on Hopper in one warp-specialised Gluon kernel, for plain and ranged visibility."""

from __future__ import annotations

from torch import Tensor

from ...call import CallSpec, TensorSpec
from ..shared import value_sums
from ..shared.allocation import like
from ..shared.descriptors import query_section, tile_descriptor
from ..shared.launch import Descriptor, Launch, LaunchSet, Slot
from ..shared.limits import limit_arrays, limit_launches, query_ranges
from ..shared.rule import make_rule
from ..shared.tile_functions import LOG2E
from ..shared.value_sums import block_of
from ..shared.workspace import Workspace
from .backward import fresh, is_plain_causal, num_sms
from .forward import slot_of, state_arrays, state_slots

CONSUMERS, ROWS = 2, 64  # warp groups of a CTA, and queries of each
BLOCK_N, STAGES = 128, 2
# Registers of a thread of a consumer and of the other warps, without and with warps that check values.
REGISTERS = {False: (240, 24), True: (232, 40)}
TAKES_TURNS = True
HEAD_DIMS = range(40, 129, 8)
(QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, QUERY_SEGMENTS, KEY_SEGMENTS, KEY_MASK, OUT, CORE, NUM_TENSORS) = range(13)


class GluonForward:
    """Returns (out, O or None, None, state). The state holds lse, the table of sums, the marks and the limits.

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
        self.state = Workspace(state_arrays(call, True, keeps_marks) | limit_arrays(call.visibility), query.device)
        lse, table, marks = state_slots(self.state, NUM_TENSORS)
        tensors = (Slot(QUERY_SEGMENTS), Slot(KEY_SEGMENTS), Slot(KEY_MASK))
        rule = make_rule(call.visibility, tensors, lambda name: Slot(NUM_TENSORS + self.state.index(name)))
        after = NUM_TENSORS + len(self.state.arrays)
        blocks = -(-length // (CONSUMERS * ROWS))
        configs = [(blocks, CONSUMERS * ROWS, BLOCK_N), (blocks * CONSUMERS, ROWS, ROWS)]
        arrays, launches = query_ranges(rule, batch, configs, after)
        self.workspace = Workspace(arrays, query.device)
        launches = [*limit_launches(rule, batch), *launches]
        checks = rule.back is not None or rule.limits is not None
        table_length = 0 if beta is None else value_sums.table_shape(value.shape)[2]
        # The backward reads the table as well, and has prefix sums for plain causal calls only.
        scanned = is_plain_causal(call) and value_sums.is_scanned(table_length, query.numel())
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
                Slot(after) if arrays else None, Slot(after + 1) if arrays else None, rule,
                *(None if x is None else x.stride() for x in (alpha, beta, gate)),
                table_length, call.softmax_scale * LOG2E.value,
                works, heads, key.shape[1], batch * heads, query_section(query, key),
                CONSUMERS, BLOCK_N, dim, block_d, block_of(dim), STAGES, shift, scanned,
                checks, TAKES_TURNS, *REGISTERS[checks],
            ),
            num_warps=4,
        ))  # fmt: skip
        self.launches = LaunchSet({"forward": launches}, self.state, self.workspace)

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """`inputs` are those of `inputs_of`."""
        out = self.new_out()
        core = None if self.new_core is None else self.new_core()
        state = self.state.new()
        values = self.launches.values((*inputs, out, core), state, self.workspace.new())
        self.launches.run("forward", values, self.device)
        return out, core, None, state
