"""The test tools themselves: the grid covers all pairs, and the tolerance catches errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from affine_attention import testing
from affine_attention.testing import (
    GRID,
    LAYOUTS,
    MAX_ERROR_RATIO,
    MAX_ROW_ERROR_RATIO,
    Case,
    accuracy,
    error_ratios,
    grid_cases,
    make_inputs,
    run,
    run_oracle,
    run_plain,
)


def test_the_grid_covers_every_pair_of_values():
    cases = grid_cases()

    def point(case):
        return {
            "mechanism": case.mechanism,
            "visibility": case.visibility,
            "heads_groups": (case.heads, case.groups),
            "length": case.queries,
            "dim": case.dim,
            "dtype": case.dtype,
            "layout": case.layout,
        }

    points = [point(case) for case in cases]
    for a, b in itertools.combinations(GRID, 2):
        assert {(p[a], p[b]) for p in points} >= set(itertools.product(GRID[a], GRID[b]))
    assert len(grid_cases(200)) == 200
    assert grid_cases(200)[:50] == grid_cases(200)[:50]


def test_layouts_hold_the_same_values():
    plain = make_inputs(Case("affine_gated"))
    for layout in LAYOUTS:
        other = make_inputs(Case("affine_gated", layout=layout))
        if layout != "expanded":
            assert torch.equal(other.tensors["query"], plain.tensors["query"])
    assert make_inputs(Case(layout="strided")).tensors["query"].stride(-1) == 2
    assert make_inputs(Case(layout="expanded")).grad_out.stride() == (0, 0, 0, 0)
    assert make_inputs(Case(layout="fused_qkv")).tensors["key"].stride(1) == 16
    with pytest.raises(ValueError, match="layout must be one of"):
        make_inputs(Case(layout="sideways"))
    with pytest.raises(ValueError, match="visibility must combine"):
        make_inputs(Case(visibility="causal+sometimes"))


@pytest.mark.parametrize("mechanism", GRID["mechanism"])
@pytest.mark.parametrize("visibility", ["full", "causal", "causal+padding", "head_mask"])
def test_both_baselines_compute_the_same_function_as_the_oracle(mechanism, visibility):
    inputs = make_inputs(Case(mechanism, visibility, dtype=torch.float64))
    truth = run_oracle(inputs)
    for plain in run_plain(inputs):
        for name in truth:
            torch.testing.assert_close(plain[name], truth[name])


@pytest.mark.parametrize(
    ("name", "factor"), [("out", 1.0001), ("grad_key", 1.0001), ("grad_beta", 1.0001), ("grad_query", torch.nan)]
)
def test_a_small_error_or_nan_is_caught(monkeypatch, name, factor):
    case = Case("affine")
    assert max(error_ratios(case).values()) <= MAX_ERROR_RATIO

    def wrong(inputs, impl):
        result = run(inputs, impl)
        return result if impl == "reference" else result | {name: result[name] * factor}

    monkeypatch.setattr(testing, "run", wrong)
    assert not error_ratios(case)[name] <= MAX_ERROR_RATIO


@pytest.mark.parametrize("shift", [1e-5, torch.nan])
def test_one_wrong_row_among_many_is_caught_by_the_worst_row(monkeypatch, shift):
    case = Case("affine", queries=1000, keys=1000, dtype=torch.float32)
    norm, worst_row = accuracy(case)
    assert norm["out"] <= MAX_ERROR_RATIO
    assert worst_row["out"] <= MAX_ROW_ERROR_RATIO

    def with_one_wrong_row(inputs, impl):
        result = run(inputs, impl)
        if impl != "reference":
            result["out"][0, 1, 777] += shift
        return result

    monkeypatch.setattr(testing, "run", with_one_wrong_row)
    norm, worst_row = accuracy(case)
    assert not worst_row["out"] <= MAX_ROW_ERROR_RATIO
    if shift < 1:
        assert norm["out"] <= MAX_ERROR_RATIO  # the norm of the whole tensor hides the row


def test_a_dropped_sink_is_caught_in_bf16(monkeypatch):
    """A sink of zero would hide it; the inputs use large, distinct ones."""

    def dropped(inputs, impl):
        if impl == "reference":
            return run(inputs, impl)
        without = replace(inputs, tensors={**inputs.tensors, "sink": None})
        return run(inputs, impl) | {"out": run(without, impl)["out"]}

    monkeypatch.setattr(testing, "run", dropped)
    assert error_ratios(Case("sink", dtype=torch.bfloat16))["out"] > MAX_ERROR_RATIO
