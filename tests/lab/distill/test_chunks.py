"""The chunked loss equals the plain formula in value and gradients: against fp64, and against other libraries."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from affine_attention.lab.distill.chunks import IGNORED, Head, LossParts, chunked_loss, row_loss
from affine_attention.lab.distill.terms import LogitRows, Terms

TOKENS, VOCABULARY, WIDTH, TEACHER_WIDTH = 23, 67, 12, 20
LEAVES = ("hidden", "weight", "bias")


def make(dtype=torch.float64, tokens=TOKENS, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(spread).to(dtype)

    tensors = {
        "hidden": normal(tokens, WIDTH), "weight": normal(VOCABULARY, WIDTH), "bias": normal(VOCABULARY),
        "teacher_hidden": normal(tokens, TEACHER_WIDTH), "teacher_weight": normal(VOCABULARY, TEACHER_WIDTH),
        "teacher_bias": normal(VOCABULARY),
    }  # fmt: skip
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = IGNORED
    return tensors, labels


def plain_loss(tensors, labels, terms, softcap=None, teacher_softcap=None):
    """The straightforward version: full logits and autograd."""
    kept = labels != IGNORED

    def logits(prefix, cap):
        raw = tensors[f"{prefix}hidden"][kept] @ tensors[f"{prefix}weight"].T + tensors[f"{prefix}bias"]
        return cap * torch.tanh(raw / cap) if cap else raw

    student, teacher = logits("", softcap), logits("teacher_", teacher_softcap)
    log_q, log_p = (F.log_softmax(x / terms.temperature, -1) for x in (student, teacher))
    inside = log_p - log_q if terms.divergence == "forward_kl" else -log_q
    kd = terms.temperature**2 * (log_p.exp() * inside).sum()
    ce = F.cross_entropy(student, labels[kept], reduction="sum")
    return LossParts(terms.kd_weight * kd + terms.ce_weight * ce, kd, ce, int(kept.sum()))


def ours(tensors, labels, terms, softcap=None, teacher_softcap=None, rows=5, **options):
    return chunked_loss(
        tensors["hidden"], Head(tensors["weight"], tensors["bias"], softcap), labels, tensors["teacher_hidden"],
        Head(tensors["teacher_weight"], tensors["teacher_bias"], teacher_softcap), terms,
        chunk_bytes=rows * VOCABULARY * tensors["hidden"].element_size(), **options,
    )  # fmt: skip


def with_gradients(function, tensors, labels, *args, factor=1.0, **kwargs):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    parts = function(leaves, labels, *args, **kwargs)
    (parts.total_sum * factor).backward()
    return parts, {name: leaves[name].grad for name in LEAVES}, leaves


TERMS = [
    Terms(),
    Terms(divergence="soft_cross_entropy"),
    Terms(0.7, 0.3),
    Terms(0.7, 0.3, temperature=2.5),
    Terms(1.0, 0.0, temperature=0.5, divergence="soft_cross_entropy"),
    Terms(0.0, 2.0),
]


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize(("softcap", "teacher_softcap"), [(None, None), (3.0, 2.0)])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_values_and_gradients_are_those_of_the_plain_formula(terms, softcap, teacher_softcap, rows):
    tensors, labels = make()
    expected, expected_grads, _ = with_gradients(plain_loss, tensors, labels, terms, softcap, teacher_softcap, factor=3)
    parts, grads, leaves = with_gradients(ours, tensors, labels, terms, softcap, teacher_softcap, rows, factor=3)
    assert parts.tokens == expected.tokens == int((labels != IGNORED).sum()) < TOKENS
    torch.testing.assert_close(parts.total_sum, expected.total_sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.ce_sum, expected.ce_sum, rtol=1e-12, atol=0)
    if terms.kd_weight:
        torch.testing.assert_close(parts.kd_sum, expected.kd_sum, rtol=1e-12, atol=0)
    else:
        assert parts.kd_sum is None
    assert not parts.ce_sum.requires_grad
    for name in LEAVES:
        torch.testing.assert_close(grads[name], expected_grads[name], rtol=1e-11, atol=1e-13, msg=name)
    assert all(leaves[name].grad is None for name in leaves if name.startswith("teacher"))


def test_gradcheck():
    tensors, labels = make(tokens=6)

    class Repeatable(torch.autograd.Function):
        """gradcheck goes backward twice through one forward; the loss frees its gradients in the first backward."""

        @staticmethod
        def forward(ctx, *given):
            ctx.save_for_backward(*given)
            return total(*given).detach()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return torch.autograd.grad(total(*given), given, grad)

    def total(*given):
        return ours(
            tensors | dict(zip(LEAVES, given, strict=True)), labels, Terms(0.6, 0.4, 2.0), softcap=4.0
        ).total_sum

    assert torch.autograd.gradcheck(
        Repeatable.apply, [tensors[name].requires_grad_() for name in LEAVES], fast_mode=True
    )


def test_a_second_backward_raises():
    tensors, labels = make()
    parts = ours({name: x.requires_grad_() for name, x in tensors.items()}, labels, Terms())
    parts.total_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as error:
        parts.total_sum.backward()
    assert "compute the loss again" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_good_as_plain_pytorch(dtype):
    """Error against fp64 of the same numbers, at most twice that of plain PyTorch with fp32 softmax."""
    tensors, labels = make(dtype, tokens=200)
    exact, exact_grads, _ = with_gradients(plain_loss, {n: x.double() for n, x in tensors.items()}, labels, Terms(1, 1))

    def half_plain(tensors, labels, terms):
        kept = labels != IGNORED
        student, teacher = (
            F.linear(tensors[f"{p}hidden"][kept], tensors[f"{p}weight"], tensors[f"{p}bias"]).float()
            for p in ("", "teacher_")
        )
        kd = F.kl_div(F.log_softmax(student, -1), F.log_softmax(teacher, -1), reduction="sum", log_target=True)
        ce = F.cross_entropy(student, labels[kept], reduction="sum")
        return LossParts(kd + ce, kd, ce, 0)

    plain, plain_grads, _ = with_gradients(half_plain, tensors, labels, Terms(1, 1))
    parts, grads, _ = with_gradients(ours, tensors, labels, Terms(1, 1), rows=7)
    assert parts.total_sum.dtype == torch.float32
    tolerance = exact.total_sum.item() * torch.finfo(dtype).eps
    assert abs(parts.total_sum - exact.total_sum) <= 2 * abs(plain.total_sum - exact.total_sum) + tolerance
    for name in LEAVES:
        assert grads[name].dtype == dtype
        found, yardstick = ((g[name].double() - exact_grads[name]).norm() for g in (grads, plain_grads))
        assert found <= 2 * yardstick, f"{name}: {found} against {yardstick}"


def test_under_autocast_products_are_bf16_and_weights_stay_fp32():
    tensors, labels = make(torch.float32)
    exact, exact_grads, _ = with_gradients(plain_loss, tensors, labels, Terms())
    with torch.autocast("cpu", torch.bfloat16):
        parts, grads, _ = with_gradients(ours, tensors, labels, Terms())
    same, same_grads, _ = with_gradients(ours, tensors, labels, Terms(), compute_dtype=torch.bfloat16,
                                         teacher_dtype=torch.bfloat16)  # fmt: skip
    assert torch.equal(parts.total_sum, same.total_sum)
    assert parts.total_sum != exact.total_sum
    for name in LEAVES:
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name], same_grads[name])
        assert (grads[name] - exact_grads[name]).norm() < 0.05 * exact_grads[name].norm()


def test_the_head_accumulates_its_gradient_in_fp32():
    """A weight in bf16 whose chunks were summed in bf16 would stall: 300 times 1 ends at 256."""
    hidden = torch.ones(300, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [-100.0]], dtype=torch.bfloat16, requires_grad=True)
    labels = torch.ones(300, dtype=torch.long)
    chunked_loss(hidden, Head(weight), labels, terms=Terms(0, 1), chunk_bytes=1).total_sum.backward()
    assert weight.grad.tolist() == [[300.0], [-300.0]]


def test_micro_batches_add_up_to_the_batch():
    tensors, labels = make()
    whole, grads, _ = with_gradients(ours, tensors, labels, Terms(0.5, 0.5))
    totals, counts, sums = [], [], dict.fromkeys(("weight", "bias"), 0)
    for chosen in (slice(0, 3), slice(3, 16), slice(16, None)):
        part = {n: x[chosen] if "hidden" in n else x for n, x in tensors.items()}
        found, part_grads, _ = with_gradients(ours, part, labels[chosen], Terms(0.5, 0.5))
        totals.append(found.total_sum)
        counts.append(found.tokens)
        sums = {n: sums[n] + part_grads[n] for n in sums}
        torch.testing.assert_close(part_grads["hidden"], grads["hidden"][chosen], rtol=1e-12, atol=1e-14)
    assert sum(counts) == whole.tokens
    torch.testing.assert_close(sum(totals), whole.total_sum, rtol=1e-12, atol=0)
    for name, x in sums.items():
        torch.testing.assert_close(x, grads[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("terms", [Terms(1, 1), Terms(0, 1)], ids=str)
def test_a_batch_without_tokens_is_zero(terms):
    tensors, labels = make(torch.float32)
    parts, grads, _ = with_gradients(ours, tensors, torch.full_like(labels, IGNORED), terms)
    assert parts.tokens == 0
    assert parts.total_sum.item() == parts.ce_sum.item() == 0.0
    assert all(not grads[name].any() for name in LEAVES)


def test_masked_positions_are_not_computed():
    tensors, labels = make(torch.float32)
    clean, grads, _ = with_gradients(ours, tensors, labels, Terms(1, 1))
    for name in ("hidden", "teacher_hidden"):
        tensors[name][labels == IGNORED] = torch.nan
    parts, dirty_grads, _ = with_gradients(ours, tensors, labels, Terms(1, 1))
    assert torch.equal(parts.total_sum, clean.total_sum)
    assert all(torch.equal(grads[name], dirty_grads[name]) for name in LEAVES)


def test_a_frozen_head_and_no_grad():
    tensors, labels = make()
    tensors["hidden"].requires_grad_()
    ours(tensors, labels, Terms()).total_sum.backward()
    assert tensors["weight"].grad is None
    assert tensors["hidden"].grad.any()
    with torch.no_grad():
        parts = ours(tensors, labels, Terms())
    assert not parts.total_sum.requires_grad


def test_large_logits_stay_finite():
    tensors, labels = make(torch.float32, spread=30.0)
    tensors["bias"] += 1e4
    parts, grads, _ = with_gradients(ours, tensors, labels, Terms(1, 1, 2.0))
    expected, exact_grads, _ = with_gradients(
        plain_loss, {n: x.double() for n, x in tensors.items()}, labels, Terms(1, 1, 2.0)
    )
    assert parts.total_sum.item() == pytest.approx(expected.total_sum.item(), rel=1e-3)
    for name in LEAVES:
        assert (grads[name] - exact_grads[name]).norm() < 1e-3 * exact_grads[name].norm() + 1e-3


def test_kd_and_its_gradient_are_zero_for_equal_logits():
    rows = torch.randn(3, 8)
    kd, ce = torch.zeros(3), torch.zeros(3)
    expected = F.cross_entropy(rows, torch.tensor([0, 1, 2]), reduction="none")
    row_loss(LogitRows(rows, rows.clone(), torch.tensor([0, 1, 2]), Terms(), None, None, kd, ce), True)
    torch.testing.assert_close(kd, torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows, torch.zeros(3, 8), atol=1e-6, rtol=0)  # now the gradient
    torch.testing.assert_close(ce, expected)


def test_liger_agrees():
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    tensors, labels = make(torch.float32)
    labels[-1] = 0
    for temperature, (kd, ce) in itertools.product((1.0, 2.0), ((1.0, 0.0), (0.6, 0.4))):
        terms = Terms(kd, ce, temperature)
        theirs = liger.LigerFusedLinearJSDLoss(
            weight_hard_loss=ce, weight_soft_loss=kd, beta=0.0, ignore_index=IGNORED, temperature=temperature,
            compiled=False, chunk_size=5, return_soft_hard_loss=True,
        )  # fmt: skip
        names = ("hidden", "weight", "teacher_hidden", "teacher_weight", "bias", "teacher_bias")
        leaves = {name: tensors[name].clone().requires_grad_(name in LEAVES) for name in names}
        first, rest = list(leaves.values())[:4], list(leaves.values())[4:]
        total, soft, hard = theirs(*first, labels, *rest)
        parts, grads, _ = with_gradients(ours, tensors, labels, terms)
        # Its soft loss has no temperature², and both are means over the tokens that are not ignored.
        assert parts.kd_sum.item() / temperature**2 / parts.tokens == pytest.approx(soft.item(), rel=1e-4)
        assert parts.ce_sum.item() / parts.tokens == pytest.approx(hard.item(), rel=1e-4)
        if temperature == 1:
            total.backward()
            for name in LEAVES:
                torch.testing.assert_close(grads[name] / parts.tokens, leaves[name].grad, rtol=1e-4, atol=1e-6)


def test_trl_agrees():
    trl = pytest.importorskip("trl.kernels.chunked_divergence")
    tensors, labels = make(torch.float32)
    kept = labels != IGNORED
    terms = Terms(temperature=2.0)
    leaves = {name: x.clone().requires_grad_(name in LEAVES) for name, x in tensors.items()}
    per_token, _ = trl.ChunkedDivergenceFunction.apply(
        leaves["hidden"], leaves["weight"], leaves["bias"], leaves["teacher_hidden"], leaves["teacher_weight"],
        leaves["teacher_bias"], 0.0, terms.temperature, 1.0, 3.0, 1.0, 2.0,
    )  # fmt: skip
    theirs = (per_token * kept).sum()
    theirs.backward()
    parts, grads, _ = with_gradients(ours, tensors, labels, terms, softcap=3.0, teacher_softcap=2.0)
    assert float(parts.kd_sum) == pytest.approx(theirs.item() * terms.temperature**2, rel=1e-5)
    for name in LEAVES:
        torch.testing.assert_close(grads[name], leaves[name].grad * terms.temperature**2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, y: (t | {"weight": t["weight"][:, :3]}, y), ("student_head.weight [V, M]", "[67, 3]")),
        (lambda t, y: (t, y[:4]), ("labels must be [N] = [23]", "[4]")),
        (lambda t, y: (t, y.clone().fill_(67)), ("0 to 66", "67")),
        (lambda t, y: (t | {"teacher_hidden": t["teacher_hidden"][:4]}, y), ("teacher_hidden", "[23, 20]", "[4, 20]")),
        (lambda t, y: (t | {"teacher_weight": t["teacher_weight"][:60]}, y), ("67", "60", "truncate_vocabulary=True")),
    ],
)
def test_bad_tensors(change, words):
    tensors, labels = change(*make())
    with pytest.raises(ValueError) as error:
        ours(tensors, labels, Terms())
    assert all(word in str(error.value) for word in words), error.value


def test_a_weight_for_a_missing_teacher():
    tensors, labels = make()
    with pytest.raises(ValueError) as error:
        chunked_loss(tensors["hidden"], Head(tensors["weight"]), labels)
    assert "kd_weight=0 and ce_weight=1" in str(error.value)
