"""Turns last hidden states and heads into distillation and cross-entropy sums, a slice of tokens at a time.

The logits of N tokens are [N, V]: at a vocabulary of 128k they outweigh the model. Here they exist for a slice of the
tokens only, and the gradients are made in the forward pass, while the slice is there: the loss is a scalar, so what its
backward gets is one number, and multiplying by it is all that is left to do. What is computed per token:

    p = softmax(teacher / temperature)      q = softmax(student / temperature)
    kd = temperature² · Σ p (log p − log q)      or, as a soft cross-entropy, −temperature² · Σ p log q
    ce = −log softmax(student)[label]
    total = kd_weight · kd + ce_weight · ce

The factor temperature² (Hinton et al. 2015) keeps the gradient of kd, temperature · (q − p), at one size whatever the
temperature. It is part of `kd`, so that total is the sum of what is reported.
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

from .rows import ROOM, plain_rows

IGNORED = -100
DIVERGENCES = ("forward_kl", "soft_cross_entropy")
CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}  # of the student's logits; measured in benchmarks/distill.py
CACHE_BYTES = 2**21  # logits that the CPU takes through all passes at once: in its cache, but not too many small calls


class LossParts(NamedTuple):
    """Sums over `tokens` tokens. Only `total_sum` carries a gradient; `kd_sum` is None where no teacher was asked."""

    total_sum: Tensor
    kd_sum: Tensor | None
    ce_sum: Tensor
    tokens: int


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: softcap · tanh((hidden @ weight.T + bias) / softcap), or without a cap."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def cut(self, vocabulary: int) -> Head:
        """The head of the first tokens."""
        return Head(self.weight[:vocabulary], None if self.bias is None else self.bias[:vocabulary], self.softcap)


@dataclass(frozen=True)
class Terms:
    """Which loss: the settings of the formula above."""

    kd_weight: float = 1.0
    ce_weight: float = 0.0
    temperature: float = 1.0
    divergence: str = "forward_kl"

    def __post_init__(self) -> None:
        for name in ("kd_weight", "ce_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        if not self.kd_weight and not self.ce_weight:
            raise ValueError("kd_weight and ce_weight are both 0: nothing would be learned; give one of them a weight")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0, got {self.temperature}")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}")


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
    """Sums over the tokens whose label is not -100, without the logits of all tokens.

    Args:
        student_hidden_NM: what the student's head is given; gets a gradient.
        student_head: its weight and bias get gradients, accumulated in fp32.
        labels_N: the token that each position predicts (shifted already); -100 positions are not computed at all.
        teacher_hidden_NM, teacher_head: the teacher's, of any width; None for plain cross-entropy (`kd_weight=0`).
        terms: weights, temperature and divergence; forward KL alone by default.
        compute_dtype: of the student's matrix products and logits; softmax and sums are fp32 (fp64 for fp64). By
            default that of autocast, if it is on, else that of the hidden states.
        teacher_dtype: the same for the teacher.
        chunk_bytes: about how much the student's logits may take at a time; 256 MiB on the CPU, 512 MiB on a GPU. The
            teacher's take half of that on the CPU, the same on a GPU.

    The gradients can be had once: a second backward through the same loss raises.
    """
    terms = terms or Terms()
    _check(student_hidden_NM, student_head, labels_N, teacher_hidden_NM, teacher_head, terms)
    with torch.no_grad():
        # Waits for the device: how many tokens there are decides what is launched.
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
    """Hidden states and a head in the dtype of the product."""

    hidden_NM: Tensor
    weight_VM: Tensor
    bias_V: Tensor | None
    softcap: float | None

    @classmethod
    def of(cls, hidden_NM: Tensor, head: Head, dtype: torch.dtype) -> _Projection:
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        return cls(hidden_NM, head.weight.detach().to(dtype), bias, head.softcap)

    def logits(self, positions: Tensor, out_CV: Tensor) -> Tensor:
        """Writes the raw logits of some positions into `out_CV`; returns the hidden states that made them."""
        hidden_CM = self.hidden_NM[positions].to(self.weight_VM.dtype)
        if self.bias_V is None:
            torch.mm(hidden_CM, self.weight_VM.T, out=out_CV)
        else:
            torch.addmm(self.bias_V, hidden_CM, self.weight_VM.T, out=out_CV)
        return hidden_CM


@dataclass(frozen=True)
class _Work:
    """What is not differentiated."""

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
        ctx.handed_over = False
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor):
        if ctx.handed_over:
            raise RuntimeError(
                "the chunked loss makes its gradients once and hands them over: a second backward through the same "
                "loss is not possible; compute the loss again"
            )
        # Let go of them, so that autograd may keep the buffers as they are instead of copying.
        grads, ctx.grads, ctx.handed_over = ctx.grads, None, True
        known_one = grad_total.device.type == "cpu" and grad_total.item() == 1  # elsewhere asking means waiting
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
    grad_weight: Tensor | None = None  # made by its first product: at a large vocabulary filling it with 0 takes time
    grad_bias = torch.zeros_like(bias_V, dtype=sum_dtype) if bias_V is not None and needs[2] else None
    kd_N, ce_N = (torch.zeros(count, dtype=sum_dtype, device=hidden_NM.device) for _ in range(2))

    rows = _rows_of_a_chunk(count, vocabulary, work)
    logits = torch.empty(rows, vocabulary, dtype=work.dtype, device=hidden_NM.device)
    # The two gradients gain from many rows, and they are the student's: on the CPU the teacher goes by half a chunk,
    # which is a sixth of the memory, and of the time in which fresh pages are found for it.
    part_rows = math.ceil(rows / 2) if logits.is_cpu else rows
    teacher_dtype = work.teacher.weight_VM.dtype if work.teacher is not None else None
    # The teacher's first logits reuse the buffer of the weight's gradient: a whole chunk at once, without more memory.
    weight_room = teacher_logits = None
    if logits.is_cpu and needs[1] and teacher_dtype == sum_dtype and weight_VM.shape[1] >= part_rows:
        weight_room = torch.empty(weight_VM.shape, dtype=sum_dtype)
        teacher_logits = weight_room.view(-1)[: min(rows, weight_VM.shape[1]) * vocabulary].view(-1, vocabulary)
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
        # From here on student_CV holds the gradient of the logits.
        if grad_hidden is not None:
            grad_hidden.index_copy_(0, positions, student_CV @ student.weight_VM)
        if needs[1]:
            grad_weight = _add_product(grad_weight, student_CV.T, hidden_CM, sum_dtype, weight_room)
            if weight_room is not None:
                weight_room = teacher_logits = None  # it is the gradient's now
        if grad_bias is not None:
            grad_bias += student_CV.sum(0, dtype=sum_dtype)
    if needs[1] and grad_weight is None:
        grad_weight = torch.zeros_like(weight_VM, dtype=sum_dtype)
    kd, ce = kd_N.sum(), ce_N.sum()
    total = work.terms.kd_weight * kd + work.terms.ce_weight * ce
    return (total, kd, ce), [grad_hidden, grad_weight, grad_bias]


def _rows_of_a_chunk(count: int, vocabulary: int, work: _Work) -> int:
    """As many tokens as the bytes allow, the same number in every chunk but the last."""
    rows = max(work.chunk_bytes // (vocabulary * work.dtype.itemsize), 1)
    chunks = max(math.ceil(count / rows), 1)
    rows = math.ceil(count / chunks)
    if work.labels.is_cuda and rows > 128:
        rows = 128 * math.ceil(rows / 128)  # whole tiles of a matrix product
    return max(min(rows, count), 1)


def _add_product(
    sum_VM: Tensor | None, left_VC: Tensor, right_CM: Tensor, dtype: torch.dtype, room_VM: Tensor | None
) -> Tensor:
    """sum + left @ right, in place, in `dtype`: rounding each chunk's product to bf16 would bias the gradient.

    The first product is written to `room_VM`, where there is one.
    """
    if left_VC.is_cuda and left_VC.dtype != dtype:
        if sum_VM is None:
            return torch.mm(left_VC, right_CM, out_dtype=dtype)
        return torch.addmm(sum_VM, left_VC, right_CM, out_dtype=dtype, out=sum_VM)
    left_VC, right_CM = left_VC.to(dtype), right_CM.to(dtype)
    return torch.mm(left_VC, right_CM, out=room_VM) if sum_VM is None else sum_VM.addmm_(left_VC, right_CM)


def _rows_loss(
    student_CV: Tensor, teacher_CV: Tensor | None, work: _Work, chunk: slice, kd_C: Tensor, ce_C: Tensor, grad: bool
) -> None:
    """Writes each token's kd and ce, and puts the gradient of its logits in the place of the student's logits."""
    labels_C = work.labels[chunk]
    teacher_softcap = work.teacher.softcap if work.teacher is not None else None
    rows_function: Callable[..., None] = plain_rows
    rows = len(labels_C)
    if student_CV.is_cpu:
        rows = min(max(CACHE_BYTES // (kd_C.dtype.itemsize * student_CV.shape[1]), 1), rows)
        # Memory that is asked for anew for every few rows may come as fresh pages, which cost more than the arithmetic.
        room = torch.empty(ROOM, rows, student_CV.shape[1], dtype=kd_C.dtype)
        rows_function = partial(plain_rows, room=room)
    elif student_CV.is_cuda and student_CV.dtype != torch.float64 and find_spec("triton"):
        from .kernel import fused_rows

        rows_function = fused_rows
    for start in range(0, len(labels_C), rows):
        block = slice(start, start + rows)
        rows_function(
            student_CV[block], None if teacher_CV is None else teacher_CV[block], labels_C[block], work.terms,
            work.softcap, teacher_softcap, kd_C[block], ce_C[block], grad,
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
            f"kd_weight={terms.kd_weight} needs a teacher; give one, or take kd_weight=0 and ce_weight=1 for plain "
            "cross-entropy"
        )
    if teacher_hidden.shape != (hidden.shape[0], teacher.weight.shape[1]):
        raise ValueError(
            f"teacher_hidden must be [N, M] = [{hidden.shape[0]}, {teacher.weight.shape[1]}], "
            f"got {list(teacher_hidden.shape)}"
        )
    if teacher.vocabulary != head.vocabulary:
        raise ValueError(
            f"the student's vocabulary of {head.vocabulary} is not the teacher's of {teacher.vocabulary}; "
            "set truncate_vocabulary=True if the smaller is a prefix of the larger (padding), else change the student"
        )
