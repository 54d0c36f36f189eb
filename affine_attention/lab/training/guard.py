"""Turns signals and numbers that are not finite into clean stops: a step is finished and saved, or never taken."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """A run that was asked to stop, has finished its step and saved it. As an exit code: 128 + the signal's number."""

    def __init__(self, number: int, step: int, folder: Any) -> None:
        super().__init__(128 + number)
        self.signal, self.step = signal.Signals(number).name, step
        self.text = f"stopped by {self.signal} after step {step}, which is saved; train {folder} again to go on"

    def __str__(self) -> str:
        return self.text


class NotFiniteError(FloatingPointError):
    """A loss or gradient that is not finite: the optimizer was not called, the running averages are as they were."""


class StopSignals:
    """Inside, the first SIGINT or SIGTERM is noted and the second one does what it always did.

    Python runs handlers in the main thread only; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def find_not_finite(model: nn.Module, loss: float) -> str:
    """Names what is not finite: a parameter's value (it spoils all else), else the loss, else a gradient.

    Every rank must call: under FSDP2 each looks at its own part, and all of them say the same.
    """
    named = list(model.named_parameters())
    if not named:
        return "the loss"
    values = _ill([parameter for _, parameter in named])
    if values is not None:
        return f"parameter {named[values][0]}"
    if not torch.isfinite(torch.tensor(loss)):
        return "the loss"
    learned = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
    gradient = _ill([grad for _, grad in learned])
    if gradient is not None:
        return f"the gradient of {learned[gradient][0]}"
    return "the norm of all gradients together (each is finite by itself)"


def _ill(tensors: list[Tensor]) -> int | None:
    """The first that is not finite on any rank."""
    if not tensors:
        return None
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    ill = torch.stack([(~torch.isfinite(tensor).all()).int() for tensor in local])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(ill, op=torch.distributed.ReduceOp.MAX)
    found = ill.nonzero()
    return int(found[0]) if len(found) else None
