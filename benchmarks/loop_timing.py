"""Times functions the way a loop runs them: variants take turns, and host time counts."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

Function = Callable[[], object]
Measured = dict[str, float | str]  # a number, or a text: the first line of the error that the variant raised
PLAIN = "plain"  # the variant that the ratios are taken to
CONTROL = "plain again"  # a second plain variant: its ratio shows how far a ratio of equal variants is from 1
WARM_UP = 3  # calls: a function compiled with CUDA graphs compiles, records and replays in its first three


@dataclass(frozen=True)
class Case:
    """One quantity, measured for several variants in one run."""

    what: str
    unit: str
    measured: Measured


def first_line(error: BaseException) -> str:
    """The error as one short line that fits into a cell of a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160].replace("|", "/")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def build(builders: dict[str, Callable[[], Function]]) -> dict[str, Function]:
    """Calls every builder. A variant whose builder raises becomes a function that raises the same error."""
    return {name: _build_one(builder) for name, builder in builders.items()}


def _build_one(builder: Callable[[], Function]) -> Function:
    try:
        return builder()
    except Exception as error:
        kept = error

    def fail() -> None:
        raise kept

    return fail


def take_turns(functions: dict[str, Function], rounds: int, seconds: Callable[[Function], float]) -> Measured:
    """Median of `seconds(function)` for each function. They take turns, so that a slow minute affects all of them.

    Every round starts with another one, because what runs before a function can change its time.

    A function that raises is left out from then on, and its result is the first line of the error.
    """
    errors: dict[str, str] = {}
    times: dict[str, list[float]] = {name: [] for name in functions}

    def attempt(name: str, timed: bool) -> None:
        if name in errors:
            return
        try:
            if timed:
                times[name].append(seconds(functions[name]))
            else:
                functions[name]()
        except Exception as error:
            traceback.print_exc()  # the table has only the first line
            errors[name] = first_line(error)

    for name in functions:
        for _ in range(WARM_UP):
            attempt(name, timed=False)
    names = list(functions)
    for first in range(rounds):
        for n in range(len(names)):
            attempt(names[(first + n) % len(names)], timed=True)
    return {name: errors[name] if name in errors else statistics.median(times[name]) for name in functions}


def host_seconds(device: str, calls: int) -> Callable[[Function], float]:
    """Time until one call returns to Python, from `calls` back-to-back calls on an idle GPU queue.

    `calls` must be so small that the launch queue of the GPU does not fill, because a full queue blocks the host.
    """

    def seconds(function: Function) -> float:
        wait(device)
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - begin) / calls

    return seconds


def wall_seconds(device: str, calls: int, untimed: int = 0, releases: bool = False) -> Callable[[Function], float]:
    """Wall-clock time of one call, from `calls` consecutive calls that end when the GPU is idle.

    `untimed` calls run first. `releases`: before them, the cached memory of the variant before is released: otherwise
    the allocator would free and allocate inside of the timed calls where memory is nearly full. A training loop does
    not release memory, and its tensors have the same addresses in every step.
    """

    def seconds(function: Function) -> float:
        if releases and device == "cuda":
            torch.cuda.empty_cache()
        for _ in range(untimed):
            function()
        wait(device)
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        wait(device)
        return (time.perf_counter() - begin) / calls

    return seconds


def scaled(measured: Measured, factor: float) -> Measured:
    return {name: each if isinstance(each, str) else each * factor for name, each in measured.items()}


def per_second(measured: Measured, amount: float) -> Measured:
    """Turns the seconds that `amount` tokens take into tokens per second."""
    return {name: each if isinstance(each, str) else amount / each for name, each in measured.items()}
