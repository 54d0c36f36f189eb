"""The measures that tables compare: how to read them from a run, and means and differences over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..gradient_norms import LAST_STEP as EARLY
from ..gradient_norms import THRESHOLDS, gradient_statistics
from . import paper_numbers
from .collect import Run, number
from .groups import Group
from .statistics import Estimate, difference, estimate
from .text import short

HELD_OUT = "Held-out loss"
FINAL_SHARE, FINAL_LEAST = 0.02, 10  # the final loss is the mean of the last 2 % of the steps, at least ten


@dataclass(frozen=True)
class Measure:
    """A column of a table: how to read it from a run, its standard error within a run, which direction is better."""

    label: str
    read: Callable[[Run], float]
    error: Callable[[Run], float] = lambda run: math.nan
    better: str = "lower"
    digits: int = 3
    title: str = ""

    def by_seed(self, group: Group) -> dict[Any, float]:
        """One value per seed; several folders with the same seed are averaged."""
        values: dict[Any, list[float]] = {}
        for run in counted(group):
            if not math.isnan(value := self.read(run)):
                values.setdefault(run.seeds, []).append(value)
        return {seed: math.fsum(found) / len(found) for seed, found in values.items()}

    def of(self, group: Group) -> Estimate | None:
        return estimate(list(self.by_seed(group).values()))

    def error_of(self, group: Group) -> float:
        """The standard error within a run, if only one run has the measure."""
        having = [run for run in counted(group) if not math.isnan(self.read(run))]
        return self.error(having[0]) if len(having) == 1 else math.nan

    def delta(self, group: Group, baseline: Group) -> Estimate | None:
        """Group − baseline, paired by seed; None while one of them is still training."""
        if not (group.finished and baseline.finished):
            return None
        return difference(self.by_seed(group), self.by_seed(baseline))


def counted(group: Group) -> list[Run]:
    """The runs that are averaged: the finished ones, or all if none has finished."""
    return [run for run in group.runs if run.finished] or group.runs


def final_loss(run: Run) -> float:
    """Mean training loss of the last steps."""
    _, losses = run.series("loss")
    last = losses[-max(FINAL_LEAST, math.ceil(FINAL_SHARE * len(losses))) :]
    return float(np.nanmean(last)) if last.size and not np.isnan(last).all() else math.nan


def heldout_loss(run: Run) -> float:
    _, values = run.series("eval_loss")
    return float(values[-1]) if values.size else math.nan


def speed(run: Run) -> float:
    """Median tokens per second."""
    _, values = run.series("tokens_per_second")
    return float(np.nanmedian(values)) if values.size and not np.isnan(values).all() else math.nan


def perplexity(run: Run, name: str, form: str) -> float:
    return number(_entry(run, "perplexity", name).get(form))


def accuracy(run: Run, task: str) -> float:
    """In per cent."""
    return 100 * number(_entry(run, "tasks", task).get("value"))


def accuracy_error(run: Run, task: str) -> float:
    return 100 * number(_entry(run, "tasks", task).get("stderr"))


def average_accuracy(run: Run, tasks: list[str]) -> float:
    """The mean over the tasks; NaN if one was not measured, as averages over different tasks are not comparable."""
    return math.fsum(accuracy(run, task) for task in tasks) / len(tasks) if tasks else math.nan


def average_error(run: Run, tasks: list[str]) -> float:
    return math.sqrt(math.fsum(accuracy_error(run, task) ** 2 for task in tasks)) / len(tasks) if tasks else math.nan


def loss_measures(groups: list[Group]) -> list[Measure]:
    found = [
        Measure("Loss", final_loss, title="mean training loss of the last 2 % of the steps, at least ten"),
        Measure(HELD_OUT, heldout_loss, title="the same loss on held-out text, at the end of training"),
    ]
    return [measure for measure in found if _is_measured(measure, groups)]


def perplexity_measures(groups: list[Group]) -> list[Measure]:
    """Word perplexity of each held-out set: the unit that is consistent with the paper's C4 PPL."""
    names = _names(groups, "perplexity")
    return [
        Measure(
            f"{name} word PPL",
            partial(perplexity, name=name, form="word"),
            digits=2,
            title="perplexity per word; per token and per byte in the perplexity table",
        )
        for name in names
    ]


def log_perplexity_measures(groups: list[Group]) -> list[Measure]:
    """ln of the word perplexity of each text, and their mean: differences of logarithms are ratios of perplexities."""
    names = _names(groups, "perplexity")
    found = [
        Measure(
            f"ln {name} word PPL",
            partial(log_perplexity, names=(name,)),
            digits=4,
            title="logarithm of the perplexity per word: a difference of 0.01 is 1 %",
        )
        for name in names
    ]
    if len(names) > 1:
        title = f"mean over {', '.join(short(name, 30) for name in names[:12])}"
        read = partial(log_perplexity, names=tuple(names))
        found.insert(0, Measure(f"ln word PPL, mean of {len(names)} texts", read, digits=4, title=title))
    return found


def log_perplexity(run: Run, names: tuple[str, ...]) -> float:
    """Mean ln of the word perplexities; NaN if one was not measured."""
    values = [perplexity(run, name, "word") for name in names]
    return math.fsum(map(math.log, values)) / len(values) if all(value > 0 for value in values) else math.nan


def quality_measures(groups: list[Group]) -> tuple[list[Measure], list[Measure]]:
    """(the one measure of quality that is tested, further measures of the same runs)."""
    losses, texts = loss_measures(groups), log_perplexity_measures(groups)
    ranked = [*(m for m in losses if m.label == HELD_OUT), *texts[:1], *losses, *texts]
    ordered = list({measure.label: measure for measure in ranked}.values())
    return ordered[:1], ordered[1:]


def paper_tasks(groups: list[Group]) -> list[str]:
    """The measured tasks among the paper's six, in the order of Table 1."""
    names = _names(groups, "tasks")
    return [task for task in paper_numbers.TASKS if task in names]


def task_measures(groups: list[Group]) -> list[Measure]:
    """The paper's tasks, their average, then all other tasks."""
    ours = paper_tasks(groups)
    others = [name for name in _names(groups, "tasks") if name not in ours]
    average = []
    if ours:
        average = [
            Measure(
                "Avg." if len(ours) == len(paper_numbers.TASKS) else f"Avg. of {len(ours)}",
                lambda run: average_accuracy(run, ours),
                lambda run: average_error(run, ours),
                better="higher",
                digits=1,
                title="mean of " + ", ".join(ours),
            )
        ]
    return [*(_task(name) for name in ours), *average, *(_task(name) for name in others)]


def _task(name: str) -> Measure:
    return Measure(
        paper_numbers.TASKS.get(name, name),
        lambda run: accuracy(run, name),
        lambda run: accuracy_error(run, name),
        better="higher",
        digits=1,
        title=name,
    )


def _entry(run: Run, part: str, name: str) -> dict[str, Any]:
    table = run.evaluation.get(part)
    found = table.get(name) if isinstance(table, dict) else None
    return found if isinstance(found, dict) else {}


def _names(groups: list[Group], part: str) -> list[str]:
    found: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            table = run.evaluation.get(part)
            found.update(dict.fromkeys(table if isinstance(table, dict) else ()))
    return list(found)


def _is_measured(measure: Measure, groups: list[Group]) -> bool:
    return any(not math.isnan(measure.read(run)) for group in groups for run in group.runs)


def incomparable(groups: list[Group]) -> list[str]:
    """Sentences about text sets and tasks that were measured differently in some runs and are not comparable."""
    notes = []
    for part, keys in (("perplexity", ("documents", "words", "bytes")), ("tasks", ("metric", "n"))):
        for name in _names(groups, part):
            entries = [_entry(run, part, name) for group in groups for run in group.runs]
            kinds = {tuple(str(entry.get(key)) for key in keys) for entry in entries if entry}
            if len(kinds) > 1:
                shown = "; ".join(", ".join(map(" ".join, zip(keys, kind, strict=True))) for kind in sorted(kinds))
                notes.append(f"{short(name, 40)} was measured differently in some runs and is not comparable: {shown}.")
    return notes


def delta_parameters(group: Group, groups: list[Group]) -> float:
    """Parameters minus those of the baseline, from the manifests."""
    mine = parameters(group.runs[0])
    for other in groups:
        if other.is_baseline and other.recipe_name == group.recipe_name and other.settings == group.settings:
            return mine - parameters(other.runs[0])
    return math.nan


def parameters(run: Run) -> float:
    return number(run.manifest.get("parameters"))


def gradients(run: Run) -> dict[str, Any]:
    """Tables 4 and 5 of one run; values that are not numbers count as missing."""
    steps, norms = run.series("grad_norm")
    lines = [
        {"step": step, "grad_norm": None if math.isnan(norm) else norm}
        for step, norm in zip(steps.tolist(), norms.tolist(), strict=True)
        if step <= EARLY
    ]
    return gradient_statistics(lines)


def gradient_number(run: Run, key: str) -> float:
    return number(gradients(run)[key])


def spike_count(run: Run, k: float) -> float:
    return number(gradients(run)["spikes"][f"{k:g}"])


def gradient_measures() -> list[Measure]:
    """Table 4: mean, standard deviation, variance and coefficient of variation."""
    titles = {"Mean": "", "Std": "", "Variance": "", "CV": "standard deviation / mean"}
    return [
        Measure(
            name,
            partial(gradient_number, key=name.lower()),
            better="" if name == "Mean" else "lower",
            digits=4,
            title=title,
        )
        for name, title in titles.items()
    ]


def spike_measures() -> list[Measure]:
    """Table 5: steps above median + k MAD."""
    return [Measure(f"Spikes (k = {k})", partial(spike_count, k=k), digits=0) for k in THRESHOLDS]
