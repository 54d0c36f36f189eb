import json

import numpy as np
import pytest

from affine_attention.lab.report.collect import load_run, load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.histograms import describe, histogram_views

from .folders import EDGES, make_run


def test_mean_and_median_come_from_the_bins():
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    found = describe(edges, np.array([0.0, 1.0, 3.0, 0.0]))
    assert found["edges"] == [1.0, 2.0, 3.0]
    assert found["shares"] == [0.25, 0.75]
    assert found["mean"] == pytest.approx(0.25 * 1.5 + 0.75 * 2.5)
    assert found["median"] == pytest.approx(2 + 1 / 3, rel=1e-4)


def test_softmax_rows_sum_to_one(tmp_path):
    views = histogram_views(group_runs([load_run(make_run(tmp_path / "a", "softmax", steps=2))]), "row_sum")
    (panel,) = views[0]["panels"]
    assert (panel["shares"], panel["mean"], panel["median"]) == ([1.0], 1.0, 1.0)


def test_row_sums_come_averaged_over_heads_as_in_the_paper_and_head_by_head(tmp_path):
    folder = make_run(tmp_path / "a", "affine", steps=2, layers=3)
    views = {view["name"]: view["panels"] for view in histogram_views(group_runs([load_run(folder)]), "row_sum")}
    assert list(views) == [
        "averaged over heads, all layers", "single heads, all layers", "layer 0", "layer 1", "layer 2",
    ]  # fmt: skip
    row_sum = json.loads((folder / "inspection.json").read_text())["row_sum"]
    heads = np.sum(row_sum["histogram"]["counts"], axis=(0, 1))
    filled = np.flatnonzero(heads)
    assert views["single heads, all layers"][0]["shares"] == pytest.approx(
        (heads / heads.sum())[filled[0] : filled[-1] + 1], rel=1e-4, abs=1e-9
    )
    averaged = np.array(row_sum["over_heads"]["counts"][1])
    middles = (EDGES[:-1] + EDGES[1:]) / 2
    assert views["layer 1"][0]["mean"] == pytest.approx((averaged * middles).sum() / averaged.sum(), rel=1e-4)


def test_seeds_are_pooled_and_other_bins_are_noted(tmp_path):
    folders = [make_run(tmp_path / str(seed), "affine", seed, steps=2) for seed in (0, 1, 2)]
    inspection = json.loads((folders[2] / "inspection.json").read_text())
    inspection["alpha"]["histogram"] = {"edges": [0, 1], "counts": [[[5]]]}
    (folders[2] / "inspection.json").write_text(json.dumps(inspection))
    runs = load_runs(folders)
    (panel,) = histogram_views(group_runs(runs), "alpha")[0]["panels"]
    counts = sum(np.sum(run.inspection["alpha"]["histogram"]["counts"], axis=(0, 1)) for run in runs[:2])
    assert max(panel["shares"]) == pytest.approx(counts.max() / counts.sum(), rel=1e-4)
    assert any("alpha histogram" in problem for problem in runs[2].problems)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {"edges": [0, None], "counts": [[[1]]]},
        {"edges": [0, 1], "counts": None},
        {"edges": [0, 1], "counts": [None, [[1, 2]], [["x"]]]},
    ],
)
def test_broken_histograms_have_no_panels(tmp_path, broken):
    folder = make_run(tmp_path / "a", "affine", steps=2)
    inspection = json.loads((folder / "inspection.json").read_text())
    inspection["alpha"]["histogram"] = broken
    (folder / "inspection.json").write_text(json.dumps(inspection))
    assert histogram_views(group_runs([load_run(folder)]), "alpha")[0]["panels"] == []
