"""Cells, rows and tables of the report, and the formatting of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .statistics import Estimate


@dataclass
class Cell:
    """A text, a smaller detail after it (an interval or an error), and its highlighting."""

    text: str
    detail: str = ""
    title: str = ""
    kind: str = ""  # "", "best", "better" or "worse"
    value: float | None = None
    numeric: bool = True


def blank() -> Cell:
    return Cell("–", title="not measured")


@dataclass
class Row:
    cells: list[Cell]
    kind: str = ""  # "" for our runs, "paper" for the paper's own numbers


@dataclass
class Table:
    """A table of the page. `missing` is shown instead of a table without rows."""

    key: str
    title: str
    caption: str
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    column_titles: dict[str, str] = field(default_factory=dict)
    missing: str = ""


def text_cell(text: object, title: str = "") -> Cell:
    return Cell(str(text), title=title, numeric=False)


def shown(value: float, digits: int, sign: bool = False) -> str:
    """A number with `digits` decimals and a typographic minus; very large numbers are shown with three digits."""
    if math.isnan(value):
        return "–"
    kind = ".2e" if abs(value) >= 1e6 else f",.{digits}f"
    text = f"{value:+{kind}}" if sign else f"{value:{kind}}"
    if not text.strip("+-0.,"):  # no sign for numbers that round to zero
        text = text.lstrip("+-")
    return text.replace("-", "−")


def estimate_cell(found: Estimate | None, digits: int, error: float = math.nan, sign: bool = False) -> Cell:
    """mean ± half of the 95 % interval over seeds; with one seed, the standard error of the task in brackets."""
    if found is None:
        return blank()
    if found.half_width is not None:
        detail = f"± {shown(found.half_width, digits)}"
        title = f"mean of {found.seeds} seeds ± half of the 95 % interval"
    elif not math.isnan(error):
        detail, title = f"({shown(error, digits)})", "one seed; standard error of the task in brackets"
    else:
        detail, title = "", "one seed: no interval"
    return Cell(shown(found.mean, digits, sign), detail, title, value=found.mean)


def mark_best(cells: list[Cell], better: str) -> None:
    """Marks the best cell of a column, as in the paper; none if all values are equal."""
    values = [cell.value for cell in cells if cell.value is not None]
    if len(set(values)) < 2 or better not in ("lower", "higher"):
        return
    best = min(values) if better == "lower" else max(values)
    for cell in cells:
        if cell.value == best:
            cell.kind = "best"
