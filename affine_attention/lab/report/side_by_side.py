"""Turns a few run folders into a text: the settings that differ, and every measure of each run with its difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...visible import visible
from . import attention_measures as attention
from .cells import shown
from .collect import Run, load_runs
from .first_tokens import SINK_RATE, SINK_RATE_OF_SOFTMAX, STRONGEST, UNIFORM
from .gradient_windows import AFTER_WARMUP, WINDOWS, clipped_measure, cv_measure, largest_measure
from .groups import BOOKKEEPING, group_runs
from .measures import Measure, incomparable, log_perplexity_measures, loss_measures, parameters, speed, task_measures
from .questions import OBJECTIVE
from .runs import flat
from .text import short

LONGEST = 28  # characters of a cell
MOST_RUNS = 12  # columns
PARAMETERS = Measure("Parameters", parameters, better="", digits=0)
SPEED = Measure("Tokens/s", speed, better="higher", digits=0)


def compare_runs(paths: Iterable[Path | str]) -> str:
    """The differences that matter between two or more runs, as aligned text; the first run is the reference.

    Raises ValueError for fewer than two runs. Differences of single runs have no interval: `affine report` averages
    over seeds and tests them.
    """
    runs = load_runs(list(paths))
    if not 2 <= len(runs) <= MOST_RUNS:
        raise ValueError(
            f"compare needs 2 to {MOST_RUNS} different runs, got {len(runs)}; `affine report` has tables of many runs"
        )
    names = [short(run.name, LONGEST) for run in runs]
    parts = [_block("settings that differ", names, _settings(runs)) or "no setting differs"]
    for title, measures in _measures(runs):
        if lines := _results(runs, measures):
            parts.append(
                _block(title, [names[0], *(name for each in names[1:] for name in (each, "difference"))], lines)
            )
    return "\n\n".join([*parts, "\n".join(_remarks(runs))])


def _measures(runs: list[Run]) -> list[tuple[str, list[Measure]]]:
    groups = group_runs(runs)
    gradients = [make(window) for window in WINDOWS for make in (cv_measure, clipped_measure)]
    inside = [attention.FIRST_TOKEN, attention.FIRST_TOKEN_OF_SOFTMAX, UNIFORM, STRONGEST, SINK_RATE,
              SINK_RATE_OF_SOFTMAX,
              attention.ENTROPY, attention.ENTROPY_OF_SOFTMAX, attention.TOTAL_WEIGHT_SPREAD,
              attention.ENTROPY_SPREAD, attention.ROW_SUM_SPREAD]  # fmt: skip
    return [
        ("quality", [*loss_measures(groups)[::-1], *log_perplexity_measures(groups), *task_measures(groups)]),
        ("gradient norm", [*gradients, largest_measure(AFTER_WARMUP)]),
        ("attention", inside),
        ("cost", [PARAMETERS, SPEED]),
    ]


def _settings(runs: list[Run]) -> list[list[str]]:
    """Settings of the recipes that differ; bookkeeping (how a run is stored and logged) is left out."""
    hidden = BOOKKEEPING - {"name", "seed", "data_seed", "mechanism"}
    tables = [flat({key: value for key, value in run.recipe.items() if key not in hidden}) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [[short(key, LONGEST), *(short(table.get(key, "–"), LONGEST) for table in tables)] for key in keys]
    return [row for row, key in zip(rows, keys, strict=True) if len({table.get(key) for table in tables}) > 1]


def _results(runs: list[Run], measures: Sequence[Measure]) -> list[list[str]]:
    lines = []
    for measure in measures:
        values = [measure.read(run) for run in runs]
        if all(math.isnan(value) for value in values):
            continue
        cells = [shown(values[0], measure.digits)]
        for value in values[1:]:
            cells += [shown(value, measure.digits), shown(value - values[0], measure.digits, sign=True)]
        lines.append([short(measure.label, 40), *cells])
    return lines


def _remarks(runs: list[Run]) -> list[str]:
    """What makes the runs incomparable, and how to get intervals."""
    found = []
    unfinished = [f"{short(run.name, LONGEST)} ({run.status})" for run in runs if not run.finished]
    if unfinished:
        found.append(f"not finished: {', '.join(unfinished)}")
    if any(_differ(run.recipe.get(key) for run in runs) for key in OBJECTIVE):
        found.append("the objective differs, so the losses are not comparable; perplexities are")
    if _differ(run.manifest["data"].get("fingerprint") for run in runs if isinstance(run.manifest.get("data"), dict)):
        found.append("the runs were trained on different data")
    if _differ(run.tokens for run in runs if not math.isnan(run.tokens)):
        found.append("the runs have seen different numbers of tokens")
    found += incomparable(group_runs(runs))
    found.append("differences of single runs have no interval; `affine report` averages over seeds and tests them")
    return [f"note: {visible(words)}" for words in found]


def _differ(values: Iterable[Any]) -> bool:
    return len({str(value) for value in values}) > 1


def _block(title: str, names: list[str], lines: list[list[str]]) -> str:
    """Aligned columns: text to the left, numbers to the right."""
    if not lines:
        return ""
    table = [[title, *names], *lines]
    widths = [max(len(row[column]) for row in table) for column in range(len(names) + 1)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    )
