"""The forward of plain causal calls in one Triton kernel on Hopper: sink, alpha, beta and gate in its epilogue.

The sums of v that beta needs are computed by one or two small kernels before it. With programmatic dependent launch it
starts before they have finished, and waits only before it reads their table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import CallSpec, TensorSpec
from ..projection import ProjectionSpec, forward_launch
from ..shared import value_sums
from ..shared.allocation import like
from ..shared.descriptors import query_section, tile_descriptor
from ..shared.launch import Launch, LaunchSet, Slot
from ..shared.tile_functions import LOG2E
from ..shared.tile_sizes import Config
from ..shared.value_sums import block_of, padded
from ..shared.workspace import Arrays, Workspace
from .forward_kernels import causal_kernel

# Measured on an H200. Up to head dim 64: three CTAs per SM, so that one CTA's softmax overlaps the MMAs of the others.
NARROW, WIDE = Config(64, 128, 4, 2, 168), Config(64, 64, 4, 3)
INTERPRETER = Config(64, 128, 4, 1)
FEW_CTAS = 264  # two per SM of an H200
# The tensors of a call, in the order of the slots; the last three with a projection only. The state's arrays follow.
(QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, OUT, CORE, HIDDEN, WEIGHT, RUNNING) = range(12)


def tile_sizes(dim: int, device: torch.device) -> Config:
    if device.type == "cpu":
        return INTERPRETER
    return NARROW if dim <= 64 else WIDE


class HopperForward:
    """Returns (out, O or None, None, state) for causal calls. The state holds lse, the table of sums and the marks.

    Args:
        call: the first call with a signature; all its calls have the same shapes, strides and dtypes.
        keeps_core: O is written in addition to the output.
        keeps_marks: rows of the output in which O is lost to cancellation are marked.
        shift: lse - log(alpha) is written instead of lse (B7).
        projection: alpha and beta are computed here from hidden states, and saved in the state with the scores.
    """

    def __init__(
        self,
        call: CallSpec,
        *,
        keeps_core: bool,
        keeps_marks: bool,
        shift: bool,
        projection: ProjectionSpec | None = None,
    ):
        query, key, value, (alpha, beta, sink, gate) = call[:4]
        batch, heads, length, dim = query.shape
        self.device, self.new_out = query.get_device(), like(query)
        self.new_core = self.new_out if keeps_core else None
        arrays = state_arrays(call, True, keeps_marks)
        first = CORE + 1
        if projection is not None:
            arrays, first = arrays | projection.row_arrays, RUNNING + 1
        self.state = Workspace(arrays, query.device)
        lse, table, marks = state_slots(self.state, first)
        alpha_slot, beta_slot = slot_of(alpha, ALPHA), slot_of(beta, BETA)
        sizes = tile_sizes(dim, query.device)
        out_strides = query.fresh_strides
        table_length = 0 if beta is None else value_sums.table_shape(value.shape)[2]
        scanned = value_sums.is_scanned(table_length, query.numel())
        rows, wide = sizes.block_m, sizes.block_n
        # With few CTAs, computing the sums by MMAs in this kernel costs less than a launch.
        sums_here = beta is not None and not scanned and -(-length // rows) * batch * heads <= FEW_CTAS
        early = beta is not None and not sums_here and query.is_cuda
        launches: list[Launch] = []
        if projection is not None:
            kept = {name: Slot(first + self.state.index(name)) for name in projection.row_arrays}
            alpha_slot, beta_slot = kept["alpha"], kept.get("beta")
            running = None if beta is None else Slot(RUNNING)
            launches.append(
                forward_launch(projection, Slot(HIDDEN), Slot(WEIGHT), running, kept["scores"], alpha_slot, beta_slot)
            )
        if beta is not None and not sums_here:
            assert isinstance(table, Slot)
            launches += value_sums.sum_launches(
                value.shape, value.stride(), Slot(VALUE), table, scans=scanned, early=early
            )
        launches.append(Launch(
            causal_kernel, (-(-length // rows) * batch * heads,),
            (
                Slot(QUERY, tile_descriptor(query, rows)),
                Slot(KEY, tile_descriptor(key, wide)), Slot(VALUE, tile_descriptor(value, wide)),
                Slot(KEY, tile_descriptor(key, rows)), Slot(VALUE, tile_descriptor(value, rows)),
                None if gate is None else Slot(GATE, tile_descriptor(gate, rows)),
                alpha_slot, beta_slot, slot_of(sink, SINK), table, Slot(OUT),
                Slot(CORE) if keeps_core else None, lse, marks,
                None if alpha is None else alpha.stride(), None if beta is None else beta.stride(), out_strides,
                length, table_length, call.softmax_scale * LOG2E.value, heads, key.shape[1], batch * heads,
                query_section(query, key), rows, wide, block_of(dim), dim, padded(dim), shift, scanned,
                sums_here, early,
            ),
            **(sizes._replace(maxnreg=None) if sums_here else sizes).options, **({"launch_pdl": True} if early else {}),
        ))  # fmt: skip
        self.launches = LaunchSet({"forward": launches}, self.state)

    def __call__(
        self, *inputs: Tensor | None, projected: tuple[Tensor | None, ...] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """`inputs` are query, key, value, alpha, beta, sink and gate; `projected` hidden, weight and running_alpha."""
        out = self.new_out()
        core = None if self.new_core is None else self.new_core()
        state = self.state.new()
        self.launches.run("forward", self.launches.values((*inputs, out, core, *projected), state), self.device)
        return out, core, None, state


def slot_of(x: TensorSpec | None, index: int) -> Slot | None:
    return None if x is None else Slot(index)


def state_arrays(call: CallSpec, with_lse: bool, with_marks: bool) -> Arrays:
    """The arrays of a forward's state: lse [B, H, T], the table of the sums of v, the marks [B, H, T]."""
    shape = call.query.shape[:3]
    arrays: Arrays = {}
    if with_lse:
        arrays["lse"] = (shape, torch.float32)
    if call.rows.beta is not None:
        arrays["table"] = (value_sums.table_shape(call.value.shape), torch.float32)
    if with_marks:
        arrays["marks"] = (shape, torch.int8)
    return arrays


def state_slots(state: Workspace, first: int) -> tuple[Slot | None, Slot | None, Slot | None]:
    """The slots of lse, table and marks if the state starts at slot `first`; None for arrays that it does not hold."""
    lse, table, marks = (
        Slot(first + state.index(name)) if name in state.arrays else None for name in ("lse", "table", "marks")
    )
    return lse, table, marks
