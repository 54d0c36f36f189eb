"""The statistics behind the claims; the softmax part of the first token against a direct measurement."""

import math

import numpy as np
import pytest
import torch

from affine_attention import attention_weights
from affine_attention.lab.inspection.capture import AttentionCall
from affine_attention.lab.inspection.inspect import summarise
from affine_attention.lab.inspection.tally import LayerTally
from affine_attention.lab.report import attention_measures as measured
from affine_attention.lab.report.collect import Run
from affine_attention.lab.run import RunFolder
from affine_attention.nn import Mechanism

LAYERS, HEADS, LENGTH, N = 2, 3, 20, 24


def inspected(mechanism, seed=0):
    """(the run of an inspection of random queries and keys, mean(α p₁) / mean(α) from the weights themselves)."""
    make = torch.Generator().manual_seed(seed)
    tallies, running, direct = [], [], []
    for layer in range(LAYERS):
        query, key = (torch.randn(1, HEADS, LENGTH, 8, generator=make, dtype=torch.float64) for _ in range(2))
        sink = torch.randn(HEADS, generator=make, dtype=torch.float64) if mechanism.sink == "learned" else None
        alpha = torch.rand(1, HEADS, LENGTH, generator=make, dtype=torch.float64) if mechanism.has_alpha else None
        average = torch.rand(HEADS, generator=make, dtype=torch.float64)
        beta = (average[:, None] - alpha) / N if mechanism.bias else None
        call = AttentionCall(layer, query, key, key, 0.3, alpha, beta, sink, is_causal=True)
        tally = LayerTally(HEADS)
        tally.add(call)
        tallies.append(tally)
        running.append(average.tolist())
        p = attention_weights(query, key, sink=sink, is_causal=True, softmax_scale=0.3)
        scaled = p if alpha is None else alpha[..., None] * p
        direct.append((scaled[0, :, :, 0].sum(-1) / scaled[0].sum((-1, -2))).numpy())
    found = {**summarise(tallies), "mechanism": mechanism.to_dict(), "length": LENGTH}
    found["running_alpha"] = running if mechanism.bias else None
    return Run(RunFolder("nowhere"), {}, inspection=found), float(np.mean(direct))


@pytest.mark.parametrize("name", ["softmax", "sink", "affine_no_bias", "affine"])
def test_the_first_token_of_the_softmax_part_is_what_the_weights_say(name):
    run, direct = inspected(Mechanism.named(name, bias_length=N))
    assert measured.first_token_of_softmax(run) == pytest.approx(direct, rel=1e-6)
    assert measured.first_token_of_softmax(of_earlier_version(run)) == pytest.approx(direct, rel=1e-6)
    if name == "affine":
        assert measured.first_token(run) != pytest.approx(direct, rel=0.05)


def of_earlier_version(run):
    """The run with an inspection that does not store the share of the softmax part."""
    first = {key: value for key, value in run.inspection["first_token"].items() if key != "softmax"}
    return Run(run.folder, {}, inspection={**run.inspection, "first_token": first})


def test_missing_means_give_nan():
    run = of_earlier_version(inspected(Mechanism.named("affine", bias_length=N))[0])
    for changes in ({"bias_length": "visible"}, {"bias_length": LENGTH - 1}, {"sink": "learned"}):
        other = Run(run.folder, {}, inspection={**run.inspection, "mechanism": run.inspection["mechanism"] | changes})
        assert math.isnan(measured.first_token_of_softmax(other))
    held = {**run.inspection["first_token"], "softmax": [[0.25] * HEADS] * LAYERS}
    other = Run(run.folder, {}, inspection={**run.inspection, "first_token": held})
    assert measured.first_token_of_softmax(other) == 0.25, "a stored softmax share is used as it is"


def test_the_entropy_splits_into_what_was_learned_and_what_beta_adds():
    run, _ = inspected(Mechanism.named("affine", bias_length=N))
    whole, learned, added = (
        read(run)
        for read in (
            measured.entropy_of_weights,
            measured.entropy_of_softmax,
            measured.entropy_of_bias,
        )
    )
    assert whole == pytest.approx(learned + added)
    assert abs(added) > 0.01
    plain, _ = inspected(Mechanism.named("softmax"))
    assert measured.entropy_of_bias(plain) == pytest.approx(0, abs=1e-6)


def test_spreads_are_those_over_the_heads_of_a_layer():
    total = [[0.2, 0.4], [0.5, 0.5]]
    run = Run(RunFolder("nowhere"), {}, inspection={
        "total_weight": {"mean": total}, "entropy": {"softmax": [[1.0, 3.0], [2.0, None]]},
        "row_sum": {"over_heads": {"std": [0.1, 0.3]}},
    })  # fmt: skip
    assert measured.total_weight_spread(run) == pytest.approx(0.05)
    assert measured.scaled_weight_spread(run) == pytest.approx(0.05 / 0.3)
    assert measured.entropy_spread(run) == pytest.approx(1.0), "a layer with one known head has no spread"
    assert measured.row_sum_spread(run) == pytest.approx(0.2)


@pytest.mark.parametrize("inspection", [{}, {"mechanism": {}, "first_token": {"mean": [[0.1]]}}, {"row_sum": None}])
def test_missing_values_are_nan(inspection):
    run = Run(RunFolder("nowhere"), {}, inspection=inspection)
    for read in (measured.first_token_of_softmax, measured.entropy_of_bias, measured.total_weight_spread,
                 measured.scaled_weight_spread, measured.entropy_spread, measured.row_sum_spread):  # fmt: skip
        assert math.isnan(read(run))


def test_equal_heads_have_nothing_to_scale():
    run = Run(RunFolder("nowhere"), {}, inspection={"total_weight": {"mean": [[1.0, 1.0], [1.0, 1.0 + 1e-8]]}})
    assert math.isnan(measured.scaled_weight_spread(run))
