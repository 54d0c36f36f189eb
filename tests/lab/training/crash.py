"""Kills tiny runs with SIGKILL, resumes them, and counts those that end bitwise equal to an uninterrupted run.

    python -m tests.lab.training.crash --random 100 --every-file-operation

`--random N`: at N random moments of the first half of a run. `--every-file-operation`: before each file operation
(opening, writing, syncing, renaming, removing; a write of a checkpoint is cut in the middle) of one save, one that also
removes an old checkpoint, of the start up to the first step, and of the finish, which writes the model. Every run but
those at the finish goes on for at least 20 steps after the kill, and its log (all but times), weights, optimizer and
random state must equal those of the uninterrupted run. All processes are forks of this one, which has imported
everything and started no thread.
"""

from __future__ import annotations

import argparse
import os

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training import tensorfile
from affine_attention.lab.training.distill_trainer import DistillTrainer
from affine_attention.lab.training.train import train

from .runs import differences, tiny_recipe, write_text

STEPS, SAVE_EVERY, AFTER = 40, 5, 20
WATCHED_SAVE = 15  # the third: it removes the first
AUDITED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


def run_in_fork(work: Callable[[], object], output: Path) -> int:
    """Runs work in a fork of this process; its process id. What it prints goes to a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        torch.set_num_threads(1)
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def exit_code(child: int) -> int:
    """Waits; the exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def share(work: Callable[..., str | None], tasks: Sequence[tuple], jobs: int, folder: Path) -> list[str | None]:
    """work(*task) for each task, in so many processes; the results in the order of the tasks."""

    def do_share(number: int) -> None:
        results = [work(*task) for task in tasks[number::jobs]]
        (folder / f"results-{number}.json").write_text(json.dumps(results))

    children = [run_in_fork(lambda number=number: do_share(number), folder / f"{number}.txt") for number in range(jobs)]
    results: list[str | None] = [None] * len(tasks)
    for number, child in enumerate(children):
        if exit_code(child):
            raise RuntimeError((folder / f"{number}.txt").read_text())
        results[number::jobs] = json.loads((folder / f"results-{number}.json").read_text())
    return results


class KillAtOperation:
    """Counts file operations in one folder during one phase of a run, and kills this process at one of them."""

    def __init__(self, folder: Path, phase: str, at: int | None, report: Path) -> None:
        self.folder, self.phase, self.at, self.report = str(folder), phase, at, report
        self.count, self.watching, self.names = 0, phase == "start", []

    def install(self) -> None:
        fsync, write_all = os.fsync, tensorfile._write_all
        train_module: Any = sys.modules[train.__module__]
        save, record, save_model = DistillTrainer._save_checkpoint, DistillTrainer._record, train_module.save_model

        def watched_save(trainer, model, trial):
            self.watching = self.phase == "save" and trainer.state.global_step == WATCHED_SAVE
            save(trainer, model, trial)
            self.end()

        def watched_record(trainer, entry):
            record(trainer, entry)
            self.end()

        def watched_save_model(*arguments):
            self.watching = self.phase == "finish"
            save_model(*arguments)
            self.end()

        def watched_fsync(handle):
            self.note("fsync")
            fsync(handle)

        def watched_write(file, piece):
            if self.watching and self.count + 1 == self.at:
                write_all(file, piece[: len(piece) // 2])
            self.note("write")
            write_all(file, piece)

        os.fsync, tensorfile._write_all = watched_fsync, watched_write
        DistillTrainer._save_checkpoint, DistillTrainer._record = watched_save, watched_record
        train_module.save_model = watched_save_model
        sys.addaudithook(self.audit)

    def end(self) -> None:
        if self.watching:
            self.watching = False
            self.report.write_text("\n".join(self.names))

    def audit(self, event: str, arguments: tuple) -> None:
        if self.watching and event in AUDITED:
            path = arguments[0]
            inside = isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.folder)
            # rmtree names entries relative to an open folder.
            if inside or (event in ("os.remove", "os.rmdir") and arguments[-1] != -1):
                self.note(event)

    def note(self, name: str) -> None:
        if self.watching:
            self.count += 1
            self.names.append(name)
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


class Crashes:
    """A place with data and one uninterrupted run, and the runs that are killed there."""

    def __init__(self, folder: Path, mechanism: str) -> None:
        self.folder = folder
        self.recipe = tiny_recipe(
            write_text(folder / "text.txt"), mechanism, steps=STEPS, save_every=SAVE_EVERY, probe_every=3, eval_every=10
        )
        self.whole = folder / "whole"
        begin = time.monotonic()
        child = run_in_fork(lambda: self.train(self.whole), folder / "whole.txt")
        if exit_code(child):
            raise RuntimeError((folder / "whole.txt").read_text())
        self.seconds = time.monotonic() - begin

    def train(self, run: Path) -> None:
        train(self.recipe, run, quiet=True, device="cpu", cache=self.folder / "cache")

    def operations(self, phase: str) -> list[str]:
        """The file operations of a phase, in order."""
        run, report = self.folder / "counted", self.folder / "operations.txt"
        child = run_in_fork(lambda: self.killed_at(run, phase, None, report), self.folder / "counted.txt")
        if exit_code(child):
            raise RuntimeError((self.folder / "counted.txt").read_text())
        shutil.rmtree(run)
        return report.read_text().split()

    def killed_at(self, run: Path, phase: str, operation: int | None, report: Path) -> None:
        KillAtOperation(run, phase, operation, report).install()
        self.train(run)

    def kill_at_operation(self, phase: str, operation: int) -> str | None:
        run = self.folder / f"{phase}-{operation}"
        output = run.with_suffix(".txt")
        child = run_in_fork(lambda: self.killed_at(run, phase, operation, self.folder / "unused"), output)
        if (code := exit_code(child)) != -signal.SIGKILL:
            return f"was not killed (exit code {code})"
        return self.recover(run, output)

    def kill_after(self, number: int, seconds: float) -> str | None:
        run = self.folder / f"random-{number}"
        output = run.with_suffix(".txt")
        child = run_in_fork(lambda: self.train(run), output)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        if code not in (0, -signal.SIGKILL):
            return f"failed before it was killed (exit code {code}): {output.read_text()[-500:]}"
        if STEPS - len(RunFolder(run).log()) // SAVE_EVERY * SAVE_EVERY < AFTER:
            # The machine is faster than when the whole run was timed: too few steps would follow the kill.
            shutil.rmtree(run)
            return self.kill_after(number, seconds / 2)
        return self.recover(run, output)

    def recover(self, run: Path, output: Path) -> str | None:
        """Resumes a killed run to its end: None, or what is wrong with it."""
        logged = len(RunFolder(run).log())
        child = run_in_fork(lambda: self.train(run), output)
        if exit_code(child):
            return f"did not resume: {output.read_text()[-800:]}"
        if not logged >= STEPS:
            begin = next(e for e in reversed(RunFolder(run).events()) if e["event"] in ("start", "resume"))
            # A run that was killed while it saved step n may resume from the save before it.
            saved = (max(logged - 1, 0) // SAVE_EVERY) * SAVE_EVERY
            if begin["step"] < saved:
                return f"lost more than the steps since the last save: {logged} steps, resumed from {begin['step']}"
            if STEPS - begin["step"] < AFTER:
                return f"only {STEPS - begin['step']} steps were left after the kill"
        found = differences(run, self.whole)
        if found:
            return "; ".join(found)
        shutil.rmtree(run)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=0, metavar="N", help="kill at N random moments")
    parser.add_argument("--every-file-operation", action="store_true", help="of the start, one save and the finish")
    parser.add_argument("--operations", type=int, metavar="N", help="of each only about N, evenly spread")
    parser.add_argument("--mechanism", default="affine")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crashes = Crashes(Path(folder).resolve(), options.mechanism)
        rows: list[tuple[str, int, list[str]]] = []
        if options.random:
            numbers = random.Random(options.seed)
            # The first 20 of 40 steps take less than half of the time, which also holds the end.
            tasks = [(number, numbers.uniform(0, crashes.seconds * 0.45)) for number in range(options.random)]
            results = share(crashes.kill_after, tasks, options.jobs, crashes.folder)
            rows.append(("random moment", len(results), [r for r in results if r]))
        for phase in ("start", "save", "finish") if options.every_file_operation or options.operations else ():
            names = crashes.operations(phase)
            chosen = list(range(1, len(names) + 1))
            if options.operations:
                chosen = chosen[:: max(len(chosen) // options.operations, 1)]
            results = share(crashes.kill_at_operation, [(phase, n) for n in chosen], options.jobs, crashes.folder)
            for name in Counter(names[number - 1] for number in chosen):
                own = [result for number, result in zip(chosen, results, strict=True) if names[number - 1] == name]
                rows.append((f"{phase}, {name}", len(own), [r for r in own if r]))
        print(f"{'killed at':<24}{'runs':>6}{'recovered':>11}")
        for name, count, failed in rows:
            print(f"{name:<24}{count:>6}{count - len(failed):>11}")
        total, bad = sum(row[1] for row in rows), [line for row in rows for line in row[2]]
        print(f"{'all':<24}{total:>6}{total - len(bad):>11}")
        for line in bad:
            print(f"FAILED: {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
