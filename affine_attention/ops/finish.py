"""Finishes the rows of attention: exclusion of the own value (X), a norm per head (N), then the gate.

F9   x_i = y_i - gamma_i (y_i . u_i) u_i / |u_i|^2,  u_i the value at the query's own position;  y_i where u_i is 0 or
     invisible (exclusive self attention, arXiv 2603.09078, is gamma = 1)
F10  z_i = x_i / sqrt(mean(x_i^2) + norm_eps) * norm_weight (a norm per head before the gate)
F11  out_i = gate_i * z_i

y = alpha O + beta n comes from any implementation without a gate. One autograd function saves y and recomputes the rest
(B9 to B11 of ops/README.md). PyTorch computes it on every device and in compiled graphs, ops/fused/finish.py on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .call import distinct
from .dtypes import row_dtype, sum_dtype
from .fused import HAS_TRITON, INTERPRETED, runs_on
from .visibility import Visibility

NORM_EPS = 1e-6
UNSEEN, EMPTY = 1, 2  # marks of rows: the own key is invisible; no key is visible


class Finish(NamedTuple):
    """The parts of the finish of a call; None for those that it does not have."""

    exclusion: Tensor | float | None = None  # gamma, [B, H, T] or a number
    norm_weight: Tensor | None = None  # [D] or [H, D]
    norm_eps: float = NORM_EPS
    gate: Tensor | None = None  # [B, H, T, D]

    @property
    def parts(self) -> str:
        """The names of the parts, for `explain`."""
        names = {"exclusion": self.exclusion, "norm": self.norm_weight, "gate": self.gate}
        return ", ".join(name for name, part in names.items() if part is not None)


def own_values(value: Tensor, visibility: Visibility) -> Tensor:
    """The value at the position of each query, [B, G, T, D]; zeros for positions before the first key."""
    offset = visibility.offset
    if offset == 0:
        return value
    return value[:, :, offset:] if offset > 0 else torch.nn.functional.pad(value, (0, 0, -offset, 0))


def row_marks(visibility: Visibility) -> Tensor | None:
    """UNSEEN, EMPTY or 0 for each row, uint8 [1|B, 1|H, T]; None if every row sees its own key."""
    sees_own = visibility.sees_own_key()
    if sees_own is None:
        return None
    marks = (~sees_own).to(torch.uint8) * UNSEEN
    return marks.masked_fill(visibility.count() == 0, EMPTY)


def uses_kernels(y: Tensor, impl: str = "auto") -> bool:
    """True if the kernels of ops/fused/finish.py serve a call; a compiler fuses the PyTorch code itself."""
    if impl not in ("auto", "fused") or torch.compiler.is_compiling() or not HAS_TRITON or y.numel() == 0:
        return False
    return y.dtype != torch.float64 and (runs_on(y.device.index or 0) if y.is_cuda else INTERPRETED)


def finish(y: Tensor, own: Tensor | None, marks: Tensor | None, parts: Finish, *, kernels: bool) -> Tensor:
    """F9 to F11 of y [B, H, T, D], in the dtype of y; differentiable once in every tensor.

    Args:
        own: the own values [B, G, T, D]; needed with an exclusion.
        marks: those of `row_marks`. The coefficients of marked rows may hold anything.
    """
    exclusion, norm_weight, norm_eps, gate = parts
    gamma = exclusion if isinstance(exclusion, Tensor) else None
    number = 0.0 if exclusion is None or gamma is not None else float(exclusion)
    tensors: Any = (y, own if exclusion is not None else None, gamma, norm_weight, gate)
    if torch.compiler.is_compiling():
        tensors = distinct(tensors)
    run: Any = _Finish.apply
    return run(*tensors, marks, number, norm_eps, kernels)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        own: Tensor | None,
        gamma: Tensor | None,
        norm_weight: Tensor | None,
        gate: Tensor | None,
        marks: Tensor | None,
        number: float,
        norm_eps: float,
        kernels: bool,
    ) -> Tensor:
        ctx.save_for_backward(y, own, gamma, norm_weight, gate, marks)
        ctx.number, ctx.norm_eps, ctx.kernels = number, norm_eps, kernels
        if kernels:
            from .fused.finish import finish_forward

            return finish_forward(y, own, gamma, norm_weight, gate, marks, number, norm_eps)
        return _Rows(y, own, gamma, norm_weight, gate, marks, number, norm_eps).out()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        y, own, gamma, norm_weight, gate, marks = ctx.saved_tensors
        if ctx.kernels:
            from .fused.finish import finish_backward

            grads = finish_backward(grad_out, y, own, gamma, norm_weight, gate, marks, ctx.number, ctx.norm_eps)
        else:
            rows = _Rows(y, own, gamma, norm_weight, gate, marks, ctx.number, ctx.norm_eps)
            grads = rows.gradients(grad_out)
        wanted = [grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)]
        return *wanted, None, None, None, None


class _Rows:
    """F9 to F11 and their gradients with PyTorch, in the row dtype; heads are [B, G, H / G, T, D] here."""

    def __init__(
        self,
        y: Any,
        own: Any,
        gamma: Any,
        norm_weight: Any,
        gate: Any,
        marks: Tensor | None,
        number: float,
        norm_eps: float,
    ):
        self.given = y, own, gamma, norm_weight, gate
        self.dtype = row_dtype(y.dtype)
        self.groups = 1 if own is None else own.shape[1]
        self.empty: Tensor | None = None
        unseen: Tensor | None = None
        if marks is not None:
            by_head = (self._split(marks) if marks.shape[1] > 1 else marks[:, :, None])[..., None]
            self.empty, unseen = by_head == EMPTY, by_head != 0
        self.y = self._split(self._wide(y))
        self.gate: Tensor | None = None
        self.weight: Tensor | None = None
        if own is not None:
            self.gamma: Any = (
                number if gamma is None else self._filled(self._split(self._wide(gamma))[..., None], unseen)
            )
            values = self._wide(own)[:, :, None]
            if unseen is not None:
                values = values.masked_fill(unseen, 0)
            # Projection does not depend on the length of the value, whose square might overflow or vanish.
            self.largest = values.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(self.dtype).tiny)
            self.u = values / self.largest
            square = self.u.square().sum(-1, keepdim=True)
            self.inverse = torch.where(square > 0, 1 / square, 0.0)
            self.share = (self.y * self.u).sum(-1, keepdim=True) * self.inverse
            self.x = self.y - self.gamma * self.share * self.u
        else:
            self.x = self.y
        if norm_weight is not None:
            weight = self._wide(norm_weight).expand(y.shape[1], -1)
            self.weight = self._split(weight[None])[:, :, :, None]
            self.scale = torch.rsqrt(self.x.square().mean(-1, keepdim=True) + norm_eps)
        if gate is not None:
            self.gate = self._filled(self._split(self._wide(gate)), self.empty)

    def out(self) -> Tensor:
        out = self.x
        if self.weight is not None:
            out = out * self.scale * self.weight
        if self.gate is not None:
            out = out * self.gate
        return out.flatten(1, 2).to(self.given[0].dtype)

    def gradients(self, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """B9 to B11: of y, own, gamma, norm_weight and gate; None for those that are not given."""
        y, own, gamma, norm_weight, gate = self.given
        grad = self._filled(self._split(self._wide(grad_out)), self.empty)
        grad_own = grad_gamma = grad_weight = grad_gate = None
        if self.gate is not None:
            z = self.x if self.weight is None else self.x * self.scale * self.weight
            grad_gate = (grad * z).flatten(1, 2).to(gate.dtype)
            grad = grad * self.gate
        if self.weight is not None:
            normed = self.x * self.scale
            by_head = (grad * normed).sum((0, 3), dtype=sum_dtype(self.dtype)).flatten(0, 1)
            grad_weight = (by_head if norm_weight.dim() == 2 else by_head.sum(0)).to(norm_weight.dtype)
            grad = grad * self.weight
            grad = self.scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        if own is not None:
            along = (grad * self.u).sum(-1, keepdim=True)
            if gamma is not None:
                grad_gamma = -(self.share * along).squeeze(-1).flatten(1, 2).to(gamma.dtype)
            of_u = self.share * grad + self.inverse * along * (self.y - 2 * self.share * self.u)
            grad_own = (-(self.gamma * of_u) / self.largest).sum(2).to(own.dtype)
            grad = grad - self.gamma * self.inverse * along * self.u
        return grad.flatten(1, 2).to(y.dtype), grad_own, grad_gamma, grad_weight, grad_gate

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1))

    @staticmethod
    def _filled(x: Tensor, rows: Tensor | None) -> Tensor:
        """x with some rows set to 0, since 0 times NaN or infinity is NaN."""
        return x if rows is None else x.masked_fill(rows, 0)
