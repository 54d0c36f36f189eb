"""F9 to F11 of ops/finish.py and their gradients, one kernel each: exclusion, norm and gate of the rows of attention.

Both kernels are memory-bound: every [B, H, T, D] tensor is read and written once. Row quantities are fp32; there are no
atomics. A part that a call does not have is a pointer that is None, which is compiled away.
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

TILE, BACKWARD_TILE = 2048, 1024  # elements of a row tile; the backward has twice as many tiles in registers
NUM_WARPS = 4
EMPTY = tl.constexpr(2)  # the mark of a row that sees no key; other marks: the own key is invisible
TINY = tl.constexpr(2.0**-126)
# Triton would compile a variant for lengths that are 1 or multiples of 16. Of strides it must know, for vector loads.
NUMBERS = ["num_queries", "heads", "number", "norm_eps"]


def finish_forward(
    y: Tensor, own: Tensor | None, gamma: Tensor | None, weight: Tensor | None, gate: Tensor | None,
    marks: Tensor | None, number: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    """The output, contiguous [B, H, T, D] in the dtype of y."""
    y, own, weight, gate = (_packed(x) for x in (y, own, weight, gate))  # type: ignore[assignment]
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    batch, heads, length, dim = y.shape
    block = _block(dim, TILE)
    repeats = 1 if own is None else heads // own.shape[1]
    inputs = (y, own, gamma, weight, gate, _spread(marks, y))
    _launch(
        finish_kernel, batch * heads * -(-length // block), (*inputs, out),
        (*_strides(*inputs), length, heads, number, norm_eps, repeats, dim, block, padded(dim)),
    )  # fmt: skip
    return out


def finish_backward(
    grad_out: Tensor, y: Tensor, own: Tensor | None, gamma: Tensor | None, weight: Tensor | None, gate: Tensor | None,
    marks: Tensor | None, number: float, norm_eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of y, own, gamma, weight and gate; None for those that are not given."""
    grad_out, y, own = (_packed(x) for x in (grad_out, y, own))  # type: ignore[assignment]
    batch, heads, length, dim = y.shape
    block = _block(dim, BACKWARD_TILE)
    blocks = -(-length // block)
    groups = heads if own is None else own.shape[1]
    grads = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=y.device) for x in (y, own, gamma, gate)]
    partial = None
    if weight is not None:
        partial = torch.empty((batch, heads, blocks, dim), dtype=torch.float32, device=y.device)
    inputs = (y, own, gamma, _packed(weight), _packed(gate), _spread(marks, y))
    _launch(
        finish_backward_kernel, batch * groups * blocks, (grad_out, *inputs, *grads, partial),
        (*grad_out.stride()[:3], *_strides(*inputs), length, heads, number, norm_eps, heads // groups, dim, block,
         padded(dim)),
    )  # fmt: skip
    grad_weight = None
    if partial is not None and weight is not None:
        grad_weight = partial.sum((0, 2) if weight.dim() == 2 else (0, 1, 2)).to(weight.dtype)
    return *grads[:3], grad_weight, grads[3]


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
    rows = [(0, 0, 0) if x is None else x.stride()[:3] for x in (y, own, gamma, gate, marks)]
    of_weight = 0 if weight is None or weight.dim() == 1 else weight.stride(0)
    return *rows[0], *rows[1], *rows[2], of_weight, *rows[3], *rows[4]


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


@triton.jit(do_not_specialize=NUMBERS)
def finish_kernel(
    y, own, gamma, weight, gate, marks, out,
    y_b, y_h, y_t, own_b, own_g, own_t, gamma_b, gamma_h, gamma_t, weight_h, gate_b, gate_h, gate_t,
    marks_b, marks_h, marks_t, num_queries, heads, number, norm_eps,
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
        x *= tl.load(weight + head * weight_h + cols, mask=cols < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        gate += batch * gate_b + head * gate_h + first * gate_t
        x *= tl.load(gate + (rows[:, None] * gate_t + cols[None, :]), mask=ok & sees_some[:, None], other=0.0).to(
            tl.float32
        )
    out += ((batch * heads + head) * num_queries + first) * HEAD_DIM
    tl.store(out + (rows[:, None] * HEAD_DIM + cols[None, :]), x.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=NUMBERS)
def finish_backward_kernel(
    grad_out, y, own, gamma, weight, gate, marks, grad_y, grad_own, grad_gamma, grad_gate, partial,
    grad_b, grad_h, grad_t, y_b, y_h, y_t, own_b, own_g, own_t, gamma_b, gamma_h, gamma_t, weight_h,
    gate_b, gate_h, gate_t, marks_b, marks_h, marks_t, num_queries, heads, number, norm_eps,
    REPEATS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """B9 to B11. One program owns BLOCK rows of the REPEATS heads of a group.

    Writes grad_y, grad_gamma and grad_gate of each head, grad_own summed over the heads, and the sums of its rows for
    the gradient of the norm's weight: partial [B, H, blocks, D]. Gradients are contiguous.
    """
    blocks = tl.cdiv(num_queries, BLOCK)
    block = tl.program_id(0) % blocks
    slot = tl.program_id(0) // blocks
    groups = heads // REPEATS
    batch, group = (slot // groups).to(tl.int64), (slot % groups).to(tl.int64)
    first = block.to(tl.int64) * BLOCK
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    row_ok, col_ok = first + rows < num_queries, cols < HEAD_DIM
    ok = row_ok[:, None] & col_ok[None, :]
    of_own = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for member in range(REPEATS):
        head = group * REPEATS + member
        of_head = marks
        if marks is not None:
            of_head = marks + batch * marks_b + head * marks_h + first * marks_t
        sees_own, sees_some = _load_marks(of_head, rows, row_ok, marks_t)
        seen = ok & sees_some[:, None]
        to = (batch * heads + head) * num_queries + first
        at = rows[:, None] * HEAD_DIM + cols[None, :]
        y_base = y + (batch * y_b + head * y_h + first * y_t)
        row_y = tl.load(y_base + (rows[:, None] * y_t + cols[None, :]), mask=ok, other=0.0).to(tl.float32)
        grad_base = grad_out + (batch * grad_b + head * grad_h + first * grad_t)
        grad = tl.load(grad_base + (rows[:, None] * grad_t + cols[None, :]), mask=seen, other=0.0).to(tl.float32)
        x = row_y
        if own is not None:
            # The own values are the same for every head of the group; without marks by head they are read from L1.
            own_base = own + (batch * own_b + group * own_g + first * own_t)
            u, inverse, per_largest = _load_own(own_base, rows, cols, ok, own_t, sees_own)
            share = tl.sum(x * u, 1) * inverse
            row_gamma = tl.zeros([BLOCK], tl.float32) + number
            if gamma is not None:
                gamma_at = gamma + (batch * gamma_b + head * gamma_h + first * gamma_t) + rows * gamma_t
                row_gamma = tl.load(gamma_at, mask=sees_own & row_ok, other=0.0).to(tl.float32)
            x = row_y - (row_gamma * share)[:, None] * u
        z = x
        if weight is not None:
            row_scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + norm_eps)
            of_weight = tl.load(weight + head * weight_h + cols, mask=col_ok, other=0.0).to(tl.float32)
            x *= row_scale[:, None]
            z = x * of_weight[None, :]
        if gate is not None:
            tl.store(grad_gate + to * HEAD_DIM + at, (grad * z).to(grad_gate.dtype.element_ty), mask=ok)
            gate_base = gate + (batch * gate_b + head * gate_h + first * gate_t)
            grad *= tl.load(gate_base + (rows[:, None] * gate_t + cols[None, :]), mask=seen, other=0.0).to(tl.float32)
        if weight is not None:
            sums = partial + ((batch * heads + head) * blocks + block) * HEAD_DIM + cols
            tl.store(sums, tl.sum(grad * x, 0), mask=col_ok)
            grad *= of_weight[None, :]
            grad = row_scale[:, None] * (grad - x * (tl.sum(grad * x, 1) / HEAD_DIM)[:, None])
        if own is not None:
            along = tl.sum(grad * u, 1)
            if gamma is not None:
                tl.store(grad_gamma + to + rows, (-share * along).to(grad_gamma.dtype.element_ty), mask=row_ok)
            along *= inverse
            of_u = share[:, None] * grad + along[:, None] * (row_y - 2.0 * share[:, None] * u)
            of_own -= (row_gamma * per_largest)[:, None] * of_u
            grad -= (row_gamma * along)[:, None] * u
        tl.store(grad_y + to * HEAD_DIM + at, grad.to(grad_y.dtype.element_ty), mask=ok)
    if own is not None:
        grad_own += ((batch * groups + group) * num_queries + first) * HEAD_DIM
        tl.store(grad_own + (rows[:, None] * HEAD_DIM + cols[None, :]), of_own.to(grad_own.dtype.element_ty), mask=ok)
