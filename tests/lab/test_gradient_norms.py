"""Tables 4 and 5 from a log: the paper's definitions, and every omitted step is reported."""

from __future__ import annotations

import doctest
import json
import math

import numpy as np
import pytest

from affine_attention.lab import gradient_norms
from affine_attention.lab.gradient_norms import format_statistics, gradient_statistics
from affine_attention.lab.report.paper_numbers import TABLES_4_AND_5


def make_norms(steps=800, seed=0):
    norms = np.random.RandomState(seed).lognormal(0, 0.3, steps)
    norms[[3, 40, 77]] *= (4, 20, 8)
    return norms.tolist()


def write_log(path, norms, first=1):
    lines = [json.dumps({"step": step, "loss": 1.0, "grad_norm": norm}) for step, norm in enumerate(norms, first)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_statistics_equal_numpy(tmp_path):
    norms = make_norms()
    found = gradient_statistics(write_log(tmp_path / "log.jsonl", norms))
    first = np.array(norms[:500])
    assert found["count"] == 500
    assert found["mean"] == pytest.approx(first.mean())
    assert found["std"] == pytest.approx(first.std())
    assert found["variance"] == pytest.approx(first.var())
    assert found["cv"] == pytest.approx(first.std() / first.mean())
    mad = np.median(np.abs(first - np.median(first)))
    for k in (6, 9):
        limit = np.median(first) + k * mad
        assert found["thresholds"][str(k)] == pytest.approx(limit)
        assert found["spike_steps"][str(k)] == (np.flatnonzero(first > limit) + 1).tolist()
        assert found["spikes"][str(k)] == int((first > limit).sum())
    assert found["spikes"]["6"] > found["spikes"]["9"] > 0
    assert found["missing"] == []


def test_a_folder_lines_and_norms_are_the_same(tmp_path):
    norms = make_norms(600)
    write_log(tmp_path / "log.jsonl", norms)
    lines = [{"step": step, "grad_norm": norm} for step, norm in enumerate(norms, 1)]
    assert gradient_statistics(tmp_path) == gradient_statistics(lines) == gradient_statistics(norms)


def test_the_range_and_the_thresholds_are_settings():
    found = gradient_statistics([1.0, 2.0, 3.0, 4.0, 50.0], first_step=2, last_step=4, thresholds=(0.5,))
    assert (found["count"], found["mean"], found["median"], found["mad"]) == (3, 3, 3, 1)
    assert found["spike_steps"] == {"0.5": [4]}


def test_a_constant_norm_has_no_spikes():
    found = gradient_statistics([2.0] * 500)
    assert (found["std"], found["cv"], found["mad"], found["spikes"]) == (0, 0, 0, {"6": 0, "9": 0})


def test_steps_that_cannot_be_counted_are_reported():
    lines = [{"step": step, "grad_norm": 1.0 + step % 3} for step in range(1, 301) if step not in (7, 9)]
    lines[2]["grad_norm"] = None
    lines[4]["grad_norm"] = math.inf
    lines.append({"step": 12, "grad_norm": 5.0})
    found = gradient_statistics(lines)
    assert found["missing_steps"] == [7, 9]
    assert found["not_finite_steps"] == [3, 5]
    assert found["count"] == 296
    text = " | ".join(found["missing"])
    assert "ends at step 300, before step 500" in text
    assert "steps 7, 9 not in the log" in text
    assert "steps 3, 5 skipped" in text
    assert "step 12 logged more than once" in text
    json.dumps(found, allow_nan=False)


def test_a_log_without_finite_norms_gives_a_result(tmp_path):
    for norms in ([], [math.nan] * 3):
        found = gradient_statistics(norms)
        assert found["mean"] is found["median"] is found["spikes"]["6"] is None
        assert found["missing"]
        json.dumps(found, allow_nan=False)
    many = gradient_statistics([None] * 100)
    assert "and 80 more" in many["missing"][1]
    log = write_log(tmp_path / "log.jsonl", [1.0, 2.0])
    log.write_text(log.read_text() + '{"step": 3, "grad_')
    assert gradient_statistics(log)["count"] == 2, "an incomplete line is not a step"


def test_the_example_in_the_docstring_runs():
    results = doctest.testmod(gradient_norms)
    assert results.attempted > 0
    assert results.failed == 0


def test_unusable_logs_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"log\.jsonl"):
        gradient_statistics(tmp_path)
    with pytest.raises(ValueError, match="integer step"):
        gradient_statistics([{"grad_norm": 1.0}])
    with pytest.raises(TypeError, match="grad_norm of step 1"):
        gradient_statistics([{"step": 1, "grad_norm": "high"}])
    with pytest.raises(ValueError, match="last_step"):
        gradient_statistics([1.0], first_step=5, last_step=4)


def test_the_definitions_fit_the_paper_s_own_rows():
    """Variance is the square of std, and CV is std over mean, up to the printed digits of Table 4."""
    assert len(TABLES_4_AND_5) == 6
    for row in TABLES_4_AND_5:
        assert row.variance == pytest.approx(row.std**2, abs=0.003)
        assert row.cv == pytest.approx(row.std / row.mean, abs=0.006)


def test_the_lines_for_a_terminal_hold_the_numbers():
    text = format_statistics("run", gradient_statistics([1.0, 1.1, 0.9, 1.0, 9.0, math.nan]))
    assert "5 gradient norms" in text
    assert "k=6: 1  k=9: 1" in text
    assert "mean 2.6000" in text
    assert "0 gradient norms" in format_statistics("run", gradient_statistics([]))
