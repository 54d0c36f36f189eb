"""The flash forward with the Hopper backward for every visibility but dense masks, on a GPU or simulated on the CPU.

The simulator runs each launch with another order of its asynchronous operations and fails on accesses that are not
ordered (tests/gluon_simulator).
"""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.call import AttentionCall, CallSpec
from affine_attention.ops.fused import plan as planning

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
hopper = by_route("flash", "hopper")
needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")


def documents(*lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in lengths])


def unmasked(keys: int, *ranges: tuple[int, int]) -> torch.Tensor:
    positions = torch.arange(keys)
    return torch.stack([(positions >= first) & (positions < last) for first, last in ranges])


# name: (B, H, G, T, S, D), visibility
CASES = {
    "full": ((1, 2, 1, 200, 260, 64), {}),
    "window": ((1, 2, 1, 300, 300, 64), {"is_causal": True, "window": 100}),
    "window 128": ((1, 2, 1, 260, 260, 128), {"is_causal": True, "window": 70}),
    "window of one": ((1, 2, 1, 130, 130, 64), {"is_causal": True, "window": 1}),
    "both ways": ((1, 2, 1, 200, 300, 72), {"window": 60}),
    "more keys": ((1, 2, 1, 100, 300, 64), {"is_causal": True}),
    "more queries": ((1, 2, 1, 300, 100, 64), {"is_causal": True}),
    "documents": ((2, 4, 2, 300, 300, 64), {"is_causal": True, "documents": ((20, 150, 130), (300,))}),
    "documents 128": ((2, 2, 1, 280, 280, 128), {"is_causal": True, "documents": ((20, 130, 130), (129, 151))}),
    "short documents": ((1, 2, 1, 200, 200, 64), {"is_causal": True, "documents": ((1, 2, 3, 64, 65, 60, 5),)}),
    "documents, full": ((1, 2, 2, 150, 150, 64), {"documents": ((70, 80),)}),
    "documents, chunk": ((1, 2, 1, 100, 260, 64), {"is_causal": True, "documents": ((130, 100, 30),)}),
    "documents out of order": ((1, 2, 1, 150, 150, 64), {"is_causal": True, "documents": ((70, 80),), "swap": True}),
    "left padding": ((2, 2, 1, 200, 200, 64), {"is_causal": True, "unmasked": ((0, 200), (70, 200))}),
    "right padding": ((2, 2, 1, 200, 200, 64), {"is_causal": True, "unmasked": ((0, 200), (0, 70))}),
    "no visible key": ((2, 2, 1, 150, 150, 64), {"is_causal": True, "unmasked": ((0, 0), (140, 150))}),
    "holes": ((1, 2, 1, 200, 200, 64), {"is_causal": True, "unmasked": ((0, 200),), "hole": (50, 60)}),
    "everything": (
        (2, 2, 1, 200, 260, 64),
        {"is_causal": True, "window": 90, "documents": ((20, 140, 100), (260,)), "unmasked": ((0, 250), (70, 260))},
    ),
}


# What the interpreter runs in `make test`: every kind of mask, with other parts of the equation each.
QUICK = [
    ("full", AFFINE), ("window", AFFINE), ("window of one", ALL), ("both ways", ()),
    ("more keys", AFFINE), ("more queries", ALL), ("documents 128", AFFINE), ("short documents", ALL),
    ("documents, chunk", AFFINE), ("documents out of order", AFFINE), ("left padding", ALL), ("no visible key", AFFINE),
    ("holes", ALL), ("everything", AFFINE),
]  # fmt: skip


def visibility_of(case: str) -> Visibility:
    (batch, _, _, queries, keys, _), options = CASES[case]
    options = dict(options)
    if "documents" in options:
        ids = documents(*options.pop("documents"))
        if options.pop("swap", False):
            ids = 1 - ids
        options["key_segments"] = ids.to(DEVICE)
        options["query_segments"] = ids[:, keys - queries :].contiguous().to(DEVICE)
    if "unmasked" in options:
        mask = unmasked(keys, *options.pop("unmasked"))
        if "hole" in options:
            mask[:, slice(*options.pop("hole"))] = False
        options["key_mask"] = mask.to(DEVICE)
    return Visibility(batch, queries, keys, DEVICE, **options)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", [AFFINE, ALL, ()], ids=["affine", "all", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case, names, dtype):
    if (case, names) not in QUICK:
        skip_for_time()
    shape = CASES[case][0]
    inputs, grad = make(*shape, names, dtype, nonnegative=True)
    others = [make(*shape, names, dtype, nonnegative=True, seed=n) for n in range(1, 2 if INTERPRETED else 8)]
    assert_right(inputs, grad, visibility_of(case), others, hopper, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("case", ["documents", "holes", "left padding", "no visible key", "window"])
@pytest.mark.parametrize("name", ["key", "value"])
def test_nonfinite_keys_reach_exactly_the_rows_that_see_them(case, name):
    """Within a document, future keys of a tile are not covered (ops/README.md), so the last key of one is changed."""
    if case == "documents" and name == "key":
        skip_for_time()
    shape = CASES[case][0]
    inputs, grad = make(*shape, AFFINE, DTYPES[0], nonnegative=True)
    visibility = visibility_of(case)
    right = results(hopper, inputs, grad, visibility, nonnegative_alpha=True)
    at = {"documents": 19, "holes": 55, "left padding": 3, "no visible key": 100, "window": 0}[case]
    changed = {n: x.clone() for n, x in inputs.items()}
    changed[name][:, :, at, 0] = float("nan")
    changed[name][:, :, at, 1] = float("inf")
    found = results(hopper, changed, grad, visibility, nonnegative_alpha=True)
    sees = visibility.dense().expand(shape[0], 1, shape[3], shape[4])[:, 0, :, at]
    out = found["out"].isnan().any(-1)
    assert torch.equal(out, sees[:, None].expand_as(out))
    hidden = ~sees[:, None].expand_as(out)
    assert torch.equal(found["out"][hidden], right["out"][hidden])
    gradient, expected = found["grad of query"][hidden], right["grad of query"][hidden]
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


@needs_triton
def test_coefficients_of_rows_without_keys_have_no_effect():
    case = "no visible key"
    inputs, grad = make(*CASES[case][0], ALL, DTYPES[0], nonnegative=True)
    for name in ("alpha", "beta", "gate"):
        inputs[name][0] = float("nan")
    found = results(hopper, inputs, grad, visibility_of(case), nonnegative_alpha=True)
    for name, x in found.items():
        part = x[0] if x.dim() > 1 else x
        assert torch.isfinite(part).all(), name
        if name != "grad of sink":
            assert not part.any(), name


@needs_gpu
def test_a_thousand_runs_agree():
    """All but dQ, whose sums have no fixed order, are bitwise equal."""
    inputs, grad = make(2, 8, 4, 700, 700, 128, AFFINE, DTYPES[0], nonnegative=True)
    ids = documents((100, 350, 250), (700,)).to(DEVICE)
    visibility = Visibility(2, 700, 700, DEVICE, is_causal=True, query_segments=ids, key_segments=ids)
    right = results(hopper, inputs, grad, visibility, nonnegative_alpha=True)
    eps = torch.finfo(DTYPES[0]).eps
    for _ in range(1000):
        for name, x in results(hopper, inputs, grad, visibility, nonnegative_alpha=True).items():
            if name == "grad of query":
                assert (x - right[name]).norm() <= eps * right[name].norm()
            else:
                assert torch.equal(x, right[name]), name


def route_on_hopper(monkeypatch, **changes):
    monkeypatch.setattr(planning, "capability_of", lambda x: 90)
    monkeypatch.setattr(planning, "why_not_cudnn", lambda call: None)
    keys = changes.pop("keys", 64)
    x = torch.zeros(1, 2, 64, changes.pop("dim", 64), dtype=changes.pop("dtype", torch.bfloat16))
    seen = Visibility(1, 64, keys, x.device, is_causal=True, window=changes.pop("window", 8))
    row = torch.zeros(x.shape[:3])
    gate = torch.zeros_like(x) if changes.pop("gate", False) else None
    given = {"alpha": row, "gate": gate, "visibility": seen, "softmax_scale": changes.pop("softmax_scale", 1.0)}
    key = torch.zeros(1, 2, keys, x.shape[-1], dtype=x.dtype)
    spec = CallSpec.of(AttentionCall.of(x, key, key, **given))
    for each in (spec.query, spec.key, spec.value):
        each.device = torch.device("cuda", 0)
    return planning.choose_route(spec, changes.pop("needs_gradient", True))


def test_which_kernels_serve_a_window_on_hopper(monkeypatch):
    assert route_on_hopper(monkeypatch).kernels == ("flash forward", "hopper backward")
    assert route_on_hopper(monkeypatch, dim=128).kernels == ("flash forward", "hopper backward")
    assert route_on_hopper(monkeypatch, dim=256, needs_gradient=False).kernels == ("flash",)
    refused = route_on_hopper(monkeypatch, dim=256)
    assert refused.kernels == ("flash",)
    assert "serve head dims 40 to 128" in refused.reason
    assert "got query of torch.float32" in route_on_hopper(monkeypatch, dtype=torch.float32).reason
    assert "positive softmax_scale" in route_on_hopper(monkeypatch, softmax_scale=-1.0).reason


def test_which_kernels_serve_fewer_queries_than_keys_on_hopper(monkeypatch):
    assert route_on_hopper(monkeypatch, window=None, keys=96, dim=128).kernels == ("gluon forward", "hopper backward")
    assert route_on_hopper(monkeypatch, window=None, keys=96).kernels == ("flash forward", "hopper backward")
    monkeypatch.setattr(planning, "GLUON_FORWARD", 64)
    monkeypatch.setattr(planning, "CUDNN_FORWARD", 0)
    assert route_on_hopper(monkeypatch, window=None, dim=128).kernels == ("gluon forward", "hopper backward")
    gated = route_on_hopper(monkeypatch, window=None, dim=128, gate=True)
    assert gated.kernels == ("cudnn forward", "hopper backward")
    assert route_on_hopper(monkeypatch, window=None, dim=64).kernels == ("hopper",)


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


@outside
@pytest.mark.slow
def test_every_case_in_the_interpreter():
    run_in_the_interpreter(__file__, in_full=True)
