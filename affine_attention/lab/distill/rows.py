"""Turns a few rows of raw logits into kd, ce and their gradient, in plain PyTorch: the formula of chunks.py.

On a GPU kernel.py does the same in one kernel. Rows are shifted so that their largest logit is 0 before student and
teacher meet: where one model's logits are all near 1000, the difference would else be rounded to their spacing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .chunks import Terms

ROOM = 5  # copies of its rows that `plain_rows` may need


def plain_rows(
    student_CV: Tensor,
    teacher_CV: Tensor | None,
    labels_C: Tensor,
    terms: Terms,
    softcap: float | None,
    teacher_softcap: float | None,
    kd_C: Tensor,
    ce_C: Tensor,
    grad: bool,
    room: Tensor | None = None,
) -> None:
    """The formula of chunks.py for some rows of raw logits: one exponential a logit, everything else in place.

    `room` [ROOM, rows, V] is memory to work in; without it, it is allocated. The teacher's logits are overwritten.
    """
    temperature, dtype = terms.temperature, kd_C.dtype
    x_room, capped_room, y_room, cold_room, p_room = [None] * ROOM if room is None else room[:, : len(labels_C)]
    x = _in_dtype(student_CV, dtype, x_room)
    tanh = x.div_(softcap).tanh_() if softcap else None
    x = torch.mul(tanh, softcap, out=capped_room) if tanh is not None and softcap else x
    x -= x.amax(-1, keepdim=True)
    at_label_C = x.gather(1, labels_C[:, None])[:, 0]
    if teacher_CV is None:
        slope, log_z = _softmax(x, p_room)
        ce_C.copy_(log_z - at_label_C)
        slope *= terms.ce_weight
    else:
        y = _in_dtype(teacher_CV, dtype, y_room)
        y = y.div_(teacher_softcap).tanh_().mul_(teacher_softcap) if teacher_softcap else y
        y -= y.amax(-1, keepdim=True)
        cold_q = None
        if temperature != 1:
            cold_q, log_z = _softmax(x, cold_room)
            ce_C.copy_(log_z - at_label_C)
            x /= temperature
            y /= temperature
        p, log_w = _softmax(y, p_room)
        if terms.divergence == "forward_kl":
            kd_C.copy_(y.sub_(x).mul_(p).sum(-1).sub_(log_w))
        else:
            kd_C.copy_(torch.mul(x, p, out=y).sum(-1).neg_())
        q, log_z = _softmax(x, y)  # y has served
        kd_C.add_(log_z).mul_(temperature**2)
        factor = terms.kd_weight * temperature
        if cold_q is None:
            ce_C.copy_(log_z - at_label_C)
            q = q.mul_(factor + terms.ce_weight) if factor + terms.ce_weight != 1 else q
        else:
            q.mul_(factor).add_(cold_q, alpha=terms.ce_weight)
        slope = torch.sub(q, p, alpha=factor, out=x)  # of the total by the capped logits
    if not grad:
        return
    if terms.ce_weight:
        slope.scatter_add_(1, labels_C[:, None], slope.new_full((len(labels_C), 1), -terms.ce_weight))
    if tanh is not None:
        slope *= tanh.square_().neg_().add_(1)
    if slope is not student_CV:
        student_CV.copy_(slope)


def _in_dtype(logits_CV: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The logits themselves where they have the dtype, else a copy."""
    return logits_CV.to(dtype) if out is None or logits_CV.dtype == dtype else out.copy_(logits_CV)


def _softmax(x_CV: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax and log Σ exp of rows whose largest value is 0: the largest of the softmax is 1 / Σ exp."""
    q_CV = torch.softmax(x_CV, -1, out=out)
    return q_CV, q_CV.amax(-1).log_().neg_()
