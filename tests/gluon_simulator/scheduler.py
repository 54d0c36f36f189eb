"""Runs the partitions of all CTAs as threads, one at a time, in a random order, and completes asynchronous work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any


class HazardError(Exception):
    """An access that is not ordered with an earlier one."""


class DeadlockError(Exception):
    """Every partition waits, and no asynchronous operation is under way."""


class StoppedError(Exception):
    """Another partition failed."""


class Event:
    """An asynchronous operation that has been issued. `complete` is called once, at a random time."""

    def __init__(self, complete: Callable[[], None]):
        self.complete, self.done = complete, False


class Partition:
    """Warps of one CTA that execute one function: one thread."""

    def __init__(self, scheduler: Scheduler, cta: Any, name: str, num_warps: int, body: Callable[[], Any]):
        self.scheduler, self.cta, self.name, self.num_warps = scheduler, cta, name, num_warps
        self.body, self.result, self.ended = body, None, False
        self.until: Callable[[], bool] = lambda: True
        self.waits_for = "its start"
        self.turn = threading.Semaphore(0)
        self.stores: list[Event] = []  # reads of shared memory by copies of TMA to global memory, in order
        self.writes: list[Event] = []  # their writes to global memory
        self.mmas: list[Any] = []  # MMAs that have not been waited for, in order
        self.reads: list[Any] = []  # tiles loaded since the last barrier or MMA
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if self.scheduler.error is None:
                self.result = self.body()
                if self.mmas:
                    raise HazardError(f"{self.name} ends with {len(self.mmas)} MMAs that it has not waited for")
        except StoppedError:
            pass
        except BaseException as error:
            self.scheduler.error = self.scheduler.error or error
        self.ended = True
        self.scheduler.pass_on(self)

    def pause(self, until: Callable[[], bool] = lambda: True, waits_for: str = "its turn") -> None:
        """Lets other partitions run, until the condition holds."""
        self.until, self.waits_for = until, waits_for
        self.scheduler.pass_on(self)
        self.turn.acquire()
        if self.scheduler.error is not None:
            raise StoppedError


class Scheduler:
    """Starts CTAs in order, at most `resident` at a time, and chooses what runs next.

    Args:
        start: starts CTA n and returns its first partition.
        num_ctas: their number.
        resident: CTAs that run at the same time.
        seed: of the random order. Every third one completes asynchronous operations at once, every third one as late
            as possible; the others at random.
    """

    def __init__(self, start: Callable[[Scheduler, int], Partition], num_ctas: int, resident: int, seed: int):
        self.start, self.num_ctas, self.resident = start, num_ctas, resident
        self.random = random.Random(seed)
        self.event_weight = (0.0, 1.0, 1e9)[seed % 3]  # relative to a partition
        self.weights: dict[str, float] = {}  # how often a partition is chosen, by the name of its function
        self.partitions: list[Partition] = []
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.started = 0
        self.finished = threading.Event()

    def run(self) -> None:
        self._start_ctas()
        if not self.partitions:
            return
        self.pass_on(None)
        self.finished.wait()
        for partition in self.partitions:
            partition.turn.release()
        for partition in self.partitions:
            partition.thread.join()
        if self.error is not None:
            raise self.error

    def add(self, partition: Partition) -> None:
        self.partitions.append(partition)
        partition.thread.start()

    def issue(self, complete: Callable[[], None]) -> Event:
        event = Event(complete)
        self.events.append(event)
        return event

    def complete(self, event: Event) -> None:
        self.events.remove(event)
        event.done = True
        event.complete()

    def pass_on(self, current: Partition | None) -> None:
        """Called by the running partition when it pauses or ends: completes events and releases the next one."""
        try:
            chosen = self._choose()
        except BaseException as error:
            self.error = self.error or error
            chosen = None
        if chosen is None:
            self.finished.set()
        else:
            chosen.turn.release()

    def _choose(self) -> Partition | None:
        while self.error is None:
            self._start_ctas()
            ready = [p for p in self.partitions if not p.ended and p.until()]
            choices: list[Partition | Event] = [*ready, *self.events]
            if not choices:
                waiting = [f"{p.name} waits for {p.waits_for}" for p in self.partitions if not p.ended]
                if waiting:
                    raise DeadlockError("; ".join(waiting))
                return None
            weights = [self._weight(p) for p in ready] + [self.event_weight] * len(self.events)
            chosen = self.random.choices(choices, weights if any(weights) else None)[0]
            if isinstance(chosen, Partition):
                return chosen
            self.complete(chosen)
        return None

    def _weight(self, partition: Partition) -> float:
        """Some partitions run far ahead of others, to find waits that are missing."""
        return self.weights.setdefault(partition.name, 10.0 ** self.random.uniform(-2, 2))

    def _start_ctas(self) -> None:
        running = {id(p.cta) for p in self.partitions if not p.ended}
        while self.started < self.num_ctas and len(running) < self.resident:
            self.partitions = [p for p in self.partitions if not p.ended]
            partition = self.start(self, self.started)
            self.add(partition)
            running.add(id(partition.cta))
            self.started += 1


def current() -> Partition:
    """The partition that runs now."""
    return _local.partition


_local = threading.local()


def bind(partition: Partition) -> None:
    """Makes a partition the current one of this thread."""
    _local.partition = partition
