"""Gradient norms by window of steps, with the share of clipped steps: warm-up, the paper's rest, and the end."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from .cells import Row, Table, estimate_cell
from .collect import Run, number
from .groups import Group
from .measures import Measure
from .tables import head_cells, head_columns

# The paper counts steps 0 to 500; the first 100 are its warm-up, whose norms are by far the largest.
WINDOWS: tuple[tuple[int, int | None], ...] = ((0, 100), (101, 500), (501, None))
AFTER_WARMUP = (101, None)


def norms(run: Run, first: int, last: int | None) -> np.ndarray:
    steps, values = run.series("grad_norm")
    chosen = values[(steps >= first) & (steps <= (math.inf if last is None else last))]
    return chosen[np.isfinite(chosen)]


def window_std(run: Run, first: int, last: int | None) -> float:
    found = norms(run, first, last)
    return float(found.std()) if found.size else math.nan


def window_cv(run: Run, first: int, last: int | None) -> float:
    found = norms(run, first, last)
    return float(found.std() / found.mean()) if found.size and found.mean() > 0 else math.nan


def window_largest(run: Run, first: int, last: int | None) -> float:
    found = norms(run, first, last)
    return float(found.max()) if found.size else math.nan


def clipped_share(run: Run, first: int, last: int | None) -> float:
    """Steps whose norm exceeds max_grad_norm, in per cent; NaN if the run does not clip."""
    found, limit = norms(run, first, last), number(run.recipe.get("max_grad_norm"))
    return 100 * float((found > limit).mean()) if found.size and limit > 0 else math.nan


def steps_of(window: tuple[int, int | None]) -> str:
    first, last = window
    return f"{first}–{'end' if last is None else last}"


def cv_measure(window: tuple[int, int | None]) -> Measure:
    read = partial(window_cv, first=window[0], last=window[1])
    return Measure(f"CV, steps {steps_of(window)}", read, digits=4, title="standard deviation / mean of the norm")


def std_measure(window: tuple[int, int | None]) -> Measure:
    return Measure(f"Std, steps {steps_of(window)}", partial(window_std, first=window[0], last=window[1]), digits=4)


def clipped_measure(window: tuple[int, int | None]) -> Measure:
    read = partial(clipped_share, first=window[0], last=window[1])
    title = "share of steps whose norm exceeds max_grad_norm"
    return Measure(f"Clipped %, steps {steps_of(window)}", read, digits=2, title=title)


def largest_measure(window: tuple[int, int | None]) -> Measure:
    read = partial(window_largest, first=window[0], last=window[1])
    return Measure(f"Largest norm, steps {steps_of(window)}", read, digits=1)


def gradient_window_table(groups: list[Group]) -> Table:
    """Standard deviation, CV and clipped steps of each window."""
    measures = [make(window) for window in WINDOWS for make in (std_measure, cv_measure, clipped_measure)]
    measures = [measure for measure in measures if any(measure.of(group) for group in groups)]
    having = [group for group in groups if any(measure.of(group) for measure in measures)]
    rows = [
        Row([*head_cells(group, groups), *(estimate_cell(measure.of(group), measure.digits) for measure in measures)])
        for group in having
    ]
    return Table(
        "gradient-windows",
        "Gradient norm by window of steps",
        "The norm before clipping. Steps 0–500 are the paper's; its 100 steps of warm-up dominate their variance.",
        [*head_columns(groups), *(measure.label for measure in measures)],
        rows,
        [],
        {measure.label: measure.title for measure in measures},
        "No run has gradient norms in its log yet; `affine train` writes them.",
    )
