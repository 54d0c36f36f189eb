"""Computes kd, ce and their gradient for a few rows of logits in plain PyTorch: the formula of chunks.py.

On a GPU, row_loss_kernel.py computes the same in one Triton kernel. Each row is shifted so that its largest logit is 0
before student and teacher logits are subtracted: if one model's logits are all near 1000, the difference would lose
precision to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .terms import LogitRows

SCRATCH_COPIES = 5  # `row_loss` needs at most this many buffers of the size of its rows


def row_loss(rows: LogitRows, grad: bool, scratch: Tensor | None = None) -> None:
    """Writes kd and ce of each row, and overwrites the student's logits with their gradient if `grad` is set.

    One exponential per logit; everything else is done in place. `scratch` [SCRATCH_COPIES, rows, V] is working memory;
    without it, buffers are allocated. The teacher's logits are overwritten.
    """
    student_CV, teacher_CV, labels_C, terms, softcap, teacher_softcap, kd_C, ce_C = rows
    temperature, dtype = terms.temperature, kd_C.dtype
    x_out, capped_out, y_out, cold_out, p_out = (
        [None] * SCRATCH_COPIES if scratch is None else scratch[:, : len(labels_C)]
    )
    x = _in_dtype(student_CV, dtype, x_out)
    tanh = x.div_(softcap).tanh_() if softcap else None
    x = torch.mul(tanh, softcap, out=capped_out) if tanh is not None and softcap else x
    x -= x.amax(-1, keepdim=True)
    at_label_C = x.gather(1, labels_C[:, None])[:, 0]
    if teacher_CV is None:
        slope, log_z = _softmax(x, p_out)
        ce_C.copy_(log_z - at_label_C)
        slope *= terms.ce_weight
    else:
        y = _in_dtype(teacher_CV, dtype, y_out)
        y = y.div_(teacher_softcap).tanh_().mul_(teacher_softcap) if teacher_softcap else y
        y -= y.amax(-1, keepdim=True)
        cold_q = None
        if temperature != 1:
            cold_q, log_z = _softmax(x, cold_out)
            ce_C.copy_(log_z - at_label_C)
            x /= temperature
            y /= temperature
        p, log_w = _softmax(y, p_out)
        if terms.divergence == "forward_kl":
            kd_C.copy_(y.sub_(x).mul_(p).sum(-1).sub_(log_w))
        else:
            kd_C.copy_(torch.mul(x, p, out=y).sum(-1).neg_())
        q, log_z = _softmax(x, y)  # y is no longer needed
        kd_C.add_(log_z).mul_(temperature**2)
        factor = terms.kd_weight * temperature
        if cold_q is None:
            ce_C.copy_(log_z - at_label_C)
            q = q.mul_(factor + terms.ce_weight) if factor + terms.ce_weight != 1 else q
        else:
            q.mul_(factor).add_(cold_q, alpha=terms.ce_weight)
        slope = torch.sub(q, p, alpha=factor, out=x)  # gradient of the total with respect to the capped logits
    if not grad:
        return
    if terms.ce_weight:
        slope.scatter_add_(1, labels_C[:, None], slope.new_full((len(labels_C), 1), -terms.ce_weight))
    if tanh is not None:
        slope *= tanh.square_().neg_().add_(1)
    if slope is not student_CV:
        student_CV.copy_(slope)


def _in_dtype(logits_CV: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The logits themselves if they already have the dtype, else a copy."""
    return logits_CV.to(dtype) if out is None or logits_CV.dtype == dtype else out.copy_(logits_CV)


def _softmax(x_CV: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax and log Σ exp of rows whose maximum is 0, so that the maximum of the softmax is 1 / Σ exp."""
    q_CV = torch.softmax(x_CV, -1, out=out)
    return q_CV, q_CV.amax(-1).log_().neg_()
