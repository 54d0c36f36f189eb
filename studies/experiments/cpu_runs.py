"""Trains runs on one CPU core, and turns them into a stored result of one line per run: E1 and E4 on a CPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from affine_attention.files import read_lines, write_text
from affine_attention.lab.machine import describe_machine
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training import train
from affine_attention.lab.training.nonfinite import NotFiniteError

from .e3 import RESULTS, rounded
from .e4_report import summary
from .plans import has_diverged

SETTINGS = {
    "teacher": None, "steps": 120, "warmup_steps": 12, "decay_steps": 24, "save_every": 0, "keep_checkpoints": 1,
    "probe_every": 0,
}  # fmt: skip


def train_missing(recipes: Mapping[str, Recipe], out: Path) -> None:
    """Trains what is missing; a run that becomes non-finite stays as it is."""
    for name, recipe in recipes.items():
        run = RunFolder(out / name)
        if run.finished or has_diverged(run):
            continue
        try:
            train(recipe, run.path, quiet=True, device="cpu")
        except NotFiniteError as error:
            print(f"{name}: {error}", flush=True)
        print(name, flush=True)


def numbers_of(run: RunFolder) -> dict[str, Any]:
    """Seconds of training and the numbers of e4_report.summary."""
    if not (run.finished or has_diverged(run)):
        raise ValueError(f"{run.path} is missing or not finished; run the grid first")
    seconds = next((event["seconds"] for event in run.events() if event["event"] == "finish"), None)
    return {"seconds": seconds, **summary(run)}


def write_result(name: str, head: Mapping[str, Any], lines: list[dict[str, Any]], results: Path) -> Path:
    machine = describe_machine("cpu")
    path = results / f"{name}_{machine['date'][:10]}.jsonl"
    first = {**head, "machine": machine, "settings": SETTINGS}
    write_text(path, "".join(json.dumps(rounded(line)) + "\n" for line in (first, *lines)))
    return path


def load(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(machine and settings, runs) of the newest stored result of this name."""
    head, *runs = read_lines(max(RESULTS.glob(f"{name}_*.jsonl")))
    return head, runs


def run_command(
    description: str | None, run: Callable[[Path], None], store: Callable[[Path], Path], report: Callable[[], None]
) -> None:
    """The command of an experiment: OUT trains, OUT --store stores, --report prints."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        report()
        return
    if given.out is None:
        parser.error("OUT is needed unless --report is given")
    if given.store:
        print(f"written to {store(given.out)}")
        return
    torch.set_num_threads(1)
    run(given.out)
