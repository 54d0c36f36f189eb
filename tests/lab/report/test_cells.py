import math

import pytest

from affine_attention.lab.report.cells import Cell, estimate_cell, mark_best, shown
from affine_attention.lab.report.statistics import Estimate


@pytest.mark.parametrize(
    ("value", "digits", "sign", "text"),
    [(1.23456, 3, False, "1.235"), (-0.5, 2, True, "−0.50"), (0.5, 2, True, "+0.50"), (12345.6, 1, False, "12,345.6"),
     (2.5e8, 1, False, "2.50e+08"), (math.nan, 2, False, "–"), (0.0001, 3, False, "0.000")],
)  # fmt: skip
def test_numbers(value, digits, sign, text):
    assert shown(value, digits, sign) == text


def test_an_estimate_shows_its_uncertainty():
    many = estimate_cell(Estimate(2.0, 0.1, 3), 2)
    assert (many.text, many.detail) == ("2.00", "± 0.10")
    assert "3 seeds" in many.title
    one = estimate_cell(Estimate(2.0, None, 1), 2, error=0.3)
    assert (one.text, one.detail) == ("2.00", "(0.30)")
    assert "standard error" in one.title
    bare = estimate_cell(Estimate(2.0, None, 1), 2)
    assert (bare.detail, bare.title) == ("", "one seed: no interval")
    assert estimate_cell(None, 2).text == "–"


def test_the_best_is_marked_only_among_several():
    cells = [Cell("1", value=1.0), Cell("2", value=2.0), Cell("–")]
    mark_best(cells, "higher")
    assert [cell.kind for cell in cells] == ["", "best", ""]
    alone = [Cell("1", value=1.0)]
    mark_best(alone, "lower")
    assert alone[0].kind == ""
