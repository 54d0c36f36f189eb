"""The paper's numbers in the report equal those of its text, from which paper_numbers.json was extracted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from affine_attention.lab.report import paper_numbers

PRINTED = json.loads((Path(__file__).parent / "paper_numbers.json").read_text())


@pytest.mark.parametrize("table", ["table_1", "table_2"])
def test_tables_1_and_2(table):
    ours = [
        [r.size, r.method, r.delta_parameters, r.loss, r.perplexity, *r.accuracies, r.average]
        for r in getattr(paper_numbers, table.upper())
    ]
    assert ours == PRINTED[table]


def test_table_3():
    assert PRINTED["table_3"] == paper_numbers.TABLE_3


def test_tables_4_and_5():
    rows = paper_numbers.TABLES_4_AND_5
    assert [[r.size, r.method, r.mean, r.std, r.variance, r.cv] for r in rows] == PRINTED["table_4"]
    assert [[r.size, r.method, r.spikes_6, r.spikes_9] for r in rows] == PRINTED["table_5"]


def test_no_test_needs_the_text_of_the_paper():
    """It is not part of the repository, so such tests would be skipped for everybody else."""
    name = "paper" + ".txt"
    for path in Path(__file__).parents[2].rglob("*.py"):
        assert name not in path.read_text(), path
