"""Micro-batches, recomputation and probes do not change a run."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.run import RunFolder

from .runs import log_without_timing

# fp32 sums over other groups of tokens round differently, by up to 6e-8 per addition, and the difference propagates
# through the steps. Measured: 1.2e-7.
SPLITS = 1e-6


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_accumulation_equals_one_large_batch(place, mechanism):
    whole = place.run(mechanism, device_batch=8)
    for size in (4, 2):
        split = place.run(mechanism, device_batch=size)
        for line, other in zip(RunFolder(split).log(), RunFolder(whole).log(), strict=True):
            for key in ("loss", "ce_loss", "grad_norm", "learning_rate"):
                assert line[key] == pytest.approx(other[key], rel=SPLITS), (line["step"], key)
            if line.get("running_alpha"):
                averages = torch.tensor(line["running_alpha"])
                torch.testing.assert_close(averages, torch.tensor(other["running_alpha"]), rtol=SPLITS, atol=1e-7)


def test_accumulation_with_distillation(place):
    settings = {"teacher": str(place.teacher()), "ce_weight": 0.25, "kd_weight": 0.75, "temperature": 2.0}
    whole, split = (place.run("affine", device_batch=size, **settings) for size in (8, 2))
    lines, others = RunFolder(split).log(), RunFolder(whole).log()
    for line, other in zip(lines, others, strict=True):
        assert line["loss"] == pytest.approx(0.75 * line["kd_loss"] + 0.25 * line["ce_loss"], rel=1e-6)
        for key in ("loss", "kd_loss", "ce_loss", "grad_norm"):
            # A small divergence is a difference of large logits, with their rounding error.
            assert line[key] == pytest.approx(other[key], rel=SPLITS, abs=1e-7), (line["step"], key)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["eval_kd_loss"] > 0


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_activation_checkpointing_is_bitwise_equal(place, mechanism):
    assert log_without_timing(place.run(mechanism, gradient_checkpointing=True)) == log_without_timing(
        place.run(mechanism)
    )


def test_probes_do_not_change_training(place):
    probed = [(line["loss"], line["grad_norm"]) for line in RunFolder(place.run()).log()]
    plain = [(line["loss"], line["grad_norm"]) for line in RunFolder(place.run(probe_every=0, heldout=0.1)).log()]
    assert probed == plain
