"""The Gluon kernels for every visibility but dense masks, forward and backward, on a GPU or simulated on the CPU.

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
gluon, after_flash = by_route("gluon", "hopper"), by_route("flash", "hopper")
large = by_route("gluon", "hopper", large=True)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch):
    """On the CPU two CTAs process all blocks, so that every CTA continues with another block."""
    if INTERPRETED:
        monkeypatch.setattr(gluon_forward, "num_sms", lambda device: 2)


def documents(*lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in lengths])


def unmasked(keys: int, *ranges: tuple[int, int]) -> torch.Tensor:
    positions = torch.arange(keys)
    return torch.stack([(positions >= first) & (positions < last) for first, last in ranges])


# name: (B, H, G, T, S, D), visibility
CASES = {
    "causal": ((1, 4, 2, 300, 300, 64), {"is_causal": True}),
    "causal 128": ((1, 2, 1, 257, 257, 128), {"is_causal": True}),
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
    ("causal 128", ALL), ("full", AFFINE), ("window", AFFINE), ("window of one", ALL), ("both ways", ()),
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
    assert_right(inputs, grad, visibility_of(case), others, gluon, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("names", [AFFINE, ALL], ids=["affine", "all"])
@pytest.mark.parametrize("case", ["documents", "documents 128", "everything", "more queries", "window"])
def test_the_backward_after_the_flash_forward(case, names):
    if (case, names) not in (("documents 128", AFFINE), ("everything", ALL)):
        skip_for_time()
    inputs, grad = make(*CASES[case][0], names, DTYPES[0])
    assert_right(inputs, grad, visibility_of(case), function=after_flash)


@needs_triton
@pytest.mark.parametrize("case", ["causal", "causal 128"])
def test_large_causal_calls_keep_marks_instead_of_o(case):
    if case == "causal":
        skip_for_time()
    inputs, grad = make(*CASES[case][0], AFFINE, DTYPES[0], nonnegative=True)
    assert_right(inputs, grad, visibility_of(case), function=large, nonnegative_alpha=True)


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
    right = results(gluon, inputs, grad, visibility, nonnegative_alpha=True)
    at = {"documents": 19, "holes": 55, "left padding": 3, "no visible key": 100, "window": 0}[case]
    changed = {n: x.clone() for n, x in inputs.items()}
    changed[name][:, :, at, 0] = float("nan")
    changed[name][:, :, at, 1] = float("inf")
    found = results(gluon, changed, grad, visibility, nonnegative_alpha=True)
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
    found = results(gluon, inputs, grad, visibility_of(case), nonnegative_alpha=True)
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
    right = results(gluon, inputs, grad, visibility, nonnegative_alpha=True)
    eps = torch.finfo(DTYPES[0]).eps
    for _ in range(1000):
        for name, x in results(gluon, inputs, grad, visibility, nonnegative_alpha=True).items():
            if name == "grad of query":
                assert (x - right[name]).norm() <= eps * right[name].norm()
            else:
                assert torch.equal(x, right[name]), name


def route_on_hopper(monkeypatch, setting, **changes):
    monkeypatch.setattr(planning, "capability_of", lambda x: 90)
    monkeypatch.setattr(planning, "why_not_cudnn", lambda call: None)
    monkeypatch.setattr(planning, "EXPERIMENTAL", planning.read_experiments(setting))
    x = torch.zeros(1, 2, 64, changes.pop("dim", 64), dtype=changes.pop("dtype", torch.bfloat16))
    seen = Visibility(1, 64, 64, x.device, is_causal=True, window=changes.pop("window", 8))
    row = torch.zeros(x.shape[:3])
    given = {"alpha": row, "visibility": seen, "softmax_scale": changes.pop("softmax_scale", 1.0)}
    spec = CallSpec.of(AttentionCall.of(x, x, x, **given))
    for each in (spec.query, spec.key, spec.value):
        each.device = torch.device("cuda", 0)
    return planning.choose_route(spec, True)


def test_the_gluon_forward_serves_the_calls_that_the_environment_names(monkeypatch):
    assert route_on_hopper(monkeypatch, "").kernels == ("flash",)
    assert route_on_hopper(monkeypatch, "ranges").kernels == ("gluon forward", "hopper backward")
    assert route_on_hopper(monkeypatch, "ranges", window=None).kernels == ("hopper",)
    assert route_on_hopper(monkeypatch, "ranges,causal", window=None).kernels == ("gluon forward", "hopper backward")
    assert route_on_hopper(monkeypatch, "ranges,causal", window=None, dim=256).kernels == ("cudnn",)
    refused = route_on_hopper(monkeypatch, "ranges", dim=256)
    assert refused.kernels == ("flash",)
    assert "serve head dims 40 to 128" in refused.reason
    assert "got query of torch.float32" in route_on_hopper(monkeypatch, "ranges", dtype=torch.float32).reason
    assert "positive softmax_scale" in route_on_hopper(monkeypatch, "ranges", softmax_scale=-1.0).reason


def test_an_unknown_setting_is_an_error():
    assert planning.read_experiments("causal, ranges,") == {"causal", "ranges"}
    rule = "AFFINE_EXPERIMENTAL must be a list of ranges, causal, deterministic, separated by commas, got 'all', 'yes'"
    with pytest.raises(ValueError, match=rule):
        planning.read_experiments("yes,ranges,all")


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


@outside
@pytest.mark.slow
def test_every_case_in_the_interpreter():
    run_in_the_interpreter(__file__, in_full=True)
