"""The CPU version of E1: its runs, its verdicts on made losses, and the tables and figure of the docs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from affine_attention.files import read_lines
from affine_attention.lab.run import RunFolder
from studies.experiments import cpu_runs, e1_cpu, e1_figure, e4_cpu, plans

ROOT = Path(__file__).parent.parent.parent
TINY = {"steps": 3, "warmup_steps": 1, "decay_steps": 1, "sequence_length": 32, "global_batch": 2,
        "student_changes": {"num_hidden_layers": 1, "vocab_size": 2048}}  # fmt: skip


def cells_of(runs):
    return [(run["student"], run["seed"]) for run in runs]


def made(noise=0.002, repeated=0.0, **changes):
    """(runs of E1, runs of E4): made losses of every student; the repeated run differs by `repeated`."""
    means = {"softmax": 5.5, "affine": 5.15, "affine_no_bias": 5.17, "head_gated": 5.18}
    means |= dict.fromkeys(e1_cpu.LETTERS.values(), 5.4) | {e1_cpu.LETTERS[key]: loss for key, loss in changes.items()}
    draw = np.random.default_rng(0)
    losses = {
        (cell, seed): mean + 0.05 * seed + noise * float(draw.standard_normal())
        for cell, mean in means.items()
        for seed in (*plans.SEEDS, *e1_cpu.NEW_SEEDS)
    }
    old = [
        {"mechanism": cell.partition("_learning_rate=")[0], "seed": seed, "eval_loss": loss,
         "learning_rate": e1_cpu.LOW_RATE if "learning_rate" in cell else e1_cpu.RATE}
        for (cell, seed), loss in losses.items()
        if seed in e4_cpu.SEEDS and cell.partition("_learning_rate=")[0] in plans.E4_MECHANISMS
    ]  # fmt: skip
    names = [job.name.rpartition("-seed") for job in plans.runs_of(e1_cpu.plans(Path("OUT")), Path("OUT"))]
    new = [{"student": cell, "seed": int(seed), "eval_loss": losses[cell, int(seed)]} for cell, _, seed in names]
    next(run for run in reversed(new) if cells_of([run]) == [("softmax", 0)])["eval_loss"] += repeated
    return new, old


def verdicts_of(runs):
    return [verdict.verdict for verdict in e1_cpu.results_of(*runs)[0]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"c": 5.2, "d": 5.3, "e": 5.3, "f": 5.0, "h": 5.2, "i": 5.18}, ["confirmed"] * 6),
        ({"c": 5.45, "d": 5.17, "e": 5.18, "f": 5.3, "h": 5.6, "i": 5.4}, ["confirmed", *["refuted"] * 5]),
        ({"c": 5.34, "d": 5.1, "e": 5.1, "f": 5.15, "h": 5.34, "i": 5.2},
         ["confirmed", "undecided", "undecided", "undecided", "no difference", "undecided"]),
        ({"c": 5.2, "repeated": 0.03}, ["refuted", *["waits for H0"] * 5]),
    ],
)  # fmt: skip
def test_every_verdict_is_reached(given, expected):
    assert verdicts_of(made(**given)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"c": 5.2, "g": 5.0}, ["confirmed"] * 2),
        ({"c": 5.45, "g": 5.3}, ["refuted"] * 2),
        ({"c": 5.34, "g": 5.18}, ["undecided"] * 2),
    ],
)
def test_every_verdict_of_the_follow_up_is_reached(given, expected):
    new, old = made(**given)
    assert [verdict.verdict for verdict in e1_cpu.follow_up(new)[0]] == expected
    # The two parts share no run.
    first = [run for run in new if run["seed"] in plans.SEEDS]
    assert e1_cpu.results_of(new, old) == e1_cpu.results_of(first, old)
    assert {verdict.verdict for verdict in e1_cpu.follow_up(first)[0]} == {"runs are missing"}


def test_a_non_finite_run_leaves_its_test_without_a_verdict():
    new, old = made()
    next(run for run in new if run["student"] == "constant_alpha")["eval_loss"] = None
    verdict = e1_cpu.results_of(new, old)[0][1]
    assert (verdict.verdict, verdict.remark) == ("runs are missing", "needs constant_alpha-seed0")


def test_the_table_has_all_students_and_seeds():
    noise = e1_cpu.tables(*made())[2][-1]
    assert "24 degrees of freedom" in noise  # 13 students x 3 seeds: 39 values, 13 + 2 parameters
    losses = e1_cpu.results_of(*made())[1]
    assert set(losses) == {*e1_cpu.STORED_CELLS, *e1_cpu.LETTERS.values()}
    assert all(set(seeds) == set(plans.SEEDS) for seeds in losses.values())


def test_the_runs_are_trained_and_stored_and_a_start_by_1_is_the_usual_run(tmp_path, monkeypatch):
    usual = e1_cpu.plans(tmp_path, cpu_runs.SETTINGS | TINY)
    assert isinstance(usual[0], plans.ScaledStarts)
    few = dataclasses.replace(usual[0], mechanisms=("constant_alpha",), seeds=(0,), factors=(1.0, 0.5, 0.0))
    monkeypatch.setattr(e1_cpu, "plans", lambda *_: [few, usual[2]])
    for _ in range(2):
        e1_cpu.run_all(tmp_path, cpu_runs.SETTINGS | TINY)
    lines = list(read_lines(e1_cpu.store(tmp_path, tmp_path)))[1:]
    assert cells_of(lines) == [
        (cell, 0) for cell in ("constant_alpha", "softmax_start=1", "softmax_start=0.5", "softmax_start=0", "softmax")
    ]
    logs = {line["student"]: RunFolder(tmp_path / f"{line['student']}-seed0").log() for line in lines}
    course = {cell: [(line["loss"], line["grad_norm"]) for line in log] for cell, log in logs.items()}
    assert course["softmax_start=1"] == course["softmax"]
    # Half of the output projection and half of the weighted sum are the same function before the first update.
    assert course["softmax_start=0.5"][0][0] == pytest.approx(course["constant_alpha"][0][0], rel=1e-6)
    assert course["softmax_start=0.5"] != course["softmax"]


def test_the_stored_result_is_complete_and_names_no_machine():
    head, runs = cpu_runs.load("e1_cpu")
    names = [f"{student}-seed{seed}" for student, seed in cells_of(runs)]
    assert names == [job.name for job in plans.runs_of(e1_cpu.plans(Path("OUT")), Path("OUT"))]
    assert len(names) == len(set(names)) == 44
    assert head["settings"] == cpu_runs.load("e4_cpu")[0]["settings"] == cpu_runs.SETTINGS
    assert not any(word in str(head) for word in ("/tmp/", "/root/", "/home/", "/work/"))


def test_the_tables_of_the_docs_are_those_of_the_stored_result():
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8").splitlines()
    found = e1_cpu.tables(cpu_runs.load("e1_cpu")[1], cpu_runs.load("e4_cpu")[1])
    for line in (line for table in found for line in table):
        assert line in page, "run `python -m studies.experiments.e1_cpu --report`"


def test_the_figure_of_the_docs_is_that_of_the_stored_result(tmp_path):
    from matplotlib.image import imread

    losses = e1_cpu.results_of(cpu_runs.load("e1_cpu")[1], cpu_runs.load("e4_cpu")[1])[1]
    new = imread(e1_figure.write_figure(losses, tmp_path / "new.png"))[..., :3] * 255
    kept = imread(e1_figure.IMAGE)[..., :3] * 255
    assert new.shape == kept.shape
    assert np.abs(new - kept).mean() < 2, "run `python -m studies.experiments.e1_cpu --report`"
