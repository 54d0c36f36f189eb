import json

import numpy as np
import pytest

from affine_attention.lab.report.collect import load_run, load_runs
from affine_attention.lab.report.gradient_windows import (
    clipped_measure,
    clipped_share,
    cv_measure,
    gradient_window_table,
    largest_measure,
    std_measure,
)
from affine_attention.lab.report.groups import group_runs

from .folders import make_run


def with_norms(folder, norms):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    changed = [line | {"grad_norm": norm} for line, norm in zip(lines, norms, strict=True)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    return folder


def test_windows_hold_their_own_steps_and_count_clipped_ones(tmp_path):
    norms = [4.0] * 60 + [0.5] * 40 + [0.4, 0.6] * 200 + [0.2] * 49 + [3.0] * 1
    run = load_run(with_norms(make_run(tmp_path / "a", "affine", steps=550), norms))
    first, middle, last = (0, 100), (101, 500), (501, None)
    assert [clipped_measure(window).read(run) for window in (first, middle, last)] == [60.0, 0.0, 2.0]
    assert std_measure(middle).read(run) == pytest.approx(0.1)
    assert cv_measure(middle).read(run) == pytest.approx(0.2)
    assert largest_measure(last).read(run) == 3.0
    assert clipped_measure((101, None)).read(run) == pytest.approx(100 / 450)
    assert np.isnan(cv_measure((551, None)).read(run))


def test_a_run_without_clipping_has_no_share_and_a_norm_that_is_not_finite_is_skipped(tmp_path):
    norms = [None, 2.0, 2.0, 0.5]
    run = load_run(with_norms(make_run(tmp_path / "a", "affine", steps=4), norms))
    assert clipped_share(run, 0, 100) == pytest.approx(200 / 3)
    free = load_run(with_norms(make_run(tmp_path / "b", "affine", steps=4, max_grad_norm=0.0), norms))
    assert np.isnan(clipped_share(free, 0, 100))


def test_the_table_has_the_windows_that_runs_reached(tmp_path):
    groups = group_runs(load_runs([make_run(tmp_path / name, name, steps=120) for name in ("softmax", "affine")]))
    table = gradient_window_table(groups)
    assert table.columns[2:] == [
        "Std, steps 0–100", "CV, steps 0–100", "Clipped %, steps 0–100",
        "Std, steps 101–500", "CV, steps 101–500", "Clipped %, steps 101–500",
    ]  # fmt: skip
    assert [row.cells[0].text for row in table.rows] == ["softmax", "affine"]
    assert gradient_window_table([]).rows == []
