"""The CPU version of E4: its statistics on made tables, a tiny grid, and the tables of the docs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from affine_attention.files import read_lines
from affine_attention.lab.run import RunFolder
from studies.experiments import cpu_runs, e4_cpu, e4_figure
from studies.experiments import e4_report as e4

ROOT = Path(__file__).parent.parent.parent


def made(noise=0.0, seed=0):
    """A table in which the best rate is 2e-3 and the loss rises by a mechanism's slope per step of the rate."""
    generator = np.random.default_rng(seed)
    slopes = {mechanism: 0.1 * number for number, mechanism in enumerate(e4.E4_MECHANISMS, start=1)}
    return {
        (mechanism, rate, s): 3 + slope * abs(place - 2) + 0.5 * s + noise * generator.standard_normal()
        for mechanism, slope in slopes.items()
        for place, rate in enumerate(e4.RATES)
        for s in e4.TWO
    }


def test_sensitivity_is_the_mean_loss_above_the_best():
    losses = made()
    for number, mechanism in enumerate(e4.E4_MECHANISMS, start=1):
        assert e4.best_rate(losses, mechanism) == 2e-3
        assert e4.sensitivity(losses, mechanism) == pytest.approx(0.1 * number * (2 + 1 + 0 + 1 + 2) / 5)


def test_the_seed_effect_is_no_noise_and_the_interval_covers():
    assert e4.residual_deviation(made())[0] == pytest.approx(0, abs=1e-12)
    exact, covered, deviations = made(), 0, []
    truth = e4.sensitivity(exact, "affine") - e4.sensitivity(exact, "softmax")
    for seed in range(300):
        losses = made(noise=0.01, seed=seed)
        deviations.append(e4.residual_deviation(losses)[0])
        gap = e4.sensitivity(losses, "affine") - e4.sensitivity(losses, "softmax")
        covered += abs(gap - truth) <= e4.half_width(losses)
    assert np.mean(deviations) == pytest.approx(0.01, rel=0.03)
    # 95 % of 300, with three standard deviations of a binomial count.
    assert abs(covered / 300 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 300)


def test_a_diverged_run_counts_as_untrained():
    run = {"mechanism": "affine", "learning_rate": 1e-3, "seed": 0, "untrained_loss": 7.6}
    assert e4.losses_of([run | {"eval_loss": None}]) == {("affine", 1e-3, 0): 7.6}
    assert e4.losses_of([run | {"eval_loss": 9.0}]) == {("affine", 1e-3, 0): 7.6}
    assert e4.losses_of([run | {"eval_loss": 5.0}]) == {("affine", 1e-3, 0): 5.0}


def test_the_grid_runs_resumes_and_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(e4_cpu, "E4_MECHANISMS", ("affine",))
    monkeypatch.setattr(e4_cpu, "RATES", (1e-3,))
    monkeypatch.setattr(e4_cpu, "SEEDS", (0,))
    tiny = {"steps": 3, "warmup_steps": 1, "decay_steps": 1, "sequence_length": 32, "global_batch": 2}
    changes = {"student_changes": {"num_hidden_layers": 1, "vocab_size": 2048}}
    for _ in range(2):
        e4_cpu.run_grid(tmp_path / "runs", cpu_runs.SETTINGS | tiny | changes)
    (line,) = list(read_lines(e4_cpu.store(tmp_path / "runs", tmp_path)))[1:]
    assert line["eval_loss"] < line["untrained_loss"] + 1
    assert 0 <= line["clipped_share"] <= 1
    # A run that a signal stopped is trained on, and is not stored.
    run = RunFolder(tmp_path / "runs" / e4_cpu.name_of("affine", 1e-3, 0))
    shutil.rmtree(run.model)
    run.add_event("stop", step=2, reason="SIGTERM")
    with pytest.raises(ValueError, match="is missing or not finished; run the grid first"):
        e4_cpu.store(tmp_path / "runs", tmp_path)


def test_the_stored_result_is_complete_and_names_no_machine():
    head, runs = cpu_runs.load("e4_cpu")
    cells = [(run["mechanism"], run["learning_rate"], run["seed"]) for run in runs]
    assert set(cells) == {(m, rate, seed) for m in e4_cpu.E4_MECHANISMS for rate in e4_cpu.RATES for seed in e4.TWO}
    assert len(cells) == len(set(cells))
    assert head["settings"]["steps"] == cpu_runs.SETTINGS["steps"]
    assert not any(word in str(head) for word in ("/tmp/", "/root/", "/home/", "/work/"))


def test_the_tables_of_the_docs_are_those_of_the_stored_result():
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8").splitlines()
    for line in (line for table in e4.tables(cpu_runs.load("e4_cpu")[1]) for line in table):
        assert line in page, "run `python -m studies.experiments.e4_cpu --report`"


def test_the_figure_of_the_docs_is_that_of_the_stored_result(tmp_path):
    from matplotlib.image import imread

    new = imread(e4_figure.write_figure(cpu_runs.load("e4_cpu")[1], tmp_path / "new.png"))[..., :3] * 255
    kept = imread(e4_figure.IMAGE)[..., :3] * 255
    assert new.shape == kept.shape
    assert np.abs(new - kept).mean() < 2, "run `python -m studies.experiments.e4_cpu --report`"
