"""Compares two groups of runs, and derives a verdict from the difference by a fixed rule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .groups import Group
from .measures import Measure
from .statistics import Estimate, difference

HOLDS, FAILS, OPEN = "holds", "does not hold", "inconclusive"
ZERO = "the interval includes zero"  # the usual reason for OPEN, visible in the numbers
RULE = (
    "Differences are computed per seed; ± is half of the 95 % interval of their mean (Student's t). A claim holds if "
    "the whole interval has the claimed sign, does not hold if the whole interval has the opposite sign, and is "
    "inconclusive if the interval includes zero, has no width (the same count in every seed) or does not exist (one "
    "seed, or no run). Rows without a verdict are parts of a difference or differences of differences, about which "
    "nothing is claimed."
)


@dataclass(frozen=True)
class Comparison:
    """One measure of two groups: ours − other. `side` is the claimed sign of the difference, "" for no claim."""

    ours: str
    other: str
    measure: Measure
    side: str
    delta: Estimate | None
    setting: str = ""
    absent: tuple[str, ...] = ()  # mechanisms without a run
    why_not: str = ""  # why there is no difference although both have runs

    @property
    def name(self) -> str:
        return f"{self.ours} − {self.other}"

    @property
    def verdict(self) -> str:
        return self._judged[0]

    @property
    def reason(self) -> str:
        """Why the comparison is inconclusive."""
        return self._judged[1]

    @property
    def _judged(self) -> tuple[str, str]:
        if self.absent:
            return OPEN, f"no run of {' or '.join(self.absent)}"
        if self.delta is None:
            return OPEN, self.why_not or "not measured"
        return judge(self.delta, self.side)


def judge(delta: Estimate, side: str) -> tuple[str, str]:
    """(verdict, reason if it is inconclusive) of a difference; no verdict if `side` is "".

    Args:
        side: the claimed sign: "lower" for a difference below zero, "higher" for one above.
    """
    if side not in ("lower", "higher", ""):
        raise ValueError(f'side must be "lower", "higher" or "", got {side!r}')
    if not side:
        return "", ""
    if delta.interval is None:
        return OPEN, "one seed"
    low, high = delta.interval
    if low <= 0 <= high:
        return OPEN, ZERO
    if low == high:
        return OPEN, "the same in every seed"
    return (HOLDS if (high < 0) == (side == "lower") else FAILS), ""


def compare(
    measure: Measure,
    ours: tuple[str, Group | None],
    other: tuple[str, Group | None],
    side: str | None = None,
    setting: str = "",
) -> Comparison:
    """The difference of two named groups; a group is None if it has no run.

    Args:
        side: the claimed sign; None: that ours is better.
    """
    side = measure.better if side is None else side
    (ours_name, mine), (other_name, theirs) = ours, other
    absent = tuple(name for name, group in (ours, other) if group is None)
    if mine is None or theirs is None:
        return Comparison(ours_name, other_name, measure, side, None, setting, absent)
    waiting = [name for name, group in ((ours_name, mine), (other_name, theirs)) if not group.finished]
    why_not = f"{' and '.join(waiting)} not finished" if waiting else ""
    return Comparison(ours_name, other_name, measure, side, measure.delta(mine, theirs), setting, (), why_not)


def compare_gaps(
    measure: Measure,
    names: tuple[str, str],
    first: tuple[Group, Group],
    second: tuple[Group, Group],
    side: str = "",
    setting: str = "",
) -> Comparison:
    """The difference of two differences, each paired by seed: (a − b) − (c − d)."""
    groups = (*first, *second)
    delta = difference(_gap(measure, *first), _gap(measure, *second)) if all(g.finished for g in groups) else None
    return Comparison(*names, measure, side, delta, setting)


def tally(comparisons: Iterable[Comparison]) -> str:
    """`2 hold, 1 does not, 3 inconclusive`, over the comparisons with a verdict."""
    verdicts = [comparison.verdict for comparison in comparisons]
    words = []
    for verdict, one, many in ((HOLDS, "holds", "hold"), (FAILS, "does not", "do not"), (OPEN, OPEN, OPEN)):
        if count := verdicts.count(verdict):
            words.append(f"{count} {one if count == 1 else many}")
    return ", ".join(words)


def digits_for(delta: Estimate, least: int) -> int:
    """Decimals that show two digits of the interval, or of the difference if there is no interval."""
    size = delta.half_width or abs(delta.mean)
    if size <= 0 or not math.isfinite(size):
        return least
    return min(6, max(least, 1 - math.floor(math.log10(size))))


def _gap(measure: Measure, ours: Group, other: Group) -> dict:
    mine, theirs = measure.by_seed(ours), measure.by_seed(other)
    return {seed: mine[seed] - theirs[seed] for seed in mine if seed in theirs}
