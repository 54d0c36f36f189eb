"""Measures the time of training steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Time spent in training steps, without probes, evaluations and checkpoints.

    A step ends when its loss has been copied to the host, so that on a GPU its backward has finished.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds  # of all steps, including those before a resume
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Ends a step and returns its duration in seconds."""
        now = time.perf_counter()
        step, self._since = now - self._since, now
        self.seconds += step
        return step

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The time inside this context is not counted."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin
