"""F9 to F11 of ops/finish.py and their gradients, one kernel each: exclusion, norm and gate of the rows of attention.

Both kernels are memory-bound: every [B, H, T, D] tensor is read and written once. Row quantities are fp32; there are no
atomics. A part that a call does not have is a pointer that is None, which is compiled away. Outputs have the layout of
the tensors that they belong to, the gradient of y has that of grad_out: in a model, heads next to channels, so that no
later view is a copy.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import on_device
from .shared.launch import launch_kernel
from .shared.value_sums import padded

TILE, BACKWARD_TILE = 4096, 2048  # elements of a row tile; the backward has twice as many tiles in registers
ROWS = 128  # of a program of the backward without an exclusion: its sums for the norm's weight are one row of `partial`
NUM_WARPS = 4
EMPTY = tl.constexpr(2)  # the mark of a row that sees no key; other marks: the own key is invisible
TINY = tl.constexpr(2.0**-126)
# Triton would compile a variant for lengths that are 1 or multiples of 16. Of strides it must know, for vector loads.
NUMBERS = ["num_queries", "heads", "number", "norm_eps"]


def finish_forward(
    y: Tensor, own: Tensor | None, gamma: Tensor | None, weight: Tensor | None, gate: Tensor | None,
    marks: Tensor | None, number: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    """The output [B, H, T, D] in the dtype and layout of y."""
    y, own, weight, gate = (_packed(x) for x in (y, own, weight, gate))  # type: ignore[assignment]
    out = torch.empty_like(y)
    batch, heads, length, dim = y.shape
    block = _block(dim, TILE)
    repeats = 1 if own is None else heads // own.shape[1]
    inputs = (y, own, gamma, weight, gate, _spread(marks, y))
    _launch(
        finish_kernel, batch * heads * -(-length // block), (*inputs, out),
        (*_strides(*inputs), *out.stride()[:3], length, heads, number, norm_eps, repeats, dim, block, padded(dim)),
    )  # fmt: skip
    return out


def finish_backward(
    grad_out: Tensor, y: Tensor, own: Tensor | None, gamma: Tensor | None, weight: Tensor | None, gate: Tensor | None,
    marks: Tensor | None, number: float, norm_eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of y, own, gamma, weight and gate; None for those that are not given.

    The gradient of y has the layout of grad_out: attention's backward receives what it would receive without a finish.
    """
    grad_out, y, own, weight, gate = (_packed(x) for x in (grad_out, y, own, weight, gate))  # type: ignore[assignment]
    batch, heads, length, dim = y.shape
    block = _block(dim, BACKWARD_TILE)
    groups = heads if own is None else own.shape[1]
    # The sums of the own values' gradients over a group need the registers that sums over row blocks would use.
    steps = max(1, min(ROWS, length) // block) if own is None else 1
    programs = -(-length // (block * steps))
    grads = [None if x is None else torch.empty_like(x) for x in (grad_out, own, gate)]
    grad_gamma = None if gamma is None else torch.empty(gamma.shape, dtype=gamma.dtype, device=y.device)
    partial = None
    if weight is not None:
        partial = torch.empty((batch * programs, heads, dim), dtype=torch.float32, device=y.device)
    inputs = (y, own, gamma, weight, gate, _spread(marks, y))
    _launch(
        finish_backward_kernel, batch * groups * programs, (grad_out, *inputs, *grads, grad_gamma, partial),
        (*grad_out.stride()[:3], *_strides(*inputs), *(n for grad in grads for n in _row_strides(grad)), length, heads,
         number, norm_eps, heads // groups, steps, dim, block, padded(dim)),
    )  # fmt: skip
    grad_weight = None
    if partial is not None and weight is not None:
        grad_weight = partial.sum(0 if weight.dim() == 2 else (0, 1)).to(weight.dtype)
    return *grads[:2], grad_gamma, grad_weight, grads[2]


def _launch(kernel, programs: int, tensors, numbers) -> None:
    launch = functools.partial(launch_kernel, kernel, (programs,), tensors, numbers, num_warps=NUM_WARPS)
    on_device(tensors[0].get_device(), launch)


def _block(dim: int, tile: int) -> int:
    return max(1, tile // padded(dim))


def _packed(x: Tensor | None) -> Tensor | None:
    """A copy where the last dimension is strided: the kernels read contiguous rows."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _spread(marks: Tensor | None, y: Tensor) -> Tensor | None:
    """The marks with a stride of 0 along the dimensions that they do not have."""
    return None if marks is None else marks.expand(y.shape[:3])


def _strides(y, own, gamma, weight, gate, marks) -> tuple[int, ...]:
    of_weight = 0 if weight is None or weight.dim() == 1 else weight.stride(0)
    before, after = ([n for x in each for n in _row_strides(x)] for each in ((y, own, gamma), (gate, marks)))
    return *before, of_weight, *after


def _row_strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


@triton.jit
def _load_marks(marks, rows, row_ok, marks_t):
    """(the own key is visible, some key is visible) of some rows."""
    sees_own = row_ok
    sees_some = row_ok
    if marks is not None:
        mark = tl.load(marks + rows * marks_t, mask=row_ok, other=EMPTY)
        sees_own = mark == 0
        sees_some = mark != EMPTY
    return sees_own, sees_some


@triton.jit
def _load_own(own, rows, cols, ok, own_t, sees_own):
    """(u, 1 / |u|^2, 1 / largest): the own values divided by their largest element, so that no square overflows."""
    v = tl.load(own + (rows[:, None] * own_t + cols[None, :]), mask=ok & sees_own[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(v), 1), TINY)
    u = v / largest[:, None]
    square = tl.sum(u * u, 1)
    return u, tl.where(square > 0.0, 1.0 / square, 0.0), 1.0 / largest


@triton.jit
def _load_weight(weight, cols, col_ok):
    """The norm's weights of one head as [1, BLOCK_D]."""
    return tl.load(weight + cols, mask=col_ok, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=NUMBERS)
def finish_kernel(
    y, own, gamma, weight, gate, marks, out,
    y_b, y_h, y_t, own_b, own_g, own_t, gamma_b, gamma_h, gamma_t, weight_h, gate_b, gate_h, gate_t,
    marks_b, marks_h, marks_t, out_b, out_h, out_t, num_queries, heads, number, norm_eps,
    REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """F9 to F11. One program owns BLOCK rows of one head; writes out. `number` is gamma where the pointer is None."""
    blocks = tl.cdiv(num_queries, BLOCK)
    slot = tl.program_id(0) // blocks
    batch, head = (slot // heads).to(tl.int64), (slot % heads).to(tl.int64)
    # 64-bit base offsets, 32-bit offsets inside the tile: half the registers of 64-bit offsets throughout.
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    row_ok = first + rows < num_queries
    ok = row_ok[:, None] & (cols < HEAD_DIM)[None, :]
    if marks is not None:
        marks += batch * marks_b + head * marks_h + first * marks_t
    sees_own, sees_some = _load_marks(marks, rows, row_ok, marks_t)

    y += batch * y_b + head * y_h + first * y_t
    x = tl.load(y + (rows[:, None] * y_t + cols[None, :]), mask=ok, other=0.0).to(tl.float32)
    if own is not None:
        own += batch * own_b + head // REPEATS * own_g + first * own_t
        u, inverse, _ = _load_own(own, rows, cols, ok, own_t, sees_own)
        share = tl.sum(x * u, 1) * inverse
        if gamma is not None:
            at = gamma + (batch * gamma_b + head * gamma_h + first * gamma_t) + rows * gamma_t
            share *= tl.load(at, mask=sees_own & row_ok, other=0.0).to(tl.float32)
        else:
            share *= number
        x -= share[:, None] * u
    if weight is not None:
        x *= tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + norm_eps)[:, None]
        x *= _load_weight(weight + head * weight_h, cols, cols < HEAD_DIM)
    if gate is not None:
        gate += batch * gate_b + head * gate_h + first * gate_t
        x *= tl.load(gate + (rows[:, None] * gate_t + cols[None, :]), mask=ok & sees_some[:, None], other=0.0).to(
            tl.float32
        )
    out += batch * out_b + head * out_h + first * out_t
    tl.store(out + (rows[:, None] * out_t + cols[None, :]), x.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=NUMBERS)
def finish_backward_kernel(
    grad_out, y, own, gamma, weight, gate, marks, grad_y, grad_own, grad_gate, grad_gamma, partial,
    grad_b, grad_h, grad_t, y_b, y_h, y_t, own_b, own_g, own_t, gamma_b, gamma_h, gamma_t, weight_h,
    gate_b, gate_h, gate_t, marks_b, marks_h, marks_t, grad_y_b, grad_y_h, grad_y_t, grad_own_b, grad_own_g, grad_own_t,
    grad_gate_b, grad_gate_h, grad_gate_t, num_queries, heads, number, norm_eps,
    REPEATS: tl.constexpr, STEPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """B9 to B11. One program owns BLOCK rows of the REPEATS heads of a group, or STEPS x BLOCK rows of one head.

    Writes grad_y, grad_gamma and grad_gate of each head, grad_own summed over the heads, and the sums of its rows for
    the gradient of the norm's weight: partial [B x row programs, H, D]. grad_gamma is contiguous.
    """
    tl.static_assert(REPEATS == 1 or STEPS == 1)
    row_programs = tl.cdiv(num_queries, BLOCK * STEPS)
    row_program = tl.program_id(0) % row_programs
    slot = tl.program_id(0) // row_programs
    groups = heads // REPEATS
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    col_ok = cols < HEAD_DIM
    of_own = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    of_weight = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    if weight is not None:
        row_weight = _load_weight(weight + group * REPEATS * weight_h, cols, col_ok)
        sums = partial + ((batch * row_programs + row_program) * heads + group * REPEATS) * HEAD_DIM + cols
    first = row_program.to(tl.int64) * (BLOCK * STEPS)
    own_base = own
    if own is not None:
        own_base = own + (batch * own_b + group * own_g + first * own_t)
        if marks is None:
            row_ok = first + rows < num_queries
            u, inverse, per_largest = _load_own(own_base, rows, cols, row_ok[:, None] & col_ok[None, :], own_t, row_ok)
    # Pipelined through shared memory: without it the compiler loads grad_out after the first reduction.
    for turn in tl.range(REPEATS * STEPS, num_stages=3):
        head = group * REPEATS + turn // STEPS
        start = first + turn % STEPS * BLOCK
        row_ok = start + rows < num_queries
        ok = row_ok[:, None] & col_ok[None, :]
        of_head = marks
        if marks is not None:
            of_head = marks + batch * marks_b + head * marks_h + start * marks_t
        sees_own, sees_some = _load_marks(of_head, rows, row_ok, marks_t)
        seen = ok & sees_some[:, None]
        y_base = y + (batch * y_b + head * y_h + start * y_t)
        row_y = tl.load(y_base + (rows[:, None] * y_t + cols[None, :]), mask=ok, other=0.0).to(tl.float32)
        grad_base = grad_out + (batch * grad_b + head * grad_h + start * grad_t)
        grad = tl.load(grad_base + (rows[:, None] * grad_t + cols[None, :]), mask=seen, other=0.0).to(tl.float32)
        if weight is not None and REPEATS > 1:
            row_weight = _load_weight(weight + head * weight_h, cols, col_ok)
        if gate is not None:
            gate_base = gate + (batch * gate_b + head * gate_h + start * gate_t)
            row_gate = tl.load(gate_base + (rows[:, None] * gate_t + cols[None, :]), mask=seen, other=0.0)
        x = row_y
        if own is not None:
            if marks is not None:  # they may differ between the heads of the group
                u, inverse, per_largest = _load_own(own_base, rows, cols, ok, own_t, sees_own)
            share = tl.sum(x * u, 1) * inverse
            row_gamma = tl.zeros([BLOCK], tl.float32) + number
            if gamma is not None:
                gamma_at = gamma + (batch * gamma_b + head * gamma_h + start * gamma_t) + rows * gamma_t
                row_gamma = tl.load(gamma_at, mask=sees_own & row_ok, other=0.0).to(tl.float32)
            x = row_y - (row_gamma * share)[:, None] * u
        z = x
        if weight is not None:
            row_scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + norm_eps)
            x *= row_scale[:, None]
            z = x * row_weight
        if gate is not None:
            at = grad_gate + (batch * grad_gate_b + head * grad_gate_h + start * grad_gate_t)
            at = at + (rows[:, None] * grad_gate_t + cols[None, :])
            tl.store(at, (grad * z).to(grad_gate.dtype.element_ty), mask=ok)
            grad *= row_gate.to(tl.float32)
        if weight is not None:
            of_weight += grad * x
            grad *= row_weight
            grad = row_scale[:, None] * (grad - x * (tl.sum(grad * x, 1) / HEAD_DIM)[:, None])
            if REPEATS > 1:
                tl.store(sums + turn * HEAD_DIM, tl.sum(of_weight, 0), mask=col_ok)
                of_weight = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        if own is not None:
            along = tl.sum(grad * u, 1)
            if gamma is not None:
                at = grad_gamma + ((batch * heads + head) * num_queries + start) + rows
                tl.store(at, (-share * along).to(grad_gamma.dtype.element_ty), mask=row_ok)
            along *= inverse
            of_u = share[:, None] * grad + along[:, None] * (row_y - 2.0 * share[:, None] * u)
            of_own -= (row_gamma * per_largest)[:, None] * of_u
            grad -= (row_gamma * along)[:, None] * u
        at = grad_y + (batch * grad_y_b + head * grad_y_h + start * grad_y_t)
        tl.store(at + (rows[:, None] * grad_y_t + cols[None, :]), grad.to(grad_y.dtype.element_ty), mask=ok)
    if weight is not None and REPEATS == 1:
        tl.store(sums, tl.sum(of_weight, 0), mask=col_ok)
    if own is not None:
        row_ok = first + rows < num_queries
        at = grad_own + (batch * grad_own_b + group * grad_own_g + first * grad_own_t)
        at = at + (rows[:, None] * grad_own_t + cols[None, :])
        tl.store(at, of_own.to(grad_own.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])
