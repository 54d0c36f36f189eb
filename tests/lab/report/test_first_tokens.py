import math

import pytest

from affine_attention.lab.report.collect import load_run, load_runs
from affine_attention.lab.report.first_tokens import NOT_STORED, first_token_table, strongest_head, uniform_share
from affine_attention.lab.report.groups import group_runs

from .folders import make_run
from .patching import set_inspection


def test_uniform_attention_puts_the_mean_of_one_over_n_there(tmp_path):
    run = load_run(set_inspection(make_run(tmp_path / "a", "softmax", steps=5), length=4))
    assert uniform_share(run) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    measured = load_run(set_inspection(run.folder.path, first_token={"uniform": [[0.25, 0.35]]}))
    assert uniform_share(measured) == pytest.approx(0.3), "of windows or documents, as the inspection counted it"
    within = load_run(make_run(tmp_path / "b", "softmax", steps=5, document_boundaries=True))
    assert math.isnan(uniform_share(within)), "the visible keys depend on the documents"
    assert math.isnan(uniform_share(load_run(make_run(tmp_path / "c", "softmax", steps=5, inspected=False))))


def test_the_table_has_the_baseline_its_ratio_and_the_sink_rate(tmp_path):
    one = set_inspection(make_run(tmp_path / "a", "softmax", steps=5, layers=2, heads=2), length=2,
                         first_token={"mean": [[0.5, 0.7], [0.2, 0.1]]},
                         total_weight={"mean": [[1.0, 1.0], [1.0, 1.0]]})  # fmt: skip
    groups = group_runs(load_runs([one]))
    (row,) = first_token_table(groups).rows
    assert [cell.text for cell in row.cells[2:]] == [
        "0.3750",
        "0.3750",
        "0.7500",
        "0.50",
        "0.7000",
        NOT_STORED,
        NOT_STORED,
    ]
    assert strongest_head(groups[0].runs[0]) == 0.7
    assert any("do not store it" in note for note in first_token_table(groups).notes)
    table = first_token_table(
        group_runs(load_runs([set_inspection(one, sink_rate={"rate": {"weights": 0.25, "softmax": 0.75}})]))
    )
    assert [cell.text for cell in table.rows[0].cells[-2:]] == ["25.0", "75.0"]
    assert not any("do not store it" in note for note in table.notes)
