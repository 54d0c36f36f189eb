"""Handles SIGINT and SIGTERM during training: the current step is finished and saved before the run stops."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """Raised when a signal stopped a run after its current step was saved. The exit code is 128 + the signal number."""

    def __init__(self, number: int, step: int, folder: Any) -> None:
        super().__init__(128 + number)
        self.signal, self.step = signal.Signals(number).name, step
        self.text = f"stopped by {self.signal} after step {step}, which is saved; train {folder} again to resume"

    def __str__(self) -> str:
        return self.text


class StopSignals:
    """Inside the context, the first SIGINT or SIGTERM is recorded; a second one has its usual effect.

    Python runs signal handlers in the main thread only; in other threads nothing is changed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
