"""Lines over steps or layers, averaged over seeds and downsampled for the screen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .collect import Run
from .groups import Group
from .text import short

MOST_POINTS = 500  # of a line
FEWEST_POINTS, MOST_OF_A_VIEW = 150, 10_000  # with many lines, each has fewer points, to keep the page small


def rounded(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Five significant digits; None for values that are not finite."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float).tolist()]


def nanmean(values: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """np.nanmean without a warning for empty slices, which give NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=axis)


@dataclass
class Line:
    """A line of a chart. `group` is an index into the groups; `thin` marks one seed next to the mean of several."""

    group: int
    name: str
    x: np.ndarray
    y: np.ndarray
    thin: bool = False


Read = Callable[[Run], tuple[np.ndarray, np.ndarray]]
NOTHING = np.zeros(0, dtype=np.int64), np.zeros(0)


def step_lines(groups: list[Group], key: str, since: float = 0.0, until: int | None = None) -> list[Line]:
    """Lines of one entry of the log over steps, from a share of the planned steps up to a step."""

    def read(run: Run) -> tuple[np.ndarray, np.ndarray]:
        x, y = run.series(key)
        start = since * max(run.planned_steps or 0, run.steps)
        kept = (x >= start) & (x <= (run.steps if until is None else until))
        return x[kept], y[kept]

    return _lines(groups, read)


def probe_lines(groups: list[Group], key: str, layer: int | None = None) -> list[Line]:
    """Lines of a probed quantity over steps, averaged over heads and over all layers or one layer."""

    def read(run: Run) -> tuple[np.ndarray, np.ndarray]:
        steps, values = run.probes(key)
        if layer is not None:
            values = values[:, layer : layer + 1]
        return (steps, nanmean(values, axis=(1, 2))) if values.size else NOTHING

    return _lines(groups, read)


def layer_lines(groups: list[Group], *keys: str, how: str = "mean") -> list[Line]:
    """Lines of an inspected [layers, heads] quantity over layers, with the mean or the maximum over heads."""

    def read(run: Run) -> tuple[np.ndarray, np.ndarray]:
        values = run.inspected(*keys)
        if values is None:
            return NOTHING
        if how == "max":
            values = np.where(np.isnan(values).all(axis=1, keepdims=True), np.nan, np.nan_to_num(values, nan=-np.inf))
            return np.arange(len(values)), values.max(axis=1)
        return np.arange(len(values)), nanmean(values, axis=1)

    return _lines(groups, read)


def _lines(groups: list[Group], read: Read) -> list[Line]:
    """One line per group; with several seeds, their mean over the shared steps and a thin line for each seed."""
    lines = []
    for index, group in enumerate(groups):
        found = [(run, x, y) for run in group.runs for x, y in [read(run)] if np.isfinite(y).any()]
        if len(found) == 1:
            lines.append(Line(index, group.label, *found[0][1:]))
            continue
        shared = np.array(sorted(set.intersection(*(set(x.tolist()) for _, x, _ in found)))) if found else NOTHING[0]
        thin = bool(len(shared))
        lines += [Line(index, f"{group.label}, seed {run.seed_label}", x, y, thin) for run, x, y in found]
        if thin:
            together = np.stack([y[np.searchsorted(x, shared)] for _, x, y in found])
            name = f"{group.label}, mean of {len(found)} seeds"
            lines.append(Line(index, name, shared, nanmean(together, axis=0)))
    return lines


def line_data(lines: list[Line]) -> list[dict[str, Any]]:
    """Lines for the page."""
    data = []
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_OF_A_VIEW // max(len(lines), 1)))
    for line in lines:
        points = thinned(line.x, line.y, most)
        if line.thin:  # no band for single seeds
            points = {"x": points["x"], "y": points["y"], "thin": True}
        data.append({"group": line.group, "name": short(line.name), **points})
    return data


def thinned(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> dict[str, Any]:
    """All points, or mean, minimum and maximum of equal parts, so that spikes stay visible."""
    if len(x) <= most:
        return {"x": x.tolist(), "y": rounded(y)}
    parts = np.array_split(np.arange(len(x)), most)
    has = [part[np.isfinite(y[part])] for part in parts]
    return {
        "x": [round(float(x[part].mean())) for part in parts],
        "y": rounded([y[part].mean() if part.size else np.nan for part in has]),
        "low": rounded([y[part].min() if part.size else np.nan for part in has]),
        "high": rounded([y[part].max() if part.size else np.nan for part in has]),
    }
