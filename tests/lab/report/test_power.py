import pytest

from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.power import power_table

from .folders import make_run


def test_the_table_shows_the_pool_of_each_measure(tmp_path):
    folders = [make_run(tmp_path / f"{name}-{seed}", name, seed, steps=20) for name in ("softmax", "affine", "sink")
               for seed in range(3)]  # fmt: skip
    groups = group_runs(load_runs(folders))
    table = power_table(groups)
    row = next(row for row in table.rows if row.cells[0].text == "Loss")
    shown = dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))
    assert (shown["Mechanisms"], shown["Seeds"], shown["df"]) == ("3", "3", "4")
    ratio = float(shown["Would show"]) / float(shown["Residual"])
    assert ratio == pytest.approx(2.7764451 * (2 / 3) ** 0.5, rel=0.05), "t(4) · sqrt(2 / 3), from rounded numbers"
    assert float(shown["In 80 %"]) > float(shown["Would show"])


def test_one_seed_has_no_power(tmp_path):
    groups = group_runs(load_runs([make_run(tmp_path / name, name, steps=5) for name in ("softmax", "affine")]))
    assert power_table(groups).rows == []
