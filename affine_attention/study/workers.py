"""Runs the jobs of a study in several worker processes; with several GPUs, each process uses one of them.

The workers take jobs in order until none is left, and report progress to the parent. A small student does not fill a
large GPU, so several students on one GPU finish sooner than one after the other.
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

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a run saves its step and stops on these
REPEATED = 3.0  # seconds within which a second signal is ignored: some tools signal a process and its group
STOPPED = {128 + number for number in SIGNALS}  # exit codes of a process that was stopped by a signal
Work = Callable[[Job, Any], None]  # runs one job; the second argument receives progress like a LiveTable


class Messenger:
    """Sends progress to the parent's table."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def start(self, *given: Any) -> None:
        self.pipe.send(("start", given, {}))

    def step(self, *given: Any) -> None:
        self.pipe.send(("step", given, {}))

    def finish(self, *given: Any, **named: Any) -> None:
        self.pipe.send(("finish", given, named))


class _Worker:
    """A process and the parent's end of its pipe. One pipe per process: a killed process cannot leave a shared lock."""

    def __init__(self, context: Any, work: Work, number: int, count: int) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, work, number, count), name=f"study-{number}")
        self.process.start()
        other.close()  # only the process holds it now, so that its end is seen as EOF
        self.job: Job | None = None

    def send(self, job: Job | None) -> None:
        """Sends a job, or None if there is none left."""
        self.job = job
        with contextlib.suppress(OSError):  # the end of a process is handled by the reader of its pipe
            self.pipe.send(job)


def run_in_parallel(jobs: Sequence[Job], work: Work, processes: int, table: LiveTable) -> None:
    """Calls `work(job, messenger)` for every job in worker processes; `work` must be picklable.

    After a failure no new job starts; running jobs are finished, then the first failure is raised. A signal is passed
    on to every process, which finishes its step, saves it and stops.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    waiting, workers = deque(jobs), list[_Worker]()
    caught: dict[float, int] = {}  # time -> signal number

    def pass_on(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if caught and now - max(caught) < REPEATED:
            return
        caught[now] = signum
        waiting.clear()
        for worker in workers:
            if worker.process.is_alive():
                os.kill(worker.process.pid, signum)

    # Python runs signal handlers in the main thread only; in other threads signals keep their usual effect.
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
    """Sends jobs to workers and their messages to the table until all have ended; returns the failures in order."""
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
                    fail(worker, f"its process ended unexpectedly with exit code {code}")
                continue
            if kind == "fails":
                fail(worker, *given)
            elif kind == "wants":
                worker.send(waiting.popleft() if waiting else None)
            else:
                getattr(table, kind)(*given, **named)
    return failures


def _work(pipe: Connection, work: Work, number: int, count: int) -> None:
    """The worker process: runs jobs until none is left."""
    # Its own process group: a Ctrl-C in the terminal then reaches it once, through the parent.
    os.setpgid(0, 0)
    for signum in SIGNALS:
        signal.signal(signum, _exit)
    _select_gpu(number, count)
    messenger = Messenger(pipe)
    # SystemExit is not caught: it is raised for a signal after the step was saved, and ends the process.
    while True:
        pipe.send(("wants", (), {}))
        job = pipe.recv()
        if job is None:
            return
        try:
            work(job, messenger)
        except Exception as error:
            pipe.send(("fails", (f"{type(error).__name__}: {error}",), {}))


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    """Exits immediately: outside of training there is nothing to save."""
    sys.exit(128 + signum)


def _select_gpu(number: int, count: int) -> None:
    """Selects one of the parent's GPUs, before CUDA is initialised, and a share of the CPU cores."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
    if gpus and gpus != [""]:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
