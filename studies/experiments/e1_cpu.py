"""Runs the CPU version of E1 (e1.md): 1M-parameter students that separate start scale, static and adaptive scale.

    python -m studies.experiments.e1_cpu runs/e1_cpu             # 44 runs, about 30 minutes on one core; resumes
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

from affine_attention.lab.names import folder_name
from affine_attention.lab.report.pooled import pool
from affine_attention.lab.run import RunFolder
from affine_attention.study import Plan

from .cpu_runs import SETTINGS, load, numbers_of, run_command, train_missing, write_result
from .design_runs import Values, split_name
from .e1_report import STORED_CELLS, letters_of, loss_table, start_lines, start_scale, tests, two_sided
from .e3 import RESULTS
from .e4_cpu import NAME as NAME_OF_E4
from .e4_cpu import SEEDS as STORED_SEEDS
from .plans import E1_RATED, E1_STUDENTS, SEEDS, ScaledStarts, runs_of
from .verdicts import Verdict, verdict_lines

RATE, LOW_RATE = 2e-3, 1e-3
NAME = "e1_cpu"
LETTERS = letters_of(LOW_RATE)
# The second part of the design, with new seeds.
FOLLOW_UP = ("softmax", "head_gated", "constant_alpha", "head_gated+alpha_start=0.25")
NEW_SEEDS = (3, 4, 5, 6)


def plans(out: Path, settings: Mapping[str, Any] = SETTINGS) -> list[Plan]:
    """New students, stored students with the seed that E4 does not have, one repeated run, and the follow-up."""
    usual = {**settings, "learning_rate": RATE}
    rated = tuple(f"{mechanism}+learning_rate={LOW_RATE}" for mechanism in E1_RATED)
    others = tuple(seed for seed in SEEDS if seed not in STORED_SEEDS)
    return [
        ScaledStarts("tiny_cpu", E1_STUDENTS, SEEDS, usual, starts=out / "starts"),
        Plan("tiny_cpu", (*STORED_CELLS, *rated), others, usual),
        Plan("tiny_cpu", ("softmax",), SEEDS[:1], usual),
        Plan("tiny_cpu", FOLLOW_UP, NEW_SEEDS, usual),
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
        if run["seed"] not in SEEDS:
            continue
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


def follow_up(runs: Sequence[dict[str, Any]]) -> tuple[list[Verdict], Values]:
    """(verdicts, losses) of the runs with new seeds alone."""
    losses: Values = {}
    for run in runs:
        if run["seed"] in NEW_SEEDS and math.isfinite(loss := _loss_of(run)):
            losses.setdefault(run["student"], {})[run["seed"]] = loss
    noise, terms = pool([*losses.values()]), [(1.0, LETTERS["g"]), (-1.0, "head_gated")]
    smaller = two_sided("H6, an even smaller start is better", losses, noise, terms, seeds=NEW_SEEDS)
    return [start_scale(losses, noise, LETTERS, NEW_SEEDS), smaller], losses


def tables(runs: Sequence[dict[str, Any]], runs_of_e4: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Verdicts, losses and descriptive differences; then verdicts and losses of the follow-up."""
    verdicts, losses = results_of(runs, runs_of_e4)
    again, new = follow_up(runs)
    cells = [folder_name(variant) for variant in FOLLOW_UP]
    return [
        verdict_lines(verdicts),
        loss_table(losses, LETTERS),
        start_lines(losses, LETTERS),
        verdict_lines(again),
        loss_table(new, LETTERS, cells, NEW_SEEDS),
    ]


def print_report() -> None:
    from .e1_figure import write_figure

    (head, runs), (_, runs_of_e4) = load(NAME), load(NAME_OF_E4)
    print("\n\n".join("\n".join(table) for table in tables(runs, runs_of_e4)))
    minutes = sum(run["seconds"] or 0 for run in runs) / 60
    print(f"\n{len(runs)} new runs, {minutes:.0f} minutes of training, {head['machine']['device']}")
    print(f"written to {write_figure(results_of(runs, runs_of_e4)[1])}")


def main() -> None:
    run_command(__doc__, run_all, store, print_report)


if __name__ == "__main__":
    main()
