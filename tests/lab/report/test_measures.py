import json
import math

import numpy as np
import pytest

from affine_attention.lab.report import measures
from affine_attention.lab.report.collect import load_run, load_runs
from affine_attention.lab.report.groups import group_runs

from .folders import make_run


def test_the_final_loss_is_the_mean_of_the_last_steps(tmp_path):
    for steps, last in ((5, 5), (100, 10), (1000, 20)):
        run = load_run(make_run(tmp_path / str(steps), steps=steps, layers=1, heads=1, map_length=4))
        lines = (tmp_path / str(steps) / "log.jsonl").read_text().splitlines()
        expected = np.mean([json.loads(line)["loss"] for line in lines[-last:]])
        assert measures.final_loss(run) == pytest.approx(expected, rel=1e-12)


def test_folders_of_one_seed_count_once(tmp_path):
    folders = [make_run(tmp_path / name, "affine", seed=0, steps=30) for name in ("first", "again")]
    folders.append(make_run(tmp_path / "other", "affine", seed=1, steps=30))
    (group,) = group_runs(load_runs(folders))
    loss = measures.Measure("Loss", measures.final_loss)
    assert len(loss.by_seed(group)) == 2
    assert loss.of(group).seeds == 2


def test_unfinished_runs_do_not_count_if_there_are_finished_ones(tmp_path):
    folders = [make_run(tmp_path / "a", "affine", seed=0, steps=30, planned=60)]
    folders.append(make_run(tmp_path / "b", "affine", seed=1, steps=20, planned=60, finished=False))
    (group,) = group_runs(load_runs(folders))
    assert [run.name for run in measures.counted(group)] == ["a"]
    (alone,) = group_runs(load_runs(folders[1:]))
    assert [run.name for run in measures.counted(alone)] == ["b"]


def test_an_average_needs_all_of_its_tasks(tmp_path):
    folder = make_run(tmp_path / "a", "affine", steps=2)
    run = load_run(folder)
    tasks = ["piqa", "boolq"]
    values = [100 * run.evaluation["tasks"][task]["value"] for task in tasks]
    assert measures.average_accuracy(run, tasks) == pytest.approx(np.mean(values))
    assert measures.average_error(run, tasks) == pytest.approx(100 * math.hypot(0.012, 0.012) / 2)
    assert math.isnan(measures.average_accuracy(run, [*tasks, "unknown"]))
    assert math.isnan(measures.average_accuracy(run, []))


def test_other_tasks_come_after_the_average(tmp_path):
    groups = group_runs([load_run(make_run(tmp_path / "a", "affine", steps=2))])
    labels = [measure.label for measure in measures.task_measures(groups)]
    assert labels == ["Wino", "PIQA", "Hella", "ARC-c", "ARC-e", "BoolQ", "Avg.", "lambada_openai"]


def test_an_average_of_fewer_tasks_is_labelled(tmp_path):
    folder = make_run(tmp_path / "a", "affine", steps=2)
    evaluation = json.loads((folder / "evaluation.json").read_text())
    del evaluation["tasks"]["boolq"]
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    labels = [measure.label for measure in measures.task_measures(group_runs([load_run(folder)]))]
    assert "Avg. of 5" in labels
    assert "Avg." not in labels


def test_gradient_numbers_stop_at_step_500(tmp_path):
    run = load_run(make_run(tmp_path / "a", "affine", steps=620, layers=1, heads=1, map_length=4))
    norms = run.series("grad_norm")[1][:500]
    assert measures.gradient_number(run, "std") == pytest.approx(norms.std(), rel=1e-9)
    median = np.median(norms)
    spikes = (norms > median + 9 * np.median(abs(norms - median))).sum()
    assert measures.spike_count(run, 9) == spikes > 0


def test_a_gradient_norm_that_is_not_a_number_is_skipped(tmp_path):
    folder = make_run(tmp_path / "a", steps=1)
    lines = [{"step": 1, "grad_norm": 1.0}, {"step": 2, "grad_norm": "high"}, {"step": 3, "grad_norm": 3.0}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measures.gradient_number(load_run(folder), "mean") == 2.0


def test_different_measurements_are_reported(tmp_path):
    folders = [make_run(tmp_path / name, name, steps=2) for name in ("softmax", "affine")]
    assert measures.incomparable(group_runs(load_runs(folders))) == []
    evaluation = json.loads((folders[1] / "evaluation.json").read_text())
    evaluation["tasks"]["piqa"]["n"] = 5
    evaluation["perplexity"]["c4"]["words"] = 7
    (folders[1] / "evaluation.json").write_text(json.dumps(evaluation))
    texts, tasks = measures.incomparable(group_runs(load_runs(folders)))
    assert texts.startswith("c4 was measured differently")
    assert "metric acc, n 1000; metric acc, n 5" in tasks
