"""Runs the jobs of a study several at a time, each in a process of its own; with several GPUs each process has one.

The processes take jobs in their order until none is left, and tell the parent what happens. Small students do not fill
a large GPU: what one leaves idle while its host works, another uses.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

from .live import LiveTable
from .plan import Job

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # those at which a run saves its step and stops
AGAIN = 3.0  # seconds after which a second signal is meant: some tools send one to a process and to its group
STOPPED = {128 + number for number in SIGNALS}  # exit codes of a process that was asked to stop, and did
Work = Callable[[Job, Any], None]  # what is done for one job; the second argument is told of it, as a LiveTable is


class Messenger:
    """Tells the parent's table what happens here."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def start(self, *given: Any) -> None:
        self.pipe.send(("start", given, {}))

    def step(self, *given: Any) -> None:
        self.pipe.send(("step", given, {}))

    def finish(self, *given: Any, **named: Any) -> None:
        self.pipe.send(("finish", given, named))


class _Worker:
    """A process and the parent's end of its pipe. Each has its own: a killed process can leave no lock behind."""

    def __init__(self, context: Any, work: Work, number: int, count: int) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, work, number, count), name=f"study-{number}")
        self.process.start()
        other.close()  # the process alone holds it now, so that its death is seen as the end of the pipe
        self.job: Job | None = None

    def hand(self, job: Job | None) -> None:
        """Gives a job, or None: there is no other."""
        self.job = job
        with contextlib.suppress(OSError):  # a process that is dead is noticed where it is listened to
            self.pipe.send(job)


def run_in_parallel(jobs: Sequence[Job], work: Work, processes: int, table: LiveTable) -> None:
    """Calls `work(job, messenger)` for every job, in so many processes; `work` must be picklable.

    After a failure no new job begins; those under way are finished, then the first failure is raised. A signal goes to
    every process: each finishes its step, saves it and stops.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    waiting, workers = deque(jobs), list[_Worker]()
    caught: dict[float, int] = {}  # when, and which signal

    def pass_on(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if caught and now - max(caught) < AGAIN:
            return
        caught[now] = signum
        waiting.clear()
        for worker in workers:
            if worker.process.is_alive():
                os.kill(worker.process.pid, signum)

    # Python has handlers in the main thread only; elsewhere a signal does what it always does.
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, pass_on) for number in SIGNALS} if in_main else {}
    try:
        count = min(processes, len(jobs))
        workers += [_Worker(context, work, number, count) for number in range(count)]
        failures = _follow(workers, waiting, table)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for worker in workers:
            if worker.process.is_alive():
                worker.process.terminate()
            worker.process.join()
    if caught:
        raise SystemExit(128 + next(iter(caught.values())))
    if failures:
        raise ValueError(failures[0])


def _follow(workers: list[_Worker], waiting: deque[Job], table: LiveTable) -> list[str]:
    """Hands out jobs, and messages on to the table, until every process has ended; what went wrong, in its order."""
    failures: list[str] = []

    def fail(worker: _Worker, reason: str) -> None:
        waiting.clear()
        if worker.job is not None:
            failures.append(f"{worker.job.name}: {reason}")
            table.finish(worker.job.name, stage="failed")

    listening = {worker.pipe: worker for worker in workers}
    while listening:
        for pipe in wait(list(listening)):
            worker = listening[pipe]
            try:
                kind, given, named = worker.pipe.recv()
            except (EOFError, OSError):
                del listening[worker.pipe]
                worker.process.join()
                code = worker.process.exitcode
                if code in STOPPED and worker.job is not None:
                    table.finish(worker.job.name, stage="stopped")
                elif code:
                    fail(worker, f"its process ended with exit code {code} and no word")
                continue
            if kind == "fails":
                fail(worker, *given)
            elif kind == "wants":
                worker.hand(waiting.popleft() if waiting else None)
            else:
                getattr(table, kind)(*given, **named)
    return failures


def _work(pipe: Connection, work: Work, number: int, count: int) -> None:
    """One process: takes jobs until there is no other."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C comes from the parent then, once: the second would break a step off
    for signum in SIGNALS:
        signal.signal(signum, _leave)
    _take_own_gpu(number, count)
    messenger = Messenger(pipe)
    # A SystemExit passes: of a signal, when the step is saved; its exit code is told to nobody but the parent.
    while True:
        pipe.send(("wants", (), {}))
        job = pipe.recv()
        if job is None:
            return
        try:
            work(job, messenger)
        except Exception as error:
            pipe.send(("fails", (f"{type(error).__name__}: {error}",), {}))


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """Outside of training there is nothing to save."""
    sys.exit(128 + signum)


def _take_own_gpu(number: int, count: int) -> None:
    """Before CUDA starts in this process: one GPU of those that the parent sees, and a share of the cores."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
    if gpus and gpus != [""]:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
