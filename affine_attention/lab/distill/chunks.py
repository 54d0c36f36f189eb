"""Turns last hidden states and LM heads into distillation and cross-entropy sums, one chunk of tokens at a time.

The logits of N tokens are [N, V]; at a vocabulary of 128k they need more memory than the model. Here they exist for one
chunk of tokens only. The gradients are computed in the forward pass, while the logits of the chunk are in memory: the
loss is a scalar, so the backward pass only multiplies them by the incoming scalar gradient. Per token:

    p = softmax(teacher / temperature)      q = softmax(student / temperature)
    kd = temperature² · Σ p (log p − log q)      or, as a soft cross-entropy, −temperature² · Σ p log q
    ce = −log softmax(student)[label]
    total = kd_weight · kd + ce_weight · ce

The factor temperature² (Hinton et al. 2015) keeps the size of the gradient of kd, temperature · (q − p), independent of
the temperature. It is part of `kd`, so that total is the weighted sum of the reported values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .row_loss import SCRATCH_COPIES, row_loss
from .terms import LogitRows, Terms

IGNORED = -100
CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}  # of the student's logits; measured in benchmarks/distill.py
CACHE_BYTES = 2**21  # rows per call on the CPU: small enough for its cache, large enough to amortise the call overhead


class LossParts(NamedTuple):
    """Sums over `tokens` tokens. Only `total_sum` carries a gradient; `kd_sum` is None without a teacher."""

    total_sum: Tensor
    kd_sum: Tensor | None
    ce_sum: Tensor
    tokens: int

    def stacked(self) -> Tensor:
        """[total, kd, ce], detached; kd is 0 without a teacher."""
        kd_sum = torch.zeros_like(self.ce_sum) if self.kd_sum is None else self.kd_sum
        return torch.stack([self.total_sum.detach(), kd_sum, self.ce_sum])


@dataclass(frozen=True)
class Head:
    """An LM head: logits = softcap · tanh((hidden @ weight.T + bias) / softcap); no tanh if softcap is None."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def cut(self, vocabulary: int) -> Head:
        """The head restricted to the first `vocabulary` tokens."""
        return Head(self.weight[:vocabulary], None if self.bias is None else self.bias[:vocabulary], self.softcap)


def chunked_loss(
    student_hidden_NM: Tensor,
    student_head: Head,
    labels_N: Tensor,
    teacher_hidden_NM: Tensor | None = None,
    teacher_head: Head | None = None,
    terms: Terms | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    teacher_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
) -> LossParts:
    """Loss sums over the tokens whose label is not -100, without materialising the logits of all tokens.

    Args:
        student_hidden_NM: the input of the student's head; gets a gradient.
        student_head: its weight and bias get gradients, accumulated in fp32.
        labels_N: the token that each position predicts (already shifted); positions with -100 are not computed.
        teacher_hidden_NM, teacher_head: the same for the teacher; None for plain cross-entropy (`kd_weight=0`).
        terms: weights, temperature and divergence; only forward KL by default.
        compute_dtype: dtype of the student's matrix products and logits; softmax and sums are fp32 (fp64 for fp64). The
            default is the autocast dtype if autocast is on, else the dtype of the hidden states.
        teacher_dtype: the same for the teacher.
        chunk_bytes: approximate size of the student's logits of one chunk; 256 MiB on the CPU, 512 MiB on a GPU. The
            teacher's logits need half of that on the CPU, the same on a GPU.

    Only one backward is possible: a second backward through the same loss raises.
    """
    terms = terms or Terms()
    _check(student_hidden_NM, student_head, labels_N, teacher_hidden_NM, teacher_head, terms)
    with torch.no_grad():
        # Synchronises with the device: the number of tokens decides how many chunks are launched.
        positions = (labels_N != IGNORED).nonzero()[:, 0]
        labels = labels_N[positions]
        low, high = torch.stack(labels.aminmax()).tolist() if len(labels) else (0, 0)
        if not 0 <= low <= high < student_head.vocabulary:
            raise ValueError(
                f"labels must be {IGNORED} or within the vocabulary, 0 to {student_head.vocabulary - 1}, "
                f"got {low} to {high}"
            )
    dtype = compute_dtype or _default_dtype(student_hidden_NM)
    teacher = None
    if terms.kd_weight:
        assert teacher_hidden_NM is not None, "_check"
        assert teacher_head is not None, "_check"
        as_dtype = teacher_dtype or _default_dtype(teacher_hidden_NM)
        teacher = _Projection.of(teacher_hidden_NM.detach(), teacher_head, as_dtype)
    work = _Work(
        terms, labels, positions, dtype, student_head.softcap, teacher,
        chunk_bytes or CHUNK_BYTES.get(student_hidden_NM.device.type, CHUNK_BYTES["cuda"]),
    )  # fmt: skip
    total, kd, ce = _ChunkedLoss.apply(student_hidden_NM, student_head.weight, student_head.bias, work)
    return LossParts(total, kd if teacher is not None else None, ce, len(labels))


@dataclass(frozen=True)
class _Projection:
    """Hidden states and a head in the dtype of the matrix product."""

    hidden_NM: Tensor
    weight_VM: Tensor
    bias_V: Tensor | None
    softcap: float | None

    @classmethod
    def of(cls, hidden_NM: Tensor, head: Head, dtype: torch.dtype) -> _Projection:
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        return cls(hidden_NM, head.weight.detach().to(dtype), bias, head.softcap)

    def logits(self, positions: Tensor, out_CV: Tensor) -> Tensor:
        """Writes the logits of some positions, before the soft cap, into `out_CV`; returns their hidden states."""
        hidden_CM = self.hidden_NM[positions].to(self.weight_VM.dtype)
        if self.bias_V is None:
            torch.mm(hidden_CM, self.weight_VM.T, out=out_CV)
        else:
            torch.addmm(self.bias_V, hidden_CM, self.weight_VM.T, out=out_CV)
        return hidden_CM


@dataclass(frozen=True)
class _Work:
    """The inputs of the loss that are not differentiated."""

    terms: Terms
    labels: Tensor
    positions: Tensor
    dtype: torch.dtype
    softcap: float | None
    teacher: _Projection | None
    chunk_bytes: int


class _ChunkedLoss(torch.autograd.Function):
    """(hidden [N, M], weight [V, M], bias [V] or None) -> total, kd and ce sums; only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, work: _Work):
        with torch.autocast(hidden_NM.device.type, enabled=False):
            sums, ctx.grads = _forward(hidden_NM, weight_VM, bias_V, work, ctx.needs_input_grad[:3])
        ctx.gradients_used = False
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor):
        if ctx.gradients_used:
            raise RuntimeError(
                "the chunked loss frees its gradients in the first backward, so a second backward through the same "
                "loss is not possible; compute the loss again"
            )
        # Drop our reference, so that autograd can take over the buffers without a copy.
        grads, ctx.grads, ctx.gradients_used = ctx.grads, None, True
        known_one = grad_total.device.type == "cpu" and grad_total.item() == 1  # on a GPU this would synchronise
        for grad in grads:
            if grad is not None and not known_one:
                grad.mul_(grad_total)
        return (*grads, None)


def _forward(
    hidden_NM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, work: _Work, needs: tuple[bool, ...]
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    student = _Projection.of(hidden_NM, Head(weight_VM, bias_V, work.softcap), work.dtype)
    count, vocabulary = len(work.positions), weight_VM.shape[0]
    sum_dtype = torch.float64 if work.dtype == torch.float64 else torch.float32
    grad_hidden = torch.zeros_like(hidden_NM, dtype=work.dtype) if needs[0] else None
    grad_weight: Tensor | None = None  # allocated by its first product: zero-filling it takes time
    grad_bias = torch.zeros_like(bias_V, dtype=sum_dtype) if bias_V is not None and needs[2] else None
    kd_N, ce_N = (torch.zeros(count, dtype=sum_dtype, device=hidden_NM.device) for _ in range(2))

    rows = _rows_of_a_chunk(count, vocabulary, work)
    logits = torch.empty(rows, vocabulary, dtype=work.dtype, device=hidden_NM.device)
    # Only the student's two gradient products profit from many rows. On the CPU the teacher's logits are computed for
    # half a chunk at a time, which saves a sixth of the memory and of the page faults.
    part_rows = math.ceil(rows / 2) if logits.is_cpu else rows
    teacher_dtype = work.teacher.weight_VM.dtype if work.teacher is not None else None
    # The teacher's first logits reuse the buffer of the weight gradient: a whole chunk without extra memory.
    weight_buffer = teacher_logits = None
    if logits.is_cpu and needs[1] and teacher_dtype == sum_dtype and weight_VM.shape[1] >= part_rows:
        weight_buffer = torch.empty(weight_VM.shape, dtype=sum_dtype)
        teacher_logits = weight_buffer.view(-1)[: min(rows, weight_VM.shape[1]) * vocabulary].view(-1, vocabulary)
    for start in range(0, count, rows):
        chunk = slice(start, min(start + rows, count))
        positions = work.positions[chunk]
        student_CV = logits[: len(positions)]
        hidden_CM = student.logits(positions, student_CV)
        if teacher_dtype is not None and teacher_logits is None:
            teacher_logits = torch.empty_like(logits[:part_rows], dtype=teacher_dtype)
        step = len(positions) if teacher_logits is None else len(teacher_logits)
        for first in range(chunk.start, chunk.stop, step):
            part = slice(first, min(first + step, chunk.stop))
            student_PV, teacher_PV = student_CV[first - start : part.stop - start], None
            if work.teacher is not None and teacher_logits is not None:
                teacher_PV = teacher_logits[: len(student_PV)]
                work.teacher.logits(work.positions[part], teacher_PV)
            _rows_loss(student_PV, teacher_PV, work, part, kd_N[part], ce_N[part], any(needs))
        # student_CV now holds the gradient of the logits.
        if grad_hidden is not None:
            grad_hidden.index_copy_(0, positions, student_CV @ student.weight_VM)
        if needs[1]:
            grad_weight = _add_product(grad_weight, student_CV.T, hidden_CM, sum_dtype, weight_buffer)
            if weight_buffer is not None:
                weight_buffer = teacher_logits = None  # the buffer now holds the gradient
        if grad_bias is not None:
            grad_bias += student_CV.sum(0, dtype=sum_dtype)
    if needs[1] and grad_weight is None:
        grad_weight = torch.zeros_like(weight_VM, dtype=sum_dtype)
    kd, ce = kd_N.sum(), ce_N.sum()
    total = work.terms.kd_weight * kd + work.terms.ce_weight * ce
    return (total, kd, ce), [grad_hidden, grad_weight, grad_bias]


def _rows_of_a_chunk(count: int, vocabulary: int, work: _Work) -> int:
    """As many rows per chunk as `chunk_bytes` allows, spread evenly over the chunks."""
    rows = max(work.chunk_bytes // (vocabulary * work.dtype.itemsize), 1)
    chunks = max(math.ceil(count / rows), 1)
    rows = math.ceil(count / chunks)
    if work.labels.is_cuda and rows > 128:
        rows = 128 * math.ceil(rows / 128)  # full tiles of the matrix product
    return max(min(rows, count), 1)


def _add_product(
    sum_VM: Tensor | None, left_VC: Tensor, right_CM: Tensor, dtype: torch.dtype, buffer_VM: Tensor | None
) -> Tensor:
    """sum + left @ right, in place, in `dtype`: rounding each chunk's product to bf16 would bias the gradient.

    The first product is written to `buffer_VM` if it is given.
    """
    if left_VC.is_cuda and left_VC.dtype != dtype:
        if sum_VM is None:
            return torch.mm(left_VC, right_CM, out_dtype=dtype)
        return torch.addmm(sum_VM, left_VC, right_CM, out_dtype=dtype, out=sum_VM)
    left_VC, right_CM = left_VC.to(dtype), right_CM.to(dtype)
    return torch.mm(left_VC, right_CM, out=buffer_VM) if sum_VM is None else sum_VM.addmm_(left_VC, right_CM)


def _rows_loss(
    student_CV: Tensor, teacher_CV: Tensor | None, work: _Work, chunk: slice, kd_C: Tensor, ce_C: Tensor, grad: bool
) -> None:
    """Writes kd and ce of each token, and overwrites the student's logits with their gradient."""
    labels_C = work.labels[chunk]
    teacher_softcap = work.teacher.softcap if work.teacher is not None else None
    rows_function: Callable[..., None] = row_loss
    rows = len(labels_C)
    if student_CV.is_cpu:
        rows = min(max(CACHE_BYTES // (kd_C.dtype.itemsize * student_CV.shape[1]), 1), rows)
        # One buffer for all blocks: allocating one per block causes page faults that cost more than the arithmetic.
        scratch = torch.empty(SCRATCH_COPIES, rows, student_CV.shape[1], dtype=kd_C.dtype)
        rows_function = partial(row_loss, scratch=scratch)
    elif student_CV.is_cuda and student_CV.dtype != torch.float64 and find_spec("triton"):
        from .row_loss_kernel import fused_row_loss

        rows_function = fused_row_loss
    for start in range(0, len(labels_C), rows):
        block = slice(start, start + rows)
        rows_function(
            LogitRows(
                student_CV[block], None if teacher_CV is None else teacher_CV[block], labels_C[block], work.terms,
                work.softcap, teacher_softcap, kd_C[block], ce_C[block],
            ),
            grad,
        )  # fmt: skip


def _default_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _check(
    hidden: Tensor, head: Head, labels: Tensor, teacher_hidden: Tensor | None, teacher: Head | None, terms: Terms
) -> None:
    if hidden.dim() != 2 or head.weight.dim() != 2 or hidden.shape[1] != head.weight.shape[1]:
        raise ValueError(
            f"student_hidden must be [N, M] and student_head.weight [V, M], got {list(hidden.shape)} and "
            f"{list(head.weight.shape)}"
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels must be [N] = [{hidden.shape[0]}], got {list(labels.shape)}")
    if not terms.kd_weight:
        return
    if teacher_hidden is None or teacher is None:
        raise ValueError(
            f"kd_weight={terms.kd_weight} needs a teacher; pass one, or use kd_weight=0 and ce_weight=1 for plain "
            "cross-entropy"
        )
    if teacher_hidden.shape != (hidden.shape[0], teacher.weight.shape[1]):
        raise ValueError(
            f"teacher_hidden must be [N, M] = [{hidden.shape[0]}, {teacher.weight.shape[1]}], "
            f"got {list(teacher_hidden.shape)}"
        )
    if teacher.vocabulary != head.vocabulary:
        raise ValueError(
            f"the student's vocabulary size {head.vocabulary} differs from the teacher's {teacher.vocabulary}; set "
            "truncate_vocabulary=True if the extra tokens are padding, else change the student"
        )
