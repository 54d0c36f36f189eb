"""Runs the CPU version of E4 (e4.md): 1M-parameter students at five learning rates, five mechanisms, two seeds.

    python -m studies.experiments.e4_cpu runs/e4_cpu             # 50 runs, 10 to 40 minutes on one core; resumes
    python -m studies.experiments.e4_cpu runs/e4_cpu --store     # collects them into the stored result
    python -m studies.experiments.e4_cpu --report                # tables and figure of docs/experiments.md

The GPU version with 30M parameters is `python -m studies.experiments.run e4`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from affine_attention.files import read_lines, write_text
from affine_attention.lab.machine import describe_machine
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training import train
from affine_attention.lab.training.nonfinite import NotFiniteError
from affine_attention.recipes import recipe

from .e3 import RESULTS, rounded
from .e4_report import summary, tables
from .plans import E4_MECHANISMS, RATES, has_diverged

SEEDS = (0, 1)
SETTINGS = {
    "teacher": None, "steps": 120, "warmup_steps": 12, "decay_steps": 24, "save_every": 0, "keep_checkpoints": 1,
    "probe_every": 0,
}  # fmt: skip


def name_of(mechanism: str, rate: float, seed: int) -> str:
    return f"{mechanism}_learning_rate={rate}-seed{seed}"


def run_grid(out: Path, settings: Mapping[str, Any] = SETTINGS) -> None:
    """Trains what is missing; a run that becomes non-finite stays as it is and counts as diverged."""
    for seed in SEEDS:
        for rate in RATES:
            for mechanism in E4_MECHANISMS:
                run = RunFolder(out / name_of(mechanism, rate, seed))
                if run.finished or has_diverged(run):
                    continue
                own = {"learning_rate": rate, "seed": seed, "data_seed": seed}
                try:
                    train(recipe("tiny_cpu", mechanism, {**settings, **own}), run.path, quiet=True, device="cpu")
                except NotFiniteError as error:
                    print(f"{run.path.name}: {error}", flush=True)
                print(run.path.name, flush=True)


def store(out: Path, results: Path = RESULTS) -> Path:
    lines = []
    for seed in SEEDS:
        for rate in RATES:
            for mechanism in E4_MECHANISMS:
                run = RunFolder(out / name_of(mechanism, rate, seed))
                if not (run.finished or has_diverged(run)):
                    raise ValueError(f"{run.path} is missing or not finished; run the grid first")
                seconds = next((event["seconds"] for event in run.events() if event["event"] == "finish"), None)
                own = {"mechanism": mechanism, "learning_rate": rate, "seed": seed, "seconds": seconds}
                lines.append(own | summary(run))
    machine = describe_machine("cpu")
    path = results / f"e4_cpu_{machine['date'][:10]}.jsonl"
    head = {"experiment": "E4, CPU version", "machine": machine, "settings": SETTINGS}
    write_text(path, "".join(json.dumps(rounded(line)) + "\n" for line in (head, *lines)))
    return path


def load() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(machine and settings, runs) of the newest stored result."""
    head, *runs = read_lines(max(RESULTS.glob("e4_cpu_*.jsonl")))
    return head, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        from .e4_figure import write_figure

        head, runs = load()
        print("\n\n".join("\n".join(table) for table in tables(runs)))
        minutes = sum(run["seconds"] or 0 for run in runs) / 60
        print(f"\n{len(runs)} runs, {minutes:.0f} minutes of training, {head['machine']['device']}")
        print(f"written to {write_figure(runs)}")
        return
    if given.out is None:
        parser.error("OUT is needed unless --report is given")
    if given.store:
        print(f"written to {store(given.out)}")
        return
    torch.set_num_threads(1)
    run_grid(given.out)


if __name__ == "__main__":
    main()
