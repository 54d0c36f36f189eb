"""Compares attention with the fp64 reference over seeded random calls, and calls it with invalid arguments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from affine_attention import attention
from affine_attention.testing import MAX_ERROR_RATIO, Case, _repeats, error_ratios, grid_cases

from .tally import Battery

CALLS, REFUSALS = 8_000, 400


def attack(battery: Battery, folder: Path, seed: int, share: float = 1.0) -> None:
    cases = grid_cases(seed=seed)
    numbers = random.Random(seed)
    several = [_random_case(numbers, cases) for _ in range(round(CALLS * share))]
    battery.run(
        "arguments that cannot be right",
        (lambda n=n: refused(random.Random(seed * 10_007 + n)) for n in range(round(REFUSALS * share))),
    )
    row = battery.run("a random call compared with fp64", ())
    for case in several:
        if time.monotonic() > battery.deadline or row.tried >= CALLS * share:
            break
        battery.note(row, lambda c=case: compare(c))
        row.tried += _repeats(case) - 1  # error_ratios repeats the call this often with other inputs


def _random_case(numbers: random.Random, cases: list[Case]) -> Case:
    """A mix of the grid's cases at lengths of its own; short ones, so that there can be many."""
    one, two = numbers.choice(cases), numbers.choice(cases)
    length = numbers.choice((1, 2, 3, 5, 8, 13, 17, 31, 33, 48, 64))
    return Case(
        one.mechanism, two.visibility, numbers.choice((1, 2)), one.heads, one.groups, length, length,
        numbers.choice((8, 16, 24, 32)), two.dtype, one.layout, "cpu", numbers.randrange(2**20),
    )  # fmt: skip


def compare(case: Case) -> str | None:
    ratios = error_ratios(case)
    worst = max(ratios, key=lambda name: ratios[name], default=None)
    if worst is not None and not ratios[worst] <= MAX_ERROR_RATIO:
        return f"{case}: {worst} has {ratios[worst]:.2f} times the error of plain PyTorch"
    return None


WRONG: dict[str, Callable[[random.Random], Any]] = {
    "alpha": lambda n: torch.zeros(n.randint(3, 9), 7),
    "beta": lambda n: "beta",
    "sink": lambda n: torch.zeros(n.randint(5, 9)),
    "gate": lambda n: torch.zeros(2, 4, 5, n.randint(9, 12)),
    "mask": lambda n: torch.zeros(2, n.randint(9, 12)),
    "segment_ids": lambda n: torch.zeros(2, n.randint(9, 12)),
    "window": lambda n: n.choice((-1, 0, 1.5, "4", True)),
    "softmax_scale": lambda n: n.choice((float("nan"), float("inf"), "1")),
    "impl": lambda n: n.choice(("nope", 3, "")),
    "is_causal": lambda n: n.choice(("yes", 2, None)),
}


def refused(numbers: random.Random) -> str | None:
    """The error must be a ValueError or TypeError that names the argument."""
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    name = numbers.choice([*WRONG, "key"])
    given: dict[str, Any] = {"is_causal": True}
    if name == "key":
        key = numbers.choice((torch.randn(2, 3, 5, 8), torch.randn(2, 2, 5, 9), torch.randn(2, 2, 8), None, "key"))
    else:
        given[name] = WRONG[name](numbers)
    try:
        attention(query, key, value, **given)
    except (ValueError, TypeError) as error:
        return None if name in str(error) else f"{name} is not named: {error}"
    return f"{name} = {given.get(name)!r} was taken"
