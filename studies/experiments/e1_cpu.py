"""Runs the CPU version of E1 (e1.md): 1M-parameter students that separate start scale, static and adaptive scale.

    python -m studies.experiments.e1_cpu runs/e1_cpu             # 28 runs, about 20 minutes on one core; resumes
    python -m studies.experiments.e1_cpu runs/e1_cpu --store     # collects them into the stored result
    python -m studies.experiments.e1_cpu --report                # tables and figure of docs/experiments.md

The runs that E4 on a CPU has stored with the same settings are not run again. The GPU version with 30M parameters is
`python -m studies.experiments.run e1`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from affine_attention.lab.run import RunFolder
from affine_attention.study import Plan

from .cpu_runs import SETTINGS, load, numbers_of, run_command, train_missing, write_result
from .design_runs import Values, split_name
from .e1_report import STORED_CELLS, letters_of, loss_table, start_lines, tests
from .e3 import RESULTS
from .e4_cpu import NAME as NAME_OF_E4
from .e4_cpu import SEEDS as STORED_SEEDS
from .plans import E1_RATED, E1_STUDENTS, SEEDS, ScaledStarts, runs_of
from .verdicts import Verdict, verdict_lines

RATE, LOW_RATE = 2e-3, 1e-3
NAME = "e1_cpu"
LETTERS = letters_of(LOW_RATE)


def plans(out: Path, settings: Mapping[str, Any] = SETTINGS) -> list[Plan]:
    """New students with all seeds, stored students with the seeds that E4 does not have, and one repeated run."""
    usual = {**settings, "learning_rate": RATE}
    rated = tuple(f"{mechanism}+learning_rate={LOW_RATE}" for mechanism in E1_RATED)
    others = tuple(seed for seed in SEEDS if seed not in STORED_SEEDS)
    return [
        ScaledStarts("tiny_cpu", E1_STUDENTS, SEEDS, usual, starts=out / "starts"),
        Plan("tiny_cpu", (*STORED_CELLS, *rated), others, usual),
        Plan("tiny_cpu", ("softmax",), SEEDS[:1], usual),
    ]


def run_all(out: Path, settings: Mapping[str, Any] = SETTINGS) -> None:
    chosen = plans(out, settings)
    for plan in chosen:
        if isinstance(plan, ScaledStarts):
            plan.write_starts()
    train_missing({job.name: job.recipe for job in runs_of(chosen, out)}, out)


def store(out: Path, results: Path = RESULTS) -> Path:
    lines = []
    for job in runs_of(plans(out), out):
        student, seed = split_name(job.name)
        lines.append({"student": student, "seed": seed, **numbers_of(RunFolder(out / job.name))})
    return write_result(NAME, {"experiment": "E1, CPU version"}, lines, results)


def results_of(runs: Sequence[dict[str, Any]], runs_of_e4: Sequence[dict[str, Any]]) -> tuple[list[Verdict], Values]:
    """(verdicts, losses by cell and seed) from the stored results of E1 and E4 on a CPU."""
    found: dict[str, float] = {}
    again: dict[str, float] = {}
    for run in runs_of_e4:
        rate = "" if run["learning_rate"] == RATE else f"_learning_rate={run['learning_rate']}"
        found[f"{run['mechanism']}{rate}-seed{run['seed']}"] = _loss_of(run)
    for run in runs:
        name = f"{run['student']}-seed{run['seed']}"
        (again if name in found else found)[name] = _loss_of(run)
    finite = {name: loss for name, loss in found.items() if math.isfinite(loss)}
    new: Values = {}
    for name, loss in finite.items():
        cell, seed = split_name(name)
        if cell in LETTERS.values():
            new.setdefault(cell, {})[seed] = loss
    usual = {name: loss for name, loss in finite.items() if split_name(name)[0] in STORED_CELLS}
    return tests(new, usual, again, LETTERS)


def _loss_of(run: Mapping[str, Any]) -> float:
    return math.nan if run["eval_loss"] is None else float(run["eval_loss"])


def tables(runs: Sequence[dict[str, Any]], runs_of_e4: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Verdicts, losses, and the descriptive differences with the noise."""
    verdicts, losses = results_of(runs, runs_of_e4)
    return [verdict_lines(verdicts), loss_table(losses, LETTERS), start_lines(losses, LETTERS)]


def print_report() -> None:
    from .e1_figure import write_figure

    (head, runs), (_, runs_of_e4) = load(NAME), load(NAME_OF_E4)
    print("\n\n".join("\n".join(table) for table in tables(runs, runs_of_e4)))
    minutes = sum(run["seconds"] or 0 for run in runs) / 60
    print(f"\n{len(runs)} new runs, {minutes:.0f} minutes of training, {head['machine']['device']}")
    print(f"written to {write_figure(results_of(runs, runs_of_e4)[1])}")


if __name__ == "__main__":
    run_command(__doc__, run_all, store, print_report)
