"""Kills and signals training runs, fills their disk, turns their clock back, and stops studies.

Each is started again and must end like one that was not stopped.

Every process is a fork of this one, which has imported everything and started no thread.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.guard import Stopped
from affine_attention.study import Plan, run_study
from tests.lab.training.crash import Crashes, exit_code, run_in_fork
from tests.lab.training.runs import STUDENT, differences, log_without_timing

from .tally import Battery

KILLS, OPERATIONS, SIGNALS, STUDIES, FULL_DISKS, CLOCKS = 100, 90, 70, 39, 20, 20
JOBS = max(2, min(os.cpu_count() or 2, 8))  # processes at a time


def attack(battery: Battery, folder: Path, seed: int, share: float = 1.0) -> None:
    """The shares of the time follow what each kind takes on two busy cores; what one leaves over goes to the next.

    The kinds whose numbers are promised come first.
    """
    crashes = Crashes(folder, "affine")
    numbers = random.Random(seed)
    ends, begin = battery.deadline, time.monotonic()

    def until(part: float) -> None:
        battery.deadline = begin + (ends - begin) * part

    until(0.30)
    moments = [numbers.uniform(0, crashes.seconds * 0.45) for _ in range(_count(KILLS, share))]
    _share(battery, folder, "kill -9 at a random moment", crashes.kill_after, list(enumerate(moments)))
    until(0.58)
    operations = _operations(crashes, _count(OPERATIONS, share))
    _share(battery, folder, "kill -9 before a file operation", crashes.kill_at_operation, operations)
    until(0.75)
    several = [
        (number, numbers.choice((signal.SIGTERM, signal.SIGINT)), numbers.uniform(0, crashes.seconds))
        for number in range(_count(SIGNALS, share))
    ]
    _share(battery, folder, "SIGTERM or Ctrl-C at a random moment", lambda *a: _signalled(crashes, *a), several)
    until(0.95)
    study = StoppedStudies(crashes.folder, crashes.recipe.data[0])
    stops = [(number, numbers.random()) for number in range(_count(STUDIES, share))]
    _share(battery, folder, "a study stopped at a random moment", study.stop, stops)
    until(0.98)
    # From less than the log to about the size of a checkpoint's largest file.
    limits = [(number, round(2 ** numbers.uniform(10, 17))) for number in range(_count(FULL_DISKS, share))]
    _share(battery, folder, "no room left for a file", lambda *a: _without_room(crashes, *a), limits)
    until(1.0)
    moments = [numbers.uniform(0, crashes.seconds) for _ in range(_count(CLOCKS, share))]
    _share(battery, folder, "a clock that runs backwards", lambda *a: _backwards(crashes, *a), list(enumerate(moments)))


def _count(most: int, share: float) -> int:
    return max(2, round(most * share))


def _share(battery: Battery, folder: Path, what: str, work: Callable[..., str | None], tasks: Sequence[tuple]) -> None:
    """Attacks in JOBS processes at a time, until the tasks or the time of the battery are used up."""

    def do_share(number: int) -> None:
        own = Battery(battery.name, battery.deadline)
        row = own.run(what, ((lambda a=a: work(*a)) for a in tasks[number::JOBS]))
        (folder / f"share-{number}.json").write_text(json.dumps([row.tried, row.failures]))

    children = [run_in_fork(lambda n=n: do_share(n), folder / f"share-{n}.txt") for n in range(JOBS)]
    row = battery.run(what, ())
    for number, child in enumerate(children):
        if exit_code(child):
            row.tried += 1
            row.failures.append(f"{what}: {(folder / f'share-{number}.txt').read_text()[-500:]}")
            continue
        tried, failures = json.loads((folder / f"share-{number}.json").read_text())
        row.tried, row.failures = row.tried + tried, row.failures + failures


def _operations(crashes: Crashes, count: int) -> list[tuple[str, int]]:
    """(phase, number of the file operation), evenly spread."""
    chosen = []
    for phase in ("start", "save", "finish"):
        total = len(crashes.operations(phase))
        step = max(total * 3 // count, 1)
        chosen += [(phase, number) for number in range(1, total + 1, step)]
    return chosen


def _signalled(crashes: Crashes, number: int, which: int, seconds: float) -> str | None:
    run = crashes.folder / f"signal-{number}"
    output = run.with_suffix(".txt")

    def train() -> None:
        try:
            crashes.train(run)
        except (Stopped, KeyboardInterrupt) as stopped:
            os._exit(128 + which if isinstance(stopped, KeyboardInterrupt) else int(str(stopped.code)))

    child = run_in_fork(train, output)
    time.sleep(seconds)
    os.kill(child, which)
    code = exit_code(child)
    if code not in (0, 128 + which, -which):
        return f"ended with {code} after signal {which}: {output.read_text()[-300:]}"
    return _resumed(crashes, run, output)


def _without_room(crashes: Crashes, number: int, limit: int) -> str | None:
    """A run whose files cannot grow beyond `limit` bytes, as on a full disk; then the same command with room."""
    run = crashes.folder / f"full-{number}"
    output = run.with_suffix(".txt")

    def train() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then raises OSError
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        crashes.train(run)

    code = exit_code(run_in_fork(train, output))
    if code < 0:
        return f"ended by signal {-code} with files of at most {limit} bytes"
    return _resumed(crashes, run, output)


def _backwards(crashes: Crashes, number: int, seconds: float) -> str | None:
    """A run whose clock goes back by hours in every second, killed after a while; then the same with a right clock."""
    run = crashes.folder / f"clock-{number}"
    output = run.with_suffix(".txt")

    def train() -> None:
        real, begin = time.time, time.time()
        time.time = lambda: begin - 10_000 * (real() - begin)  # type: ignore[assignment]
        crashes.train(run)

    child = run_in_fork(train, output)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    return _resumed(crashes, run, output)


def _resumed(crashes: Crashes, run: Path, output: Path) -> str | None:
    """Runs the same command again; what differs from the run that was not stopped."""
    if exit_code(run_in_fork(lambda: crashes.train(run), output)):
        return f"did not resume: {output.read_text()[-500:]}"
    found = differences(run, crashes.whole)
    shutil.rmtree(run)
    return "; ".join(found) or None


class StoppedStudies:
    """Tiny studies of a teacher and two students; the logs of a stopped and resumed one must equal the whole one's."""

    def __init__(self, folder: Path, text: str) -> None:
        settings = {
            "data": (text,), "heldout": 0.1, "steps": 8, "warmup_steps": 1, "decay_steps": 2, "global_batch": 4,
            "sequence_length": 32, "vocabulary_size": 320, "student_changes": STUDENT, "save_every": 3,
        }  # fmt: skip
        self.plan = Plan(mechanisms=("softmax", "affine"), settings=settings, teacher_steps=6)
        self.folder = folder
        self.whole = folder / "study-whole"
        begin = time.monotonic()
        if exit_code(run_in_fork(lambda: self.run(self.whole), folder / "study.txt")):
            raise RuntimeError((folder / "study.txt").read_text()[-2000:])
        self.seconds = time.monotonic() - begin

    def run(self, out: Path) -> None:
        run_study(self.plan, out, device="cpu", quiet=True, cache=self.folder / "cache")

    def stop(self, number: int, moment: float) -> str | None:
        out, output = self.folder / f"study-{number}", self.folder / f"study-{number}.txt"
        child = run_in_fork(lambda: self.run(out), output)
        time.sleep(moment * self.seconds)
        os.kill(child, signal.SIGKILL)
        exit_code(child)
        moved = self.folder / f"moved-{number}"  # a study belongs to its folder, wherever that is
        if out.exists():
            out.rename(moved)
        if exit_code(run_in_fork(lambda: self.run(moved), output)):
            return f"did not go on: {output.read_text()[-500:]}"
        for name in ("teacher", "softmax-seed0", "affine-seed0"):
            if log_without_timing(moved / name) != log_without_timing(self.whole / name):
                return f"the log of {name} differs"
            if not RunFolder(moved / name).finished:
                return f"{name} is not finished"
        shutil.rmtree(moved)
        return None
