"""The Gluon forward, with the Hopper backward after it, on a GPU or simulated on the CPU.

The simulator runs each launch with another order of its asynchronous operations and fails on accesses that are not
ordered (tests/gluon_simulator).
"""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused.hopper import gluon_forward

from ....interpreter import run_in_the_interpreter, skip_for_time
from ..cudnn.test_cudnn import (
    AFFINE,
    ALL,
    DEVICE,
    INTERPRETED,
    assert_right,
    make,
    needs_triton,
    on_this_device,  # noqa: F401
    outside,
    results,
)
from ..routes import by_route

DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
gluon = by_route("gluon", "hopper")
large = by_route("gluon", "hopper", large=True)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch):
    """On the CPU two CTAs process all blocks, so that every CTA continues with another block."""
    if INTERPRETED:
        monkeypatch.setattr(gluon_forward, "num_sms", lambda device: 2)


# name: (B, H, G, T, S, D)
CASES = {
    "causal": (1, 4, 2, 300, 300, 72),
    "causal 128": (1, 2, 1, 257, 257, 128),
    "short": (2, 2, 2, 5, 5, 96),
    "more keys": (1, 2, 1, 100, 300, 128),
    "many keys": (1, 2, 1, 150, 1300, 128),
    "more queries": (1, 2, 1, 300, 100, 80),
}
# What the interpreter runs in `make test`, with other parts of the equation each.
QUICK = [("causal 128", ALL), ("short", ()), ("more keys", AFFINE), ("many keys", AFFINE), ("more queries", ALL)]


def visibility_of(case: str) -> Visibility:
    batch, _, _, queries, keys, _ = CASES[case]
    return Visibility(batch, queries, keys, DEVICE, is_causal=True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [AFFINE, ALL, ()], ids=["affine", "all", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case, names, dtype):
    if (case, names) not in QUICK:
        skip_for_time()
    shape = CASES[case]
    inputs, grad = make(*shape, names, dtype, nonnegative=True)
    others = [make(*shape, names, dtype, nonnegative=True, seed=n) for n in range(1, 2 if INTERPRETED else 8)]
    assert_right(inputs, grad, visibility_of(case), others, gluon, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("case", ["causal", "causal 128"])
def test_large_causal_calls_keep_marks_instead_of_o(case):
    if case == "causal":
        skip_for_time()
    inputs, grad = make(*CASES[case], AFFINE, DTYPES[0], nonnegative=True)
    assert_right(inputs, grad, visibility_of(case), function=large, nonnegative_alpha=True)


@needs_triton
def test_coefficients_of_rows_without_keys_have_no_effect():
    inputs, grad = make(*CASES["more queries"], ALL, DTYPES[0], nonnegative=True)
    for name in ("alpha", "beta", "gate"):
        inputs[name][:, :, :200] = float("nan")
    found = results(gluon, inputs, grad, visibility_of("more queries"), nonnegative_alpha=True)
    for name, x in found.items():
        assert torch.isfinite(x).all(), name
        if x.dim() > 2 and x.shape[2] == 300:
            assert not x[:, :, :200].any(), name


@needs_gpu
def test_a_thousand_runs_agree():
    """All but dQ, whose sums have no fixed order, are bitwise equal."""
    inputs, grad = make(2, 8, 4, 700, 900, 128, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, 700, 900, DEVICE, is_causal=True)
    right = results(gluon, inputs, grad, visibility, nonnegative_alpha=True)
    eps = torch.finfo(DTYPES[0]).eps
    for _ in range(1000):
        for name, x in results(gluon, inputs, grad, visibility, nonnegative_alpha=True).items():
            if name == "grad of query":
                assert (x - right[name]).norm() <= eps * right[name].norm()
            else:
                assert torch.equal(x, right[name]), name


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


@outside
@pytest.mark.slow
def test_every_case_in_the_interpreter():
    run_in_the_interpreter(__file__, in_full=True)
