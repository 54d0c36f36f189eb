"""Turns the ends of steps into training time, tokens a second and model FLOPs utilisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Time spent in training steps; looks at the model, evaluations and checkpoints stop it.

    A step ends when its numbers have reached the host, which on a GPU means that its backward is done.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds  # of all steps, those before a resume too
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Ends a step: its seconds."""
        now = time.perf_counter()
        step, self._since = now - self._since, now
        self.seconds += step
        return step

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside is no part of any step."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - begin
