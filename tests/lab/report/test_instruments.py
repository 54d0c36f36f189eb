"""Tables of the instruments: numbers of runs that have them, and runs of earlier versions that do not."""

from __future__ import annotations

import json
import math

import pytest

from affine_attention.files import write_json
from affine_attention.lab.evaluation.instruments import FACTORS as MEASURED_FACTORS
from affine_attention.lab.evaluation.quantisation import VARIANTS as MEASURED
from affine_attention.lab.report import report
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.instruments import (
    FACTORS,
    VARIANTS,
    activation_table,
    alpha_spread,
    instrument_tables,
    length_table,
    robustness_table,
)
from affine_attention.lab.report.markdown import markdown

from .folders import make_run
from .patching import set_inspection


def with_instruments(folder, **parts):
    evaluation = json.loads((folder / "evaluation.json").read_text())
    write_json(folder / "evaluation.json", evaluation | {"instruments": parts})
    return folder


def change(delta):
    return {"loss": 3.0 + delta, "delta": delta, "stderr": 0.01}


@pytest.fixture
def runs(tmp_path):
    found = []
    for seed in (0, 1):
        for name, delta in (("softmax", 1.0), ("affine", 0.25)):
            folder = make_run(tmp_path / f"{name}-{seed}", name, steps=5, layers=2, heads=2, seed=seed)
            set_inspection(
                folder,
                sink_rate={"rate": {"weights": 0.75, "softmax": 0.5}},
                activations={"largest": [10.0, 400.0], "median": [1.0, 2.0]},
                value_norm={"first": [[1.0], [1.0]], "others": [[4.0], [2.0]]},
            )
            if name == "affine":
                set_inspection(folder, alpha={"mean": [[0.2, 0.4], [0.5, 0.5]], "std": [[0.1, 0.1], [0.3, 0.1]]})
            found.append(
                with_instruments(
                    folder,
                    eviction={"first_key": change(delta)},
                    quantisation={"variants": {name: change(2 * delta) for name in MEASURED}},
                    length={"factors": {f"{factor}x": change(factor / 10) for factor in MEASURED_FACTORS}},
                )
            )
    return group_runs(load_runs(found))


def row_of(table, name):
    row = next(row for row in table.rows if row.cells[0].text == name)
    return dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))


def test_the_tables_show_what_was_measured(runs):
    sinks = row_of(activation_table(runs), "affine")
    assert sinks["Sink rate of softmax part %"] == "50.0"
    assert (sinks["Largest activation"], sinks["Largest / median"]) == ("400.0", "200")
    assert sinks["Value norm of first token"] == "0.38"  # mean of 1/4 and 1/2
    assert float(sinks["α within heads"]) == pytest.approx(math.sqrt((0.01 + 0.01 + 0.09 + 0.01) / 4), abs=1e-4)
    assert float(sinks["α between heads"]) == pytest.approx(math.sqrt((0.01 + 0) / 2), abs=1e-4)
    assert row_of(activation_table(runs), "softmax")["α within heads"] == "–"
    robust = row_of(robustness_table(runs), "softmax")
    assert (robust["First key evicted"], robust["int8 inputs, per tensor"]) == ("1.000", "2.000")
    lengths = row_of(length_table(runs), "affine")
    assert (lengths["Loss, 4x"], lengths["Cost of context, 4x"]) == ("3.400", "+0.400")


def test_every_measured_number_has_a_column():
    assert set(VARIANTS) == set(MEASURED)
    assert tuple(f"{factor}x" for factor in MEASURED_FACTORS) == FACTORS


def test_runs_of_earlier_versions_are_shown_without_the_tables(tmp_path, runs):
    old = make_run(tmp_path / "old", "affine", steps=5, layers=2, heads=2)
    groups = group_runs(load_runs([old]))
    assert [table.rows for table in instrument_tables(groups)] == [[], [], []]
    assert not math.isnan(alpha_spread(groups[0].runs[0], within=True)), "it follows from the stored deviations"
    assert "## Instruments" not in markdown(groups)
    assert "## Instruments" in markdown(runs)
    page = report([old], tmp_path / "page.html").read_text()
    assert "affine evaluate RUN --instruments all" in page
    broken = set_inspection(old, sink_rate=[1], activations={"largest": "x", "median": None}, value_norm=3)
    with_instruments(broken, eviction=[], quantisation={"variants": None}, length="4x")
    assert all(table.missing for table in instrument_tables(group_runs(load_runs([broken]))))
