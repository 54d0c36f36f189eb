"""E3: its runs resume, its verdicts follow the rules of the design, and the docs show the stored result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from affine_attention.files import read_table
from examples.bigram_backcopy.model import Setting
from studies.experiments import e3, e3_figure, e3_report

ROOT = Path(__file__).parent.parent.parent
TINY = {1: Setting(layers=1, width=16, length=16, batch=4, steps=3)}


@pytest.fixture(scope="module")
def stored():
    return e3_report.load()


def test_the_grid_resumes_and_stores_only_complete_results(tmp_path):
    chosen = {"settings": TINY, "mechanisms": ("softmax", "affine"), "seeds": (0,)}
    e3.run_grid(tmp_path, [1], **chosen)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(files) == 2
    e3.run_grid(tmp_path, [1], **chosen)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files
    found = read_table(tmp_path / "layers1-affine-seed0.json")
    assert found["setting"] == TINY[1].to_dict()
    assert len(found["map"]["layers"][0]["alpha"]) == 16
    with pytest.raises(ValueError, match="must hold 80 runs, got 2; run the grid first"):
        e3.store(tmp_path)


def made(shares, norms=None, losses=None):
    """Runs of three mechanisms whose shares on the first token are given per seed."""
    runs = {}
    for mechanism, values in shares.items():
        for seed in e3.SEEDS:
            layer = {"first_softmax_bigram": values[seed], "value_norm_first": (norms or {}).get(mechanism, 0.2)}
            final = {"layers": [layer], "loss_excess": (losses or {}).get(mechanism, 0.01)}
            runs[1, mechanism, seed] = {"final": final}
    return runs


@pytest.mark.parametrize(
    ("affine", "first", "second"),
    [
        ((0.10, 0.12, 0.11, 0.10, 0.12), "supported", "supported"),
        ((0.60, 0.62, 0.61, 0.60, 0.62), "reduces it, not by half", "refuted"),
        ((0.95, 0.70, 0.99, 0.80, 0.96), "refuted", "refuted"),
        ((0.40, 0.42, 0.41, 0.38, 0.39), "supported", "no evidence"),
    ],
)
def test_the_verdicts_follow_the_rules_of_the_design(affine, first, second):
    shares = {"softmax": [0.90, 0.92, 0.91, 0.89, 0.88], "affine": affine, "head_gated": [0.40, 0.41, 0.42, 0.39, 0.38]}
    verdicts = [verdict for _, _, verdict in e3_report.verdicts(made(shares), 1)]
    assert verdicts[:3] == ["**holds**", f"**{first}**", f"**{second}**"]


def test_a_sink_that_did_not_form_fails_the_experiment():
    names = ("softmax", "affine", "head_gated")
    shares = {name: [0.9, 0.9, 0.2, 0.9, 0.9] for name in names}
    assert e3_report.verdicts(made(shares), 1)[0][2] == "**failed**"
    shares = {name: [0.9] * 5 for name in names}
    assert e3_report.verdicts(made(shares, norms={"softmax": 0.7}), 1)[0][2] == "**failed**"


def test_intervals_are_those_of_student():
    mean, half = e3_report.mean_and_half([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.7764 * np.std([1, 2, 3, 4, 5], ddof=1) / 5**0.5, rel=1e-4)
    _, wide = e3_report.mean_and_half([1.0, 2.0, 3.0, 4.0, 5.0], 0.0125)
    assert wide / half == pytest.approx(4.3147 / 2.7764, rel=1e-3)  # quantiles of t with 4 degrees of freedom


def test_the_stored_result_is_complete_and_names_no_machine(stored):
    head, runs = stored
    assert set(runs) == {(d, m, s) for d in e3.SETTINGS for m in e3.MECHANISMS for s in e3.SEEDS}
    for (layers, _, _), run in runs.items():
        assert run["setting"] == e3.SETTINGS[layers].to_dict()
    assert not any(word in str(head) for word in ("/tmp/", "/root/", "/home/", "/work/"))


def test_the_tables_of_the_docs_are_those_of_the_stored_result(stored):
    page = (ROOT / "docs/experiments.md").read_text(encoding="utf-8").splitlines()
    for line in (line for table in e3_report.tables(stored[1]) for line in table):
        assert line in page, "run `python -m studies.experiments.e3_report`"


def test_the_figure_of_the_docs_is_that_of_the_stored_result(stored, tmp_path):
    from matplotlib.image import imread

    new = imread(e3_figure.write_figure(*stored, tmp_path / "new.png"))[..., :3] * 255
    kept = imread(e3_figure.IMAGE)[..., :3] * 255
    assert new.shape == kept.shape
    assert np.abs(new - kept).mean() < 2, "run `python -m studies.experiments.e3_report`"
