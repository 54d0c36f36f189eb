import numpy as np
import pytest

from affine_attention.lab.report.collect import load_run, load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.series import Line, layer_lines, line_data, probe_lines, step_lines, thinned

from .folders import make_run


@pytest.fixture
def seeds(tmp_path):
    runs = load_runs([make_run(tmp_path / str(seed), "affine", seed, steps=50, layers=3, heads=2) for seed in (0, 1)])
    return runs, group_runs(runs)


def test_seeds_are_thin_lines_and_their_mean_is_not(seeds):
    runs, groups = seeds
    lines = step_lines(groups, "loss")
    assert [line.thin for line in lines] == [True, True, False]
    expected = np.mean([run.series("loss")[1] for run in runs], axis=0)
    assert np.allclose(lines[-1].y, expected, rtol=1e-12)


def test_the_mean_covers_the_steps_that_all_seeds_have(tmp_path):
    lengths = {"a": 30, "b": 20}
    folders = [
        make_run(tmp_path / n, "affine", seed, steps=s, planned=40) for seed, (n, s) in enumerate(lengths.items())
    ]
    lines = step_lines(group_runs(load_runs(folders)), "loss")
    assert [len(line.x) for line in lines] == [30, 20, 20]


def test_a_late_part_counts_from_the_planned_steps(tmp_path):
    run = load_run(make_run(tmp_path / "a", steps=80, planned=90))
    (line,) = step_lines(group_runs([run]), "loss", since=7 / 9)
    assert (line.x[0], line.x[-1]) == (70, 80)


def test_probes_are_averaged_over_heads_and_layers(seeds):
    runs, groups = seeds
    steps, values = runs[0].probes("mean_logit")
    assert np.allclose(probe_lines(groups, "mean_logit")[0].y, values.mean(axis=(1, 2)))
    assert np.allclose(probe_lines(groups, "mean_logit", layer=2)[0].y, values[:, 2].mean(axis=1))
    assert probe_lines(groups, "mean_logit", layer=9) == []
    assert steps.tolist() == probe_lines(groups, "mean_logit")[0].x.tolist()


def test_layers_are_averaged_over_heads(seeds):
    runs, groups = seeds
    values = runs[1].inspected("first_token", "mean")
    assert np.allclose(layer_lines(groups, "first_token", "mean")[1].y, values.mean(axis=1))
    assert np.allclose(layer_lines(groups, "first_token", "mean", how="max")[1].y, values.max(axis=1))
    assert layer_lines(groups, "nothing") == []


def test_long_lines_are_thinned_without_losing_a_spike():
    y = np.ones(9000)
    y[4321] = 50.0
    y[17] = np.nan
    found = thinned(np.arange(1, 9001), y)
    assert len(found["x"]) == len(found["y"]) == 500
    assert max(found["high"]) == 50.0
    assert min(found["low"]) == 1.0
    assert None not in found["y"], "one hole among eighteen points leaves a mean"
    assert thinned(np.arange(3), np.array([1.0, np.nan, 2.0]))["y"] == [1.0, None, 2.0]


def test_a_series_without_numbers_has_no_line(tmp_path):
    folder = make_run(tmp_path / "a", steps=3)
    (folder / "log.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": NaN}\n')
    assert line_data(step_lines(group_runs([load_run(folder)]), "loss")) == []


def test_many_lines_have_fewer_points_each():
    steps = np.arange(1, 2001)
    few, many = ([Line(0, str(n), steps, np.ones(2000)) for n in range(count)] for count in (2, 100))
    assert {len(line["x"]) for line in line_data(few)} == {500}
    assert {len(line["x"]) for line in line_data(many)} == {150}
