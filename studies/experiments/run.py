"""Runs an experiment on one GPU, in parts of a few minutes, and stores its runs without weights in a small archive.

    python -m studies.experiments.run e1 DATA teacher runs/e1 --minutes 9 --archive e1.tar.xz

README.md in this folder lists the experiments. The same command resumes: finished runs are taken from the archive if
the folder does not have them.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training import NotFiniteError
from affine_attention.study import Plan, run_study
from studies.store import store

from .plans import PLANS, ScaledStarts, has_diverged, runs_of, start_branches


def run_experiment(name: str, plans: list[Plan], out: Path, device: str | None, parallel: int) -> None:
    """Runs what is missing of every plan in the folder."""
    for number, plan in enumerate(plans):
        if isinstance(plan, ScaledStarts):
            plan.write_starts()
        is_branches = name == "e5" and number > 0
        if is_branches:
            start_branches(plan, out)
        # The branches of E5 start from the checkpoints of the long runs, which are therefore kept.
        keep = name == "e5" and not is_branches
        run_plan(plan, out, device=device, parallel=parallel, keep_weights=keep)


def run_plan(plan: Plan, out: Path, **options: Any) -> None:
    """Runs a study; if a run of E4 becomes non-finite, the study goes on without it."""
    left = len(plan.jobs(out))
    while True:
        try:
            run_study(plan, out, **options)
            return
        except (NotFiniteError, ValueError):  # a worker process reports a ValueError
            before, left = left, len(plan.jobs(out))
            if left == before:
                raise


def pack(out: Path, archive: Path) -> int:
    """Stores all runs of the folder, finished or not, without weights in an archive; returns their number."""
    runs = [RunFolder(path) for path in sorted(out.iterdir()) if RunFolder(path).exists] if out.is_dir() else []
    with tempfile.TemporaryDirectory() as folder:
        for run in runs:
            store(run, Path(folder) / run.path.name)
        partial = archive.with_name(f".{archive.name}.partial")
        with tarfile.open(partial, "w:xz") as file:
            file.add(folder, arcname=".")
        partial.replace(archive)
    return len(runs)


def unpack(archive: Path, out: Path, *, with_unfinished: bool = False) -> int:
    """Restores the runs of an archive that the folder does not have; returns their number.

    By default those that are trained: finished, or non-finite.
    """
    restored = 0
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        for path in sorted(Path(folder).iterdir()):
            run = RunFolder(path)
            if not run.exists or (out / path.name).exists():
                continue
            is_trained = has_diverged(run) or any(event.get("event") == "finish" for event in run.events())
            if not (is_trained or with_unfinished):
                continue
            for packed in path.glob("*.xz"):
                (path / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
                packed.unlink()
            out.mkdir(parents=True, exist_ok=True)
            shutil.move(path, out / path.name)
            restored += 1
    return restored


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def stop_after(minutes: float) -> threading.Timer:
    """Sends SIGTERM to this process after some minutes: students save their step and stop, then the runs are packed."""
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    return timer


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=list(PLANS))
    parser.add_argument("data")
    parser.add_argument("teacher")
    parser.add_argument("out")
    parser.add_argument("--archive", type=Path, help="stored runs: read at the start if it exists, written at the end")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the design")
    parser.add_argument("--parallel", type=int, help="students at a time; default: 8, for e2 and e5 1")
    parser.add_argument("--corpus", default="*.train.txt.xz", help="training files of the corpus")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="change a setting, for a trial"
    )
    parser.add_argument("--device")
    parser.add_argument("--list", action="store_true", help="print the runs and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    plans, out = PLANS[given.experiment](given), Path(given.out)
    if given.list:
        print("\n".join(job.name for job in runs_of(plans, out)))
        return
    if given.archive is not None and given.archive.exists():
        print(f"{unpack(given.archive, out)} finished runs from {given.archive}", flush=True)
    before = signal.signal(signal.SIGTERM, _stop)
    timer = None if given.minutes is None else stop_after(given.minutes)
    parallel = given.parallel or (1 if given.experiment in ("e2", "e5") else 8)
    try:
        run_experiment(given.experiment, plans, out, given.device, parallel)
    finally:
        if timer is not None:
            timer.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the packing
        if given.archive is not None:
            print(f"{pack(out, given.archive)} runs in {given.archive}", flush=True)
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
