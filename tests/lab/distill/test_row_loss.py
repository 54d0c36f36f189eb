"""Row losses against fp64 in difficult cases for fp32: offsets, peaks, soft caps, temperatures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from affine_attention.lab.distill.chunks import Head, chunked_loss
from affine_attention.lab.distill.row_loss import SCRATCH_COPIES, row_loss
from affine_attention.lab.distill.terms import LogitRows, Terms

ROWS, VOCABULARY = 6, 3001
LOGITS = {  # name: (student's spread and offset, teacher's spread and offset)
    "usual": (2, 0, 2, 0),
    "the student's are near 1000": (2, 1000, 2, 0),
    "the teacher's are near -1000": (2, 0, 2, -1000),
    "both are far off": (2, 1000, 2, 1000),
    "a peaked teacher": (2, 0, 40, 0),
    "both are peaked": (40, 0, 40, 0),
    "nearly the same": (2, 0, 0, 0),
}
TERMS = [
    Terms(),
    Terms(0.7, 0.3),
    Terms(0.7, 0.3, 0.5),
    Terms(1, 0, 4.0),
    Terms(0.5, 0.5, 4.0, "soft_cross_entropy"),
    Terms(1, 1, 1.0, "soft_cross_entropy"),
]


def make(name):
    generator = torch.Generator().manual_seed(1)
    spread, offset, teacher_spread, teacher_offset = LOGITS[name]
    noise, teacher_noise = torch.randn(2, ROWS, VOCABULARY, generator=generator)
    student = noise * spread + offset
    teacher = teacher_noise * teacher_spread + teacher_offset if teacher_spread else student + 0.01 * teacher_noise
    return student, teacher, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def plain(student, teacher, labels, terms, cap, teacher_cap):
    """kd, ce and the gradient, by autograd."""
    raw = student.clone().requires_grad_()
    x = cap * torch.tanh(raw / cap) if cap else raw
    y = teacher_cap * torch.tanh(teacher / teacher_cap) if teacher_cap else teacher
    log_q, log_p = (F.log_softmax(z / terms.temperature, -1) for z in (x, y))
    inside = log_p - log_q if terms.divergence == "forward_kl" else -log_q
    kd = terms.temperature**2 * (log_p.exp() * inside).sum(-1)
    ce = F.cross_entropy(x, labels, reduction="none")
    (grad,) = torch.autograd.grad((terms.kd_weight * kd + terms.ce_weight * ce).sum(), raw)
    return kd.detach(), ce.detach(), grad


def ours(student, teacher, labels, terms, cap, teacher_cap, scratch=None):
    student, teacher = student.clone(), teacher.clone()
    kd, ce = torch.empty(2, ROWS)
    row_loss(LogitRows(student, teacher, labels, terms, cap, teacher_cap, kd, ce), True, scratch)
    return kd, ce, student


@pytest.mark.parametrize("caps", [(None, None), (30.0, 20.0)], ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("name", LOGITS)
def test_no_less_accurate_than_plain_pytorch(name, terms, caps):
    student, teacher, labels = make(name)
    exact = plain(student.double(), teacher.double(), labels, terms, *caps)
    found, yardstick = (function(student, teacher, labels, terms, *caps) for function in (ours, plain))
    # Relative to typical values, not to a kd near 0, where a rounding error of 1e-7 is large.
    sizes = (terms.temperature**2 * 10, 10, exact[2].norm().item())
    for what, a, b, truth, size in zip(("kd", "ce", "gradient"), found, yardstick, exact, sizes, strict=True):
        error, allowed = (a - truth).norm(), 2 * (b - truth).norm() + 5e-7 * size
        assert error <= allowed, f"{what}: {error} over {allowed}"


@pytest.mark.parametrize("terms", [*TERMS, Terms(0, 1)], ids=str)
@pytest.mark.parametrize("caps", [(None, None), (30.0, 20.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uninitialised_scratch_memory_does_not_matter(dtype, terms, caps):
    student, teacher, labels = make("usual")
    given = (student.to(dtype), teacher.to(dtype), labels, terms, *caps)
    scratch = torch.full((SCRATCH_COPIES, ROWS + 2, VOCABULARY), torch.nan)
    for a, b in zip(ours(*given), ours(*given, scratch=scratch), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 37])
def test_the_parts_of_a_chunk_fit_together(tokens, with_bias):
    """fp32, with odd chunks whose teacher logits are computed in halves."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    hidden, weight, teacher_hidden, teacher_weight = (
        normal(tokens, 16), normal(VOCABULARY, 16) / 4, normal(tokens, 24), normal(VOCABULARY, 24) / 4,
    )  # fmt: skip
    bias, teacher_bias = (normal(VOCABULARY), normal(VOCABULARY)) if with_bias else (None, None)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)

    def run(dtype):
        leaves = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, bias)]
        teacher = Head(teacher_weight.to(dtype), None if teacher_bias is None else teacher_bias.to(dtype))
        parts = chunked_loss(
            leaves[0], Head(*leaves[1:]), labels, teacher_hidden.to(dtype), teacher, Terms(1, 1),
            chunk_bytes=7 * VOCABULARY * dtype.itemsize,
        )  # fmt: skip
        parts.total_sum.backward()
        return parts.total_sum.detach(), [x.grad for x in leaves if x is not None]

    (total, grads), (exact, exact_grads) = run(torch.float32), run(torch.float64)
    assert float(total) == pytest.approx(float(exact), rel=1e-5)
    for found, truth in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)
