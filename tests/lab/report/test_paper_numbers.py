"""The paper's numbers against the paper's own text, where it lies beside the repository."""

import re
from pathlib import Path

import pytest

from affine_attention.lab.report import paper_numbers

PAPER = Path(__file__).parents[4] / "shared" / "paper.txt"


@pytest.fixture(scope="module")
def lines():
    if not PAPER.is_file():
        pytest.skip("needs ../shared/paper.txt, the text of arXiv 2602.23057")
    return PAPER.read_text().splitlines()


def between(lines, start, end):
    first = next(k for k, line in enumerate(lines) if line.startswith(start))
    last = next(k for k, line in enumerate(lines) if k > first and line.startswith(end))
    return lines[first + 1 : last]


def rows(lines):
    """(size or None, method, numbers) of the lines that end in numbers."""
    found, size = [], None
    for line in lines:
        match = re.match(r"(?:(?:Qwen-|LLaMA-)?([\d.]+B) )?([A-Z][A-Za-z+ -]*?) ([\d. ]+)$", line)
        if match:
            size = match.group(1) or size
            found.append((size, match.group(2), [float(x) for x in match.group(3).split()]))
    return found


@pytest.mark.parametrize(
    ("table", "start", "end"), [("TABLE_1", "Table 1:", "5 Exp"), ("TABLE_2", "Table 2:", "Since")]
)
def test_tables_1_and_2(lines, table, start, end):
    ours = [
        (r.size, r.method, [r.delta_parameters, r.loss, r.perplexity, *r.accuracies, r.average])
        for r in getattr(paper_numbers, table)
    ]
    assert ours == rows(between(lines, start, end))


def test_table_3(lines):
    text = next(line for line in lines if line.startswith("CSR Avg."))
    assert [float(x) for x in text.split()[2:]] == list(paper_numbers.TABLE_3.values())
    assert list(paper_numbers.TABLE_3) == ["sigmoid", "linear_clipping"]


def test_tables_4_and_5(lines):
    ours = [(r.size, r.method, [r.mean, r.std, r.variance, r.cv]) for r in paper_numbers.TABLES_4_AND_5]
    assert ours == rows(between(lines, "Table 4:", "To further"))
    ours = [(r.size, r.method, [float(r.spikes_6), float(r.spikes_9)]) for r in paper_numbers.TABLES_4_AND_5]
    assert ours == rows(between(lines, "Table 5:", "B.4"))
