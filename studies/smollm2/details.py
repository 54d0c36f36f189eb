"""Writes the tables of docs/study.md from the stored runs, between their marks.

    python -m studies.smollm2.details

The tables are rows and columns of the report's tables (docs/study-tables.md) for the 30M students, and means over seeds
that the report does not have. `<!-- NAME:begin -->` and `<!-- NAME:end -->` enclose the table NAME in the page.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, pvariance

from affine_attention.files import read_json, write_text
from affine_attention.lab.report.cells import Cell, Row, Table, estimate_cell
from affine_attention.lab.report.claim_tables import claim_tables
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.first_tokens import first_token_table
from affine_attention.lab.report.gradient_windows import gradient_window_table
from affine_attention.lab.report.groups import Group, group_runs
from affine_attention.lab.report.markdown import table_rows
from affine_attention.lab.report.statistics import difference
from affine_attention.lab.run import RunFolder

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "study.md"
RUNS, SEEDS = HERE / "30m", (0, 1, 2)
MECHANISMS = ("softmax", "sink", "affine", "affine_no_bias", "head_gated", "gated", "affine_gated")
TEXTS = {"wikipedia2006": "Wikipedia", "openstax": "OpenStax", "elife": "eLife", "novels": "novels", "c4": "C4"}
# The teacher in bf16: `affine evaluate teacher --perplexity …` on a CPU; C4 was not measured.
TEACHER = ("20.4", "16.8", "20.0", "41.6", "–")


@cache
def stored() -> tuple[Group, ...]:
    """Every stored run of the study, grouped."""
    folders = sorted(path.parent for path in HERE.glob("*0m/*/recipe.json"))
    return tuple(group_runs(load_runs([Path(os.path.relpath(folder)) for folder in folders])))


@cache
def claims() -> dict[str, Table]:
    return {table.key: table for table in claim_tables(list(stored()))}


def chosen(table: Table, columns: Sequence[str], keep: Callable[[dict[str, Cell]], bool]) -> list[str]:
    """Some columns and rows of a table of the report, as markdown."""
    at = [table.columns.index(column) for column in columns]
    rows = [row for row in table.rows if keep(dict(zip(table.columns, row.cells, strict=True)))]
    return table_rows(columns, [Row([row.cells[index] for index in at], row.kind) for row in rows])


def verdicts() -> list[str]:
    columns = ("Claim", "Verdict", "Difference", "Comparison", "Measure", "Tests")
    table = claims()["verdicts"]
    lines = chosen(table, columns, lambda cells: cells["Claim"].detail == "30m")
    return [line.replace(" 30m | ", " | ", 1) for line in lines]


def tested(key: str, *more: str) -> list[str]:
    """The tested rows of a claim's table."""
    columns = (*more, "Difference", "Own interval", "Error term", "p (Holm)", "Verdict")
    return chosen(claims()[key], columns, lambda cells: cells["Verdict"].text != "–" and cells["Setting"].text == "30m")


def effects() -> list[str]:
    """What beta does in the factorial, and the activation."""
    first, second = (tested(f"factorial-beta-{which}", "Comparison", "Measure") for which in ("first", "second"))
    return [*first, *second[2:]]


def windows() -> list[str]:
    table = gradient_window_table(list(stored()))
    columns = ["Mechanism", *(column for column in table.columns if column.startswith(("CV", "Clipped")))]
    return chosen(table, columns, _main)


def first_steps() -> list[str]:
    """The variance of the gradient norm with and without the first 20 steps; differences are paired by seed."""
    lines = ["| steps | affine | softmax | affine − softmax, own interval |", "|---|---|---|---|"]
    norms = {
        name: [[line["grad_norm"] for line in RunFolder(RUNS / f"{name}-seed{seed}").log()] for seed in SEEDS]
        for name in ("affine", "softmax")
    }
    for first, last in ((1, 20), (21, 500), (1, 500)):
        of = {name: [pvariance(norm[first - 1 : last]) for norm in found] for name, found in norms.items()}
        gap = difference(dict(enumerate(of["affine"])), dict(enumerate(of["softmax"])))
        assert gap is not None
        cell = estimate_cell(gap, 4, sign=True)
        means = " | ".join(f"{fmean(of[name]):.4f}" for name in norms)
        lines.append(f"| {first} to {last} | {means} | {cell.text} {cell.detail} |")
    return lines


def first_tokens() -> list[str]:
    columns = ("Mechanism", "w", "Softmax part", "Uniform attention", "Softmax part / uniform", "Strongest head")
    return chosen(first_token_table(list(stored())), columns, _main)


def stability() -> list[str]:
    table = claims()["question-stability"]
    return chosen(table, [column for column in table.columns if column != "Setting"], lambda cells: True)


def power() -> list[str]:
    columns = ("Measure", "Mechanisms", "Residual", "df", "Would show", "In 80 %", "Bartlett’s p")
    return chosen(claims()["power"], columns, lambda cells: cells["Setting"].text == "30m")


def perplexities() -> list[str]:
    """Per token, mean of three seeds."""
    lines = [f"| per token | {' | '.join(TEXTS.values())} |", f"|{'---|' * (len(TEXTS) + 1)}"]
    lines.append(f"| the teacher, SmolLM2-135M | {' | '.join(TEACHER)} |")
    for mechanism in ("softmax", "affine", "head_gated"):
        found = [read_json(RunFolder(RUNS / f"{mechanism}-seed{seed}").evaluation_file) for seed in SEEDS]
        cells = [f"{fmean(each['perplexity'][text]['token'] for each in found):.1f}" for text in TEXTS]
        lines.append(f"| {mechanism} | {' | '.join(cells)} |")
    return lines


def _main(cells: dict[str, Cell]) -> bool:
    """A preset of the 30M students with three seeds."""
    return cells["Recipe"].text == "30m" and cells["Mechanism"].text in MECHANISMS


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "verdicts": verdicts,
    "power": power,
    "controls": lambda: tested("claim-controls", "Comparison"),
    "effects": effects,
    "first-steps": first_steps,
    "windows": windows,
    "stability": stability,
    "first-tokens": first_tokens,
    "readings": lambda: tested("question-variants", "Comparison"),
    "perplexities": perplexities,
}


def rewritten(page: str, names: Iterable[str] = tuple(BLOCKS)) -> str:
    """The page with every table made anew; raises ValueError if a mark is missing."""
    for name in names:
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"{PAGE.name} must have one {begin} and one {end}")
        before, after = page.split(begin)[0], page.split(end)[1]
        page = f"{before}{begin}\n" + "\n".join(BLOCKS[name]()) + f"\n{end}{after}"
    return page


if __name__ == "__main__":
    write_text(PAGE, rewritten(PAGE.read_text(encoding="utf-8")))
    print(PAGE)
