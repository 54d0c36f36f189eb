"""The backward on Hopper: dQ, dK and dV in one Gluon kernel, after the row gradients.

The kernel runs five MMAs per tile and adds the beta term to dV. dQ is accumulated in fp32 in global memory, in no fixed
order unless `ordered`, and converted at the end. If O was not saved in addition to the output, rows in which O is lost
to cancellation are recomputed first (recompute.py), on the current stream, while the row gradients of the others run on
a side stream.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from ...call import CallSpec, TensorSpec
from ..projection import ProjectionSpec, backward_launches
from ..shared import row_sums, value_sums
from ..shared.allocation import Allocate, contiguous, like
from ..shared.descriptors import tile_descriptor
from ..shared.launch import ALIGNMENT, Descriptor, Launch, LaunchSet, Slot
from ..shared.limits import key_ranges
from ..shared.prologue import prologue_kernel
from ..shared.rule import make_rule
from ..shared.side_stream import START_CYCLES, SideStream
from ..shared.tile_functions import LOG2E, Rule
from ..shared.tile_sizes import Config
from ..shared.value_sums import block_of, padded, warps_of
from ..shared.workspace import Arrays, Workspace
from . import recompute
from .forward import slot_of, state_slots

HEAD_DIMS = range(40, 129, 8)  # below 40, tiles of 64 columns are mostly padding
# Gluon is experimental: these are the versions whose compiled kernel was measured and has no register spills.
TRITON_VERSIONS = ((3, 6), (3, 7))
ROW_UNIT = ALIGNMENT // 4
# Measured on an H200: tiles of 128 queries if their scores fit into registers. Shared memory allows one CTA per SM.
NARROW, WIDE = Config(128, 128, 8, 3), Config(64, 128, 8, 3)
# Elements of a tile per thread in the prologue; with a gate, more than ELEMENTS would spill registers.
ELEMENTS, ELEMENTS_WITHOUT_GATE = 32, 64
# The tensors of a call, in the order of the slots; the arrays of the state and the workspace follow.
(GRAD, CORE, QUERY, KEY, VALUE, ALPHA, BETA, SINK, GATE, QUERY_SEGMENTS, KEY_SEGMENTS, KEY_MASK, LSE, DQ, DK, DV,
 DALPHA, DBETA, DGATE, GRAD_CORE, SINK_PARTS, NUM_TENSORS) = range(22)  # fmt: skip
# The slots of a call with a projection, from the last one on.
HIDDEN, WEIGHT, TOKEN_MASK, DHIDDEN, DWEIGHT, DSUMS, NUM_PROJECTED = range(NUM_TENSORS, NUM_TENSORS + 7)


@functools.cache
def why_not_here() -> str | None:
    """The reason why this installation cannot run the kernel, or None if it can."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in TRITON_VERSIONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in TRITON_VERSIONS)
        return f"needs Triton {known}, got {triton.__version__}"
    try:
        from . import backward_kernels  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"needs the Gluon of Triton {version[0]}.{version[1]}: {error}"
    return None


@functools.cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class HopperBackward:
    """The gradients of query, key, value, alpha, beta, sink and gate, for calls with one signature.

    Args:
        call: the first call with a signature; all its calls have the same shapes, strides and dtypes.
        grad_out, core, lse: the tensors of the first backward; `lse` is None if the state holds it.
        state: the layout of the forward's state.
        shift: lse already includes log(alpha) (B7).
        halves: dQ is accumulated for one half of the heads at a time, to halve the memory of the sums.
        wants_sink: the gradient of the sink is needed.
        lse_in_log2: the state is that of the flash forward, which has lse in log2.
        ordered: the sums of dQ have a fixed order (plain causal calls only).
        projection: the state holds alpha and beta; their gradients continue to the hidden states and W_a here.
        wants: with a projection, the needed gradients: of hidden, of W_a, and the sums of alpha.
    """

    def __init__(
        self,
        call: CallSpec,
        grad_out: TensorSpec,
        core: TensorSpec,
        lse: TensorSpec | None,
        state: Workspace,
        *,
        shift: bool,
        halves: bool,
        wants_sink: bool,
        lse_in_log2: bool = False,
        ordered: bool = False,
        projection: ProjectionSpec | None = None,
        wants: tuple[bool, bool, bool] = (False, False, False),
    ):
        query, key, value, (alpha, beta, sink, gate) = call[:4]
        sink = sink if wants_sink else None
        self.call, self.device, self.has_marks = call, query.get_device(), "marks" in state.arrays
        self.state, self.projection, self.wants = state, projection, wants
        _, heads, length, dim = query.shape
        assert not ordered or is_plain_causal(call)
        self.lse_in_log2, self.ordered = lse_in_log2, ordered
        self.num_rows = 4 if is_plain_causal(call) else 8
        self.groups, self.dim, self.block = key.shape[1], dim, block_of(dim)
        self.blocks = -(-length // self.block)
        self.sizes = NARROW if dim <= 64 else WIDE
        self.block_d = 64 if dim <= 64 else 128
        self.parts = 2 if halves else 1
        # If alpha is not negative and there is no gate, the kernel reads dOut itself.
        self.makes_grad_core = gate is not None or not (alpha is None or shift or call.nonnegative_alpha)
        self.num_sink_parts = self.blocks + (recompute.num_parts(length) if self.has_marks else 0)
        arrays = self._arrays(query, beta)
        num_tensors = NUM_TENSORS if projection is None else NUM_PROJECTED
        self.rule: Rule | None = None
        self.key_ranges: Slot | None = None
        preparation: list[Launch] = []
        if not is_plain_causal(call):
            tensors = (Slot(QUERY_SEGMENTS), Slot(KEY_SEGMENTS), Slot(KEY_MASK))
            self.rule = make_rule(call.visibility, tensors, lambda name: Slot(num_tensors + state.index(name)))
            after = num_tensors + len(state.arrays) + len(arrays)
            more, self.key_ranges, preparation = key_ranges(self.rule, query.shape[0], self.sizes, after)
            arrays |= more
        self.workspace = Workspace(arrays, query.device)
        self.allocators = self._allocators(core, sink)
        slots = {name: Slot(num_tensors + n) for n, name in enumerate((*state.arrays, *self.workspace.arrays))}
        lse_slot, table, marks = state_slots(state, num_tensors)
        if "row_sums" in arrays:
            assert self.rule is not None
            table = slots["row_sums"]
            preparation += row_sums.row_sum_launches(value, Slot(VALUE), slots["sums"], table, self.rule)
        if projection is None:
            given = {"alpha": ALPHA, "beta": BETA, "grad_alpha": DALPHA, "grad_beta": DBETA}
            slots |= {name: Slot(at) for name, at in given.items()}
        if lse is not None:
            lse_slot = Slot(LSE)
        lse_strides = (heads * length, length, 1) if lse is None else tuple(lse.stride()[:3])
        prologue = [
            *preparation,
            self._prologue(grad_out, core, lse_slot, lse_strides, table, marks, slots, shift, sink),
        ]
        self.scanned = self.rule is None and value_sums.is_scanned(self.blocks + 1, query.numel())
        if beta is not None and self.scanned:
            prologue.append(value_sums.scan_launch(self._later_shape(), slots["later"]))
        groups = {"prologue": prologue, "gradients": self._gradients(grad_out, core, slots)}
        if projection is not None and any(wants):
            wanted = [Slot(at) if want else None for at, want in zip((DHIDDEN, DWEIGHT, DSUMS), wants, strict=True)]
            names = ("scores", None, "grad_alpha", "grad_beta")
            rows = [Slot(TOKEN_MASK) if name is None else slots.get(name) for name in names]
            groups["projection"] = backward_launches(
                projection, wants, [Slot(HIDDEN), Slot(WEIGHT), *rows, wanted[0]], slots, wanted[1], wanted[2]
            )
        if self.has_marks:
            groups["recompute"] = recompute.launches(
                call, grad_out, lse_slot, lse_strides, marks, slots, num_sink_parts=self.num_sink_parts,
                wants_sink=sink is not None,
            )  # fmt: skip
        self.launches = LaunchSet(groups, state, self.workspace)

    def __call__(
        self,
        grad_out: Tensor,
        core: Tensor,
        lse: Tensor | None,
        state: Tensor,
        *inputs: Tensor | None,
        projected: tuple[Tensor | None, ...] = (),
    ) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value, alpha, beta, sink and gate; `inputs` are those of `inputs_of`.

        With a projection, `projected` are hidden, weight and token_mask, and the gradients of hidden, W_a and the sums
        of alpha follow; alpha and beta have none.
        """
        # dQ, dK, dV, the gradients of alpha, beta and gate, E, the parts of the sink's gradient, and of the projection.
        new = [None if allocate is None else allocate() for allocate in self.allocators]
        buffer = self.workspace.new()
        values = self.launches.values((grad_out, core, *inputs, lse, *new[:8], *projected, *new[8:]), state, buffer)
        *grads, grad_alpha, grad_beta, grad_gate, _, parts = new[:8]
        if self.has_marks:
            side_stream = SideStream(grad_out.device)
            self.launches.run("recompute", values, self.device)
            # The pause lets the recomputation start first.
            side_stream.run(lambda: self.launches.run("prologue", values, self.device), START_CYCLES)
            side_stream.join()
        else:
            self.launches.run("prologue", values, self.device)
        self.launches.run("gradients", values, self.device)
        if self.projection is not None and any(self.wants):
            self.launches.run("projection", values, self.device)
        grad_sink = None if parts is None else parts.sum((0, 2)).to(inputs[5].dtype)  # type: ignore[union-attr]
        return *grads, grad_alpha, grad_beta, grad_sink, grad_gate, *new[8:]

    def _allocators(self, core: TensorSpec, sink: TensorSpec | None) -> list[Allocate | None]:
        query, key, value, (alpha, beta, _, gate) = self.call[:4]
        rows = [None if x is None else contiguous(x.shape, x.dtype, x.device) for x in (alpha, beta)]
        parts = (*query.shape[:2], self.num_sink_parts)
        projected: list[Allocate | None] = []
        if self.projection is not None:
            rows = [None, None]  # in the workspace
            shape, heads, dtype = self.projection[:3]
            outputs = ((shape, dtype), ((heads, shape[2]), dtype), ((heads + 1,), torch.float64))
            projected = [
                contiguous(*output, query.device) if want else None
                for output, want in zip(outputs, self.wants, strict=True)
            ]
        return [
            *(like(x) for x in (query, key, value)), *rows, None if gate is None else like(gate),
            like(core) if self.makes_grad_core else None,
            None if sink is None else contiguous(parts, torch.float32, query.device), *projected,
        ]  # fmt: skip

    def _arrays(self, query: TensorSpec, beta: TensorSpec | None) -> Arrays:
        batch, heads, length, _ = query.shape
        arrays: Arrays = {
            # -lse'/softmax_scale, -delta, beta, unused, and limits; T is padded to the alignment of a descriptor.
            "row_numbers": ((batch, heads, self.num_rows, -(-length // ROW_UNIT) * ROW_UNIT), torch.float32),
            "dq_sums": (self._sums_shape(batch, heads, length), torch.float32),
        }
        if beta is not None:
            arrays["later"] = (self._later_shape(), torch.float32)
            if not is_plain_causal(self.call):
                value = self.call.value
                arrays["sums"] = (value_sums.table_shape(value.shape, row_sums.BLOCK), torch.float32)
                arrays["row_sums"] = (row_sums.row_sums_shape(query.shape, value.shape), torch.float32)
        if self.projection is not None:
            rows = self.projection.row_arrays
            arrays |= {f"grad_{name}": rows[name] for name in ("alpha", "beta") if name in rows}
            arrays |= self.projection.partial_arrays(self.wants)
        if self.has_marks:
            arrays["listed"] = ((batch * heads, length), torch.int32)
            arrays["counts"] = ((batch * heads,), torch.int32)
        return arrays

    def _sums_shape(self, batch: int, heads: int, length: int) -> tuple[int, int]:
        """The sums of dQ by tile, and behind them, if they have a fixed order, a counter for each tile."""
        slots = -(-batch * self.groups // self.parts)
        tiles = slots * (heads // self.groups) * -(-length // self.sizes.block_m)
        counters = -(-tiles // ADDED) if self.ordered else 0
        return tiles * self.sizes.block_m * self.block_d // ADDED + counters, ADDED

    def _later_shape(self) -> tuple[int, int, int, int]:
        return self.call.query.shape[0], self.groups, self.blocks + 1, self.dim

    def _prologue(
        self, grad_out: TensorSpec, core: TensorSpec, lse: Slot | None, lse_strides: tuple[int, ...],
        table: Slot | None, marks: Slot | None, slots: dict[str, Slot], shift: bool, sink: TensorSpec | None,
    ) -> Launch:  # fmt: skip
        query, _, value, (alpha, beta, _, gate) = self.call[:4]
        batch, heads, length, dim = query.shape
        programs = batch * self.groups * self.blocks
        zeroed = math.prod(self.workspace.arrays["dq_sums"][0])
        elements = ELEMENTS_WITHOUT_GATE if gate is None else ELEMENTS
        grad_gate_strides = (0, 0, 0) if gate is None else gate.fresh_strides[:3]
        table_length = 0 if beta is None else value_sums.table_shape(value.shape)[2]
        return Launch(
            prologue_kernel, (programs,),
            (
                Slot(GRAD), Slot(CORE), lse, marks, Slot(VALUE), table,
                *(None if x is None else slots[name] for x, name in ((alpha, "alpha"), (beta, "beta"))),
                slot_of(sink, SINK), slot_of(gate, GATE), Slot(GRAD_CORE) if self.makes_grad_core else None,
                *(None if x is None else slots[name] for x, name in ((alpha, "grad_alpha"), (beta, "grad_beta"))),
                slot_of(gate, DGATE), slot_of(sink, SINK_PARTS), None, slots.get("later"),
                slots["row_numbers"], slots["dq_sums"], self.rule,
                *grad_out.stride()[:3], *core.stride()[:3], *lse_strides, *value.stride()[:3],
                *strides_of(alpha), *strides_of(beta), *strides_of(gate), *grad_gate_strides,
                length, self.blocks, max(table_length - 1, 0), heads, self.call.softmax_scale,
                self.workspace.arrays["row_numbers"][0][-1], self.num_sink_parts, zeroed,
                heads // self.groups, shift, True,
                self.rule is None and value_sums.is_scanned(table_length, query.numel()),
                dim, self.block, padded(dim), -(-zeroed // (programs * 1024)) * 1024, self.lse_in_log2,
                self.rule is not None,
            ),
            num_warps=warps_of(dim, elements),
        )  # fmt: skip

    def _gradients(self, grad_out: TensorSpec, core: TensorSpec, slots: dict[str, Slot]) -> list[Launch]:
        """The launches of the kernel and of the conversion of dQ, for each part of the heads."""
        from triton.experimental.gluon import language as gl

        from .backward_kernels import convert_kernel, gradients_kernel, zero_kernel

        query, key, value, (_, beta, _, _) = self.call[:4]
        (batch, heads, length, dim), num_keys = query.shape, key.shape[2]
        sizes, repeats, scale = self.sizes, heads // self.groups, self.call.softmax_scale
        tile = gl.NVMMASharedLayout(128, 16, 4)
        row_length = self.workspace.arrays["row_numbers"][0][-1]
        rows = Descriptor(
            (batch * heads, self.num_rows, length), (self.num_rows * row_length, row_length, 1),
            (1, self.num_rows, sizes.block_m),
            gl.NVMMASharedLayout(0, 32, 3),
        )  # fmt: skip
        sums_shape = self.workspace.arrays["dq_sums"][0]
        tile_rows = sizes.block_m * self.block_d // ADDED
        sums = Descriptor(sums_shape, (ADDED, 1), (tile_rows, ADDED), gl.NVMMASharedLayout(0, 32, 2))

        def describe(x: TensorSpec, length: int) -> Descriptor:
            return tile_descriptor(x, length, tile, self.block_d)

        inner = core if self.makes_grad_core else grad_out
        blocks, tiles, slots_in_all = -(-num_keys // sizes.block_n), -(-length // sizes.block_m), batch * self.groups
        # One wave of CTAs covers all blocks of a few heads, longest first: their queries stay in L2, and the CTAs end
        # at about the same time. Twice or half as many heads were up to 7 % slower.
        section = max(1, num_sms(query.device) // blocks)
        part = -(-slots_in_all // self.parts)
        dq_strides = query.fresh_strides
        launches = []
        for first in range(0, slots_in_all, part):
            here = min(part, slots_in_all - first)
            if first:
                size = math.prod(sums_shape)
                launches.append(Launch(zero_kernel, (-(-size // 8192),), (slots["dq_sums"], size, 8192), num_warps=8))
            launches.append(Launch(
                gradients_kernel, (blocks * here,),
                (
                    Slot(QUERY, describe(query, sizes.block_m)), Slot(KEY, describe(key, sizes.block_n)),
                    Slot(VALUE, describe(value, sizes.block_n)),
                    Slot(GRAD_CORE if self.makes_grad_core else GRAD, describe(inner, sizes.block_m)),
                    Slot(slots["row_numbers"].index, rows),
                    Slot(DK, describe(fresh(key), sizes.block_n)), Slot(DV, describe(fresh(value), sizes.block_n)),
                    Slot(slots["dq_sums"].index, sums),
                    slots["dq_sums"] if self.ordered else None, slots.get("later"),
                    self.key_ranges, self.rule,
                    scale, scale * LOG2E.value, num_keys, 0 if beta is None else self.blocks, first, heads, self.groups,
                    here, min(section, here), sizes.block_m, sizes.block_n, dim, self.block_d, self.block,
                    sizes.num_stages, self.scanned, self.rule is not None,
                ),
                num_warps=sizes.num_warps,
            ))  # fmt: skip
            launches.append(Launch(
                convert_kernel, (here * repeats * tiles,),
                (
                    slots["dq_sums"], Slot(DQ), dq_strides, scale, length, tiles, heads, first * repeats,
                    sizes.block_m, dim, self.block_d,
                ),
                num_warps=4,
            ))  # fmt: skip
        return launches


def is_plain_causal(call: CallSpec) -> bool:
    """Whether query i sees exactly the keys 0 to i."""
    seen = call.visibility
    return seen.is_causal and seen.window is None and seen.has_ranges_only and seen.offset == 0


def fresh(x: TensorSpec) -> TensorSpec:
    """The spec of a new tensor like x."""
    return TensorSpec(x.shape, x.fresh_strides, x.dtype, x.device)


ADDED = 256  # elements of dQ per row of its descriptor: the maximum of TMA


def strides_of(x: TensorSpec | None) -> tuple[Any, ...]:
    """The first three strides, or zeros for None."""
    return (0, 0, 0) if x is None else x.stride()[:3]
