"""The formula of chunks.py as one Triton kernel: logits -> kd, ce, and the gradient of the logits, written in place.

Plain PyTorch reads the logits about twenty times; this kernel reads each row twice and writes it once. The first pass
accumulates, with maxima m of the student and n of the teacher, and temperature τ:

    z = Σ e^{x−m}      z_τ = Σ e^{(x−m)/τ}      w = Σ e^{(y−n)/τ}      d = Σ e^{(y−n)/τ} (y − x)/τ   (soft: −x/τ)
    log-sum-exps: S = m + log z,  S_τ = m/τ + log z_τ,  T_τ = n/τ + log w
    ce = S − x[label]      kd = τ² (d/w + S_τ − T_τ)   (soft: without T_τ)

and the second pass writes  kd_weight · τ (e^{x/τ − S_τ} − e^{y/τ − T_τ}) + ce_weight (e^{x − S} − [v = label]).

Every lane of a block keeps its own maximum and sums, so that there is one cross-thread reduction per row instead of one
per block. In a lane, either the old sum or the new term is already relative to the new maximum, so that one exponential
e^{−|x − m|} is enough for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .terms import LogitRows

BLOCK, WARPS = 1024, 8  # measured on an H200


@triton.jit
def load_logits(row, columns, inside, softcap, CAP: tl.constexpr):
    """Logits in fp32, after the soft cap."""
    logits = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    if CAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # tanh
    return logits


@triton.jit
def grow(total, x, top, power, term):
    """Adds a term to a lane's sum. `top`: its maximum so far; `power` = e^{−|x − top|} rescales the smaller part."""
    return tl.where(x > top, total * power + term, total + power * term)


@triton.jit
def row_loss_kernel(
    student_CV, teacher_CV, labels_C, kd_C, ce_C, vocabulary, stride, teacher_stride,
    kd_weight, ce_weight, temperature, softcap, teacher_softcap,
    TEACHER: tl.constexpr, HOT: tl.constexpr, KL: tl.constexpr, CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA per row. HOT: the temperature is not 1. fp32 sums."""
    row = tl.program_id(0).to(tl.int64)
    student = student_CV + row * stride
    teacher = teacher_CV + row * teacher_stride
    label = tl.load(labels_C + row)
    at_label = load_logits(student, label, True, softcap, CAP)
    cold = 1.0 / temperature

    # Finite, so that lanes beyond the vocabulary do not produce NaN; their sums are rescaled to 0 at the end.
    LOWEST: tl.constexpr = -1e30
    m, n = tl.full([BLOCK], LOWEST, tl.float32), tl.full([BLOCK], LOWEST, tl.float32)
    z, hot_z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    w, d = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.where(inside, load_logits(student, columns, inside, softcap, CAP), LOWEST)
        z = grow(z, x, m, tl.exp(-tl.abs(x - m)), 1.0)
        if HOT:
            hot_z = grow(hot_z, x, m, tl.exp(-tl.abs(x - m) * cold), 1.0)
        m = tl.maximum(m, x)
        if TEACHER:
            y = tl.where(inside, load_logits(teacher, columns, inside, teacher_softcap, TEACHER_CAP), LOWEST)
            power = tl.exp(-tl.abs(y - n) * cold)
            w = grow(w, y, n, power, 1.0)
            d = grow(d, y, n, power, y - x if KL else -x)
            n = tl.maximum(n, y)

    m_row, n_row = tl.max(m, 0), tl.max(n, 0)
    student_lse = m_row + tl.log(tl.sum(z * tl.exp(m - m_row), 0))
    hot_lse = student_lse
    if HOT:
        hot_lse = m_row * cold + tl.log(tl.sum(hot_z * tl.exp((m - m_row) * cold), 0))
    tl.store(ce_C + row, student_lse - at_label)
    teacher_lse = 0.0
    if TEACHER:
        rescale = tl.exp((n - n_row) * cold)
        w_row = tl.sum(w * rescale, 0)
        teacher_lse = n_row * cold + tl.log(w_row)
        kd = tl.sum(d * rescale, 0) * cold / w_row + hot_lse
        if KL:
            kd -= teacher_lse
        tl.store(kd_C + row, kd * temperature * temperature)

    if GRAD:
        pull = kd_weight * temperature
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            x = load_logits(student, columns, inside, softcap, CAP)
            if HOT:
                grad = ce_weight * tl.exp(x - student_lse) + pull * tl.exp(x * cold - hot_lse)
            else:
                grad = (ce_weight + pull) * tl.exp(x - student_lse)
            grad -= tl.where(columns == label, ce_weight, 0.0)
            if TEACHER:
                y = load_logits(teacher, columns, inside, teacher_softcap, TEACHER_CAP)
                grad -= pull * tl.exp(y * cold - teacher_lse)
            if CAP:
                grad *= 1.0 - (x / softcap) * (x / softcap)
            tl.store(student + columns, grad.to(student_CV.dtype.element_ty), mask=inside)


def fused_row_loss(rows: LogitRows, grad: bool) -> None:
    """`row_loss` as one Triton kernel."""
    student_CV, teacher_CV, labels_C, terms, softcap, teacher_softcap, kd_C, ce_C = rows
    count, vocabulary = student_CV.shape
    teacher = student_CV if teacher_CV is None else teacher_CV
    assert student_CV.stride(1) == teacher.stride(1) == 1
    if not count:
        return
    with torch.cuda.device_of(student_CV):  # no effect for CPU tensors
        row_loss_kernel[(count,)](
            student_CV, teacher, labels_C, kd_C, ce_C, vocabulary, student_CV.stride(0), teacher.stride(0),
            float(terms.kd_weight), float(terms.ce_weight), float(terms.temperature), softcap or 1.0,
            teacher_softcap or 1.0, TEACHER=teacher_CV is not None, HOT=terms.temperature != 1.0,
            KL=terms.divergence == "forward_kl", CAP=bool(softcap), TEACHER_CAP=bool(teacher_softcap), GRAD=grad,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS,
        )  # fmt: skip
