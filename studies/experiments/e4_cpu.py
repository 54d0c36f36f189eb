"""Runs the CPU version of E4 (e4.md): 1M-parameter students at five learning rates, five mechanisms, two seeds.

    python -m studies.experiments.e4_cpu runs/e4_cpu             # 50 runs, 10 to 40 minutes on one core; resumes
    python -m studies.experiments.e4_cpu runs/e4_cpu --store     # collects them into the stored result
    python -m studies.experiments.e4_cpu --report                # tables and figure of docs/experiments.md

The GPU version with 30M parameters is `python -m studies.experiments.run e4`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from affine_attention.lab.run import RunFolder
from affine_attention.recipes import recipe

from .cpu_runs import SETTINGS, load, numbers_of, run_command, train_missing, write_result
from .e3 import RESULTS
from .e4_report import tables
from .plans import E4_MECHANISMS, RATES

SEEDS = (0, 1)
NAME = "e4_cpu"


def name_of(mechanism: str, rate: float, seed: int) -> str:
    return f"{mechanism}_learning_rate={rate}-seed{seed}"


def grid() -> Iterator[tuple[str, float, int]]:
    return ((mechanism, rate, seed) for seed in SEEDS for rate in RATES for mechanism in E4_MECHANISMS)


def run_grid(out: Path, settings: Mapping[str, Any] = SETTINGS) -> None:
    """Trains what is missing; a run that becomes non-finite counts as diverged."""
    recipes = {}
    for mechanism, rate, seed in grid():
        own = {"learning_rate": rate, "seed": seed, "data_seed": seed}
        recipes[name_of(mechanism, rate, seed)] = recipe("tiny_cpu", mechanism, {**settings, **own})
    train_missing(recipes, out)


def store(out: Path, results: Path = RESULTS) -> Path:
    lines = [
        {"mechanism": mechanism, "learning_rate": rate, "seed": seed}
        | numbers_of(RunFolder(out / name_of(mechanism, rate, seed)))
        for mechanism, rate, seed in grid()
    ]
    return write_result(NAME, {"experiment": "E4, CPU version"}, lines, results)


def print_report() -> None:
    from .e4_figure import write_figure

    head, runs = load(NAME)
    print("\n\n".join("\n".join(table) for table in tables(runs)))
    minutes = sum(run["seconds"] or 0 for run in runs) / 60
    print(f"\n{len(runs)} runs, {minutes:.0f} minutes of training, {head['machine']['device']}")
    print(f"written to {write_figure(runs)}")


def main() -> None:
    run_command(__doc__, run_grid, store, print_report)


if __name__ == "__main__":
    main()
