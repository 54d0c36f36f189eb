"""Turns the gradient of the output into those of every input: cuDNN's backward between two passes, or a kernel of ours.

One pass over dOut and O (B1 to B5 of cudnn_kernels.py), beside cuDNN's backward where alpha >= 0 is promised and before
it otherwise, and one over dV (B6); or the first pass (B7), over the output in O's place where O was not kept (B8), and
the kernel of alone_backward.py. cuDNN's backward takes `out` and `logsumexp` as inputs, so the pair with sink and alpha
inside gives exact gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sdpa import CpuFlash
from . import on_device, sum_table
from .alone_backward import backwards_alone, input_gradients, new_row_numbers
from .cudnn_kernels import add_later_kernel, prologue_kernel
from .faint import parts_of, regain
from .launch import packed_rows, strides_of
from .relaunch import relaunch
from .side import Side
from .sum_table import block_of, padded, warps_of

# The interpreter has no CUDA: there the CPU kernel stands in cuDNN's place, so that the whole route can be tested.
STAND_IN = CpuFlash("cpu_flash")
# Of a tile, to a thread; measured on an H200: several 16-byte loads under way. More where a pass has the GPU to itself,
# but not with a gate, whose tiles then find no registers.
ELEMENTS, ELEMENTS_ALONE = 32, 64
# The pass waits for cuDNN's main kernel to begin: it stands behind one that reads dOut and O.
PAUSE, BYTES_A_CYCLE = 10_000, 500


def shifts_alpha(alpha: Tensor | None, gate: Tensor | None, nonnegative_alpha: bool, has_marks: bool) -> bool:
    """Whether alpha goes to the backward inside lse (B5): the forward's pass puts it there. B8 wants lse as it is."""
    return alpha is not None and gate is None and nonnegative_alpha and not has_marks


@on_device
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    core: Tensor,
    lse: Tensor,
    table: Tensor,
    marks: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    nonnegative_alpha: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, alpha, beta, sink and gate; an absent input's is empty.

    lse holds the sink already: `sink` is given only where its own gradient is wanted. `core` is O; where `marks` is not
    empty it is the output, with these rows marked as faint.
    """
    batch, heads, num_queries, dim = query.shape
    groups, num_keys = key.shape[1:3]
    repeats, block = heads // groups, block_of(dim)
    blocks, key_blocks = -(-num_queries // block), -(-num_keys // block)
    grad_out = packed_rows(grad_out)
    has_marks = marks.numel() > 0
    shift = shifts_alpha(alpha, gate, nonnegative_alpha, has_marks)
    grad_alpha, grad_beta, grad_sink, grad_gate = row_gradients(query, alpha, beta, sink, gate)
    alone = has_marks or backwards_alone(query, key, is_causal, softmax_scale)
    row_numbers = new_row_numbers(query) if alone else None
    # cuDNN copies a gradient whose strides differ from out's: then the prologue may as well write it (B5).
    same_sign = shift or alpha is None or (alone and nonnegative_alpha)
    as_it_is = gate is None and same_sign and (alone or grad_out.stride() == core.stride())
    grad_core = None if as_it_is else torch.empty_like(core)
    num_parts = blocks + (parts_of(num_queries) if has_marks else 0)
    parts = None if sink is None else lse.new_empty(batch, heads, num_parts)
    weighted = weighted_table = None
    if beta is not None:
        weighted_table = lse.new_empty(batch, groups, blocks + 1, dim)
        if is_causal and repeats > 1 and not alone:
            # bf16 has the range of fp32; fp16 would lose small beta * E altogether.
            dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
            weighted = torch.empty(batch, groups, num_queries, dim, dtype=dtype, device=query.device)

    def run_prologue() -> None:
        relaunch(
            prologue_kernel, (batch * groups * blocks,),
            (
                grad_out, core, lse, marks if has_marks else None, value, table, alpha, beta, sink, gate,
                grad_core, None if alpha is None else grad_alpha, None if beta is None else grad_beta,
                None if gate is None else grad_gate, parts, weighted, weighted_table, row_numbers,
            ),
            (
                *grad_out.stride()[:3], *core.stride()[:3], *lse.stride()[:3], *value.stride()[:3],
                *strides_of(alpha), *strides_of(beta), *strides_of(gate),
                *strides_of(None if gate is None else grad_gate), num_queries, blocks, key_blocks, heads, softmax_scale,
                0 if row_numbers is None else row_numbers.shape[-1], num_parts,
                repeats, shift, is_causal, dim, block, padded(dim),
            ),
            num_warps=warps_of(dim, ELEMENTS_ALONE if alone and gate is None else ELEMENTS),
        )  # fmt: skip
        if weighted_table is not None:
            sum_table.scan(weighted_table)

    side = Side(query)
    if row_numbers is not None and has_marks:
        # Products here, memory there: side by side.
        regain(
            grad_out, query, key, value, lse, alpha, sink, marks, softmax_scale,
            grad_alpha=None if alpha is None else grad_alpha, row_numbers=row_numbers, sink_parts=parts,
            signed=not nonnegative_alpha,
        )  # fmt: skip
        side.run(run_prologue, PAUSE)
        side.join()
    elif alone or grad_core is not None:
        run_prologue()  # what follows waits for what it writes
    inner_grad = grad_out if grad_core is None else grad_core
    if row_numbers is not None:
        grad_query, grad_key, grad_value = input_gradients(
            inner_grad, query, key, value, row_numbers, weighted_table, softmax_scale, beside_o=gate is not None
        )
    else:
        grad_query, grad_key, grad_value = attend_backward(
            inner_grad, query, key, value, core, lse, is_causal, softmax_scale
        )
        if grad_core is None and (alpha is not None or beta is not None or sink is not None):
            side.run(run_prologue, PAUSE + 2 * query.numel() * query.element_size() // BYTES_A_CYCLE)
        side.join()
    if sink is not None and parts is not None:
        grad_sink = parts.sum((0, 2)).to(sink.dtype)
    if weighted_table is not None and not alone:
        if weighted is None:
            _add_later(grad_value, grad_out, weighted_table, beta, gate, is_causal)
        else:
            _add_later(grad_value, weighted, weighted_table, None, None, is_causal)
    return grad_query, grad_key, grad_value, grad_alpha, grad_beta, grad_sink, grad_gate


def _add_later(
    grad_value: Tensor, source: Tensor, table: Tensor, beta: Tensor | None, gate: Tensor | None, is_causal: bool
) -> None:
    """B6, last step, in place. `source` is the sum of beta E over a group's heads, or dOut with `beta` and `gate`."""
    groups, num_keys, dim = grad_value.shape[1:]
    block, blocks = block_of(dim), table.shape[2] - 1
    key_blocks = -(-num_keys // block)
    relaunch(
        add_later_kernel, (grad_value.shape[0] * groups * key_blocks,),
        (grad_value, source, beta, gate, table),
        (
            *grad_value.stride()[:3], *source.stride()[:3], *strides_of(beta), *strides_of(gate),
            num_keys, key_blocks, blocks, groups, is_causal, dim, block, padded(dim),
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
    """dQ, dK, dV of plain attention, from an O and an lse that may hold more."""
    if query.device.type == "cpu":
        return STAND_IN.backward(grad, query, key, value, core, lse, None, None, is_causal, softmax_scale)
    # Without dropout the seed is not read; two scalars are cheaper than two more outputs of the forward.
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, core, lse, seed, seed, None, None, None, query.shape[2], key.shape[2],
        0.0, is_causal, scale=softmax_scale,
    )  # fmt: skip


def row_gradients(
    query: Tensor, alpha: Tensor | None, beta: Tensor | None, sink: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unwritten gradients of alpha, beta, sink and gate, empty where the input is absent."""

    def contiguous(x: Tensor | None) -> Tensor:
        return query.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    grad_gate = query.new_empty(0) if gate is None else torch.empty_like(gate)
    return contiguous(alpha), contiguous(beta), contiguous(sink), grad_gate
