import numpy as np
import pytest
import torch

from affine_attention.lab.report.collect import load_run, load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.plots import figures
from affine_attention.nn.coefficients import ALPHA_RULES

from .folders import make_run

KEYS = {
    *("figure-2", "figure-3", "figure-4", "figure-5", "figure-6", "figure-7", "figure-8", "figure-10", "figure-11"),
    *("forest", "alpha", "saturation", "heads", "speed"),
}


def by_key(folders):
    return {figure["key"]: figure for figure in figures(group_runs(load_runs(folders)))}


def test_every_figure_of_the_paper_is_made(tmp_path):
    found = by_key([make_run(tmp_path / name, name, steps=90) for name in ("softmax", "affine_gated")])
    assert set(found) == KEYS
    for figure in found.values():
        assert "missing" not in figure, figure["key"]
        assert figure["aid"].endswith("."), "a reading aid of one sentence"
    names = [view["name"] for view in found["figure-7"]["views"]]
    assert names == ["training loss", "cross-entropy", "held-out"], "all of the loss is distillation: shown once"
    assert min(found["figure-10"]["views"][0]["lines"][0]["x"]) == 70


def test_total_weights_are_shown_raw_and_scaled(tmp_path):
    folder = make_run(tmp_path / "a", "affine", steps=2, layers=3, heads=2)
    raw, scaled = by_key(folder)["figure-5"]["views"]
    values = load_run(folder).inspected("total_weight", "mean")
    assert np.allclose(raw["panels"][0]["values"], values, rtol=1e-4)
    expected = (values - values.min()) / (values.max() - values.min())
    assert np.allclose(scaled["panels"][0]["values"], expected, atol=1e-3)


def test_equal_heads_scale_to_one(tmp_path):
    scaled = by_key(make_run(tmp_path / "a", "softmax", steps=2))["figure-5"]["views"][1]
    assert {value for row in scaled["panels"][0]["values"] for value in row} == {1.0}


def test_figure_11_is_the_activation_itself(tmp_path):
    figure = by_key(make_run(tmp_path / "a", "softmax", steps=2))["figure-11"]
    lines = {line["name"]: dict(zip(line["x"], line["y"], strict=True)) for line in figure["views"][0]["lines"]}
    assert [lines["linear clipping"][x] for x in (-10.0, -5.0, 0.0, 2.0, 5.0, 9.0)] == [0.0, 0.0, 0.5, 0.7, 1.0, 1.0]
    assert lines["sigmoid"][0.0] == 0.5
    assert lines["sigmoid"][2.0] == pytest.approx(1 / (1 + np.exp(-2)), rel=1e-4)


def test_an_empty_figure_names_the_command_that_makes_its_data(tmp_path):
    folder = make_run(tmp_path / "a", "softmax", evaluated=False, inspected=False, finished=False)
    (folder / "log.jsonl").write_text("")
    found = by_key(folder)
    for key in KEYS - {"figure-11"}:
        assert "`affine " in found[key]["missing"], key
    assert "`affine inspect RUN`" in found["figure-3"]["missing"]
    assert "`affine train" in found["figure-7"]["missing"]


def test_runs_with_different_layers_are_shown_together(tmp_path):
    folders = [make_run(tmp_path / "a", "softmax", steps=20, layers=2, heads=2)]
    folders.append(make_run(tmp_path / "b", "affine", steps=20, layers=5, heads=3))
    found = by_key(folders)
    assert [len(line["x"]) for line in found["figure-4"]["views"][0]["lines"]] == [2, 5]
    layers = [view["name"] for view in found["figure-2"]["views"]]
    assert layers == ["all layers", *(f"layer {layer}" for layer in range(5))]
    assert len(found["figure-2"]["views"][-1]["lines"]) == 1


def test_figure_11_shows_the_activations_of_the_package(tmp_path):
    lines = by_key(make_run(tmp_path / "a", "softmax", steps=2))["figure-11"]["views"][0]["lines"]
    assert [line["name"] for line in lines] == ["linear clipping", "sigmoid"]
    for line in lines:
        rule = ALPHA_RULES[line["name"].replace(" ", "_")]
        expected = rule.function(torch.tensor(line["x"], dtype=torch.float64), rule.start)
        assert np.allclose(line["y"], expected, rtol=1e-4)
