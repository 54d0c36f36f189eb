"""Writes the report's tables as GitHub markdown, into a new file or between two marks of an existing file."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path

from ...files import write_text
from . import tables
from .cells import Cell, Row, Table
from .claim_tables import claim_tables
from .first_tokens import first_token_table
from .gradient_windows import gradient_window_table
from .groups import Group
from .instruments import instrument_tables
from .runs import made_table, perplexity_table, runs_table
from .text import short, visible

BEGIN, END = "<!-- report:begin -->", "<!-- report:end -->"
BOLD = ("best", "better", "worse")


def markdown(groups: list[Group], unreadable: dict[str, str] | None = None) -> str:
    """Every table of the report, by section; without a date, so that the same runs give the same text.

    `unreadable` runs, and files of other runs that could not be read, are listed first, as on the page.
    """
    sections = [
        ("The paper’s claims", claim_tables(groups)),
        ("Differences to softmax", [tables.delta_table(groups)]),
        ("Quality", [tables.table_1(groups), tables.table_2(groups), tables.table_3(groups)]),
        ("Training", [tables.table_4(groups), gradient_window_table(groups), tables.table_5(groups)]),
        ("Attention", [first_token_table(groups)]),
        ("Perplexity", [perplexity_table(groups)]),
        ("Instruments", [table for table in instrument_tables(groups) if table.rows]),
        ("What was run", [runs_table(groups), made_table(groups)]),
    ]
    parts = [
        f"## {name}\n\n" + "\n\n".join(table_markdown(table) for table in found) for name, found in sections if found
    ]
    faults = [
        f"{inline(short(path))}: unreadable: {inline(short(why, 400))}" for path, why in (unreadable or {}).items()
    ]
    for run in (run for group in groups for run in group.runs):
        faults += [f"{inline(short(run.name))}: {inline(short(problem, 400))}" for problem in run.problems]
    if faults:
        parts.insert(0, "## What could not be read\n\n" + "\n".join(f"- {fault}" for fault in faults))
    return "\n\n".join(parts) + "\n"


def write_markdown(groups: list[Group], path: Path, unreadable: dict[str, str] | None = None) -> Path:
    """Writes the tables between two marks, into a new file or into a file that has the marks."""
    text = f"{BEGIN}\n\n{markdown(groups, unreadable)}\n{END}"
    if path.is_dir():
        raise IsADirectoryError(f"markdown must be a file, got the folder {path}; write {path / 'report.md'}")
    if path.is_file() and (before := _words_of(path)).strip():
        if before.count(BEGIN) != 1 or before.count(END) != 1 or before.index(BEGIN) > before.index(END):
            raise ValueError(
                f"{path} exists without exactly one {BEGIN} and one {END}, between which the tables are written; add "
                "these two lines, or choose a new file"
            )
        written = before[: before.index(BEGIN)] + text + before[before.index(END) + len(END) :]
    else:
        written = text + "\n"
    write_text(path, written)
    return path


def _words_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: byte {error.start} is not UTF-8; choose a new file") from error


def table_markdown(table: Table) -> str:
    """A heading, the caption, the table and its notes."""
    lines = [f"### {inline(table.title)}", ""]
    if not table.rows:
        return "\n".join([*lines, _prose(table.missing)])
    lines += [_prose(table.caption), "", *table_rows(table.columns, table.rows)]
    for note in table.notes:
        lines += ["", _prose(note)]
    return "\n".join(lines)


def table_rows(columns: Iterable[str], rows: list[Row]) -> list[str]:
    """The lines of a table with at least one row."""
    sides = ["---:" if cell.numeric else ":---" for cell in rows[0].cells]
    head = [_line(inline(short(column, 60)) for column in columns), _line(sides)]
    return [*head, *(_line(_cell(cell, row) for cell in row.cells) for row in rows)]


def _cell(cell: Cell, row: Row) -> str:
    text = inline(short(cell.text))
    if cell.kind in BOLD and text:
        text = f"**{text}**"
    elif row.kind == "paper" and text:
        text = f"*{text}*"
    return f"{text} {inline(cell.detail)}" if cell.detail else text


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def inline(text: str) -> str:
    """Escapes markup, because names are untrusted. `a_b` needs no escape, `_a_` does."""
    marked = re.sub(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))", r"\\\1", html.escape(visible(text), quote=False))
    # GitHub also turns bare URLs into links.
    return re.sub(r"(?i)\b(https?|ftp|mailto|xmpp)(?=:)|\bwww(?=\.)", lambda found: found[0] + "\\", marked)


def _prose(text: str) -> str:
    """The same, but `commands` keep their code formatting."""
    parts = re.split(r"(`[^`]*`)", visible(text))
    return "".join(visible(p).replace("|", "\\|") if p.startswith("`") and len(p) > 1 else inline(p) for p in parts)
