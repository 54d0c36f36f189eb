"""Compares groups of runs, and derives verdicts from the differences by a fixed rule: one family of tests per claim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .groups import Group
from .measures import Measure
from .pooled import Pool, contrast
from .settings import Setting
from .statistics import CONFIDENCE, Estimate, holm

HOLDS, FAILS, OPEN = "holds", "does not hold", "inconclusive"
IN_PART, MIXED = "holds in part", "mixed"  # of a claim with several tests
RAISED, LOWERED = "raises it", "lowers it"  # of an effect without a claimed sign
EITHER = "either"  # the side of such an effect
ZERO = "the interval includes zero"  # the usual reason for OPEN, visible in the numbers
CORRECTED = "not after Holm's correction"
RULE = (
    "The rule. ± is half of a 95 % interval of Student's t. Its error term is the residual variance of all "
    "mechanisms of the setting, after removing the mean of each mechanism and the effect of each seed. Where "
    "Bartlett's test finds unequal variances (p below 0.05), or only two mechanisms exist, it is the variance of "
    "the pair's own differences per seed, which is always printed too. All tests of a claim in one setting are "
    "one family with Holm's correction. A test holds if its corrected p is below 0.05 and the difference has the "
    "claimed sign; it does not hold if p is below 0.05 and the sign is the opposite one; otherwise it is "
    "inconclusive, as with one seed, with the same count in every seed, or without a run. A claim holds if all of "
    "its tests hold; it does not hold if some do not and none holds; it holds in part if some hold and the others "
    "are inconclusive; it is mixed if some hold and some do not; otherwise it is inconclusive. Rows without a "
    "verdict measure the same runs a second time, or are parts of a difference."
)


@dataclass(frozen=True)
class Comparison:
    """One measure of two groups: ours − other, or a contrast of several.

    `side` is the claimed sign of the difference: "lower", "higher", "either" (an effect of any sign) or "" (no claim).
    """

    ours: str
    other: str
    measure: Measure
    side: str
    delta: Estimate | None  # from the contrast's own values per seed
    setting: str = ""
    absent: tuple[str, ...] = ()  # mechanisms without a run
    why_not: str = ""  # why there is no difference although both have runs
    pooled: Estimate | None = None  # with the error term of the setting; None if that is not valid
    why_own: str = ""  # why the setting's error term was not used
    tested: bool = True  # False: a second measure of the same runs, printed without a verdict
    adjusted: float | None = None  # p after Holm's correction within the family

    @property
    def name(self) -> str:
        return f"{self.ours} − {self.other}" if self.other else self.ours

    @property
    def decisive(self) -> Estimate | None:
        """The difference with the interval that the verdict uses."""
        return self.pooled or self.delta

    @property
    def verdict(self) -> str:
        return self._judged[0]

    @property
    def reason(self) -> str:
        """Why the comparison is inconclusive."""
        return self._judged[1]

    @property
    def _judged(self) -> tuple[str, str]:
        unknown = OPEN if self.tested else ""
        if self.absent:
            return unknown, f"no run of {' or '.join(self.absent)}"
        if self.decisive is None:
            return unknown, self.why_not or "not measured"
        return judge(self.decisive, self.side if self.tested else "", self.adjusted)


def judge(delta: Estimate, side: str, adjusted: float | None = None) -> tuple[str, str]:
    """(verdict, reason if it is inconclusive) of a difference; no verdict if `side` is "".

    Args:
        side: the claimed sign: "lower" for a difference below zero, "higher" for one above, "either" for both.
        adjusted: p after the correction for the family; None: the test's own p.
    """
    if side not in ("lower", "higher", EITHER, ""):
        raise ValueError(f'side must be "lower", "higher", "either" or "", got {side!r}')
    if not side:
        return "", ""
    if delta.interval is None:
        return OPEN, "one seed"
    low, high = delta.interval
    if low <= 0 <= high:
        return OPEN, ZERO
    if delta.p is None:
        return OPEN, "the same in every seed"
    if (delta.p if adjusted is None else adjusted) >= 1 - CONFIDENCE:
        return OPEN, CORRECTED
    if side == EITHER:
        return (LOWERED if high < 0 else RAISED), ""
    return (HOLDS if (high < 0) == (side == "lower") else FAILS), ""


def compare(
    measure: Measure,
    ours: tuple[str, Group | None],
    other: tuple[str, Group | None],
    side: str | None = None,
    setting: Setting | str = "",
    tested: bool = True,
) -> Comparison:
    """The difference of two named groups; a group is None if it has no run.

    Args:
        side: the claimed sign; None: that ours is better.
        setting: the setting of both groups, whose other mechanisms contribute to the error term; or a label, if the
            groups have different settings.
        tested: False prints the difference without a verdict.
    """
    side = measure.better if side is None else side
    (ours_name, mine), (other_name, theirs) = ours, other
    absent = tuple(name for name, group in (ours, other) if group is None)
    if mine is None or theirs is None:
        label = setting.label if isinstance(setting, Setting) else setting
        return Comparison(ours_name, other_name, measure, side, None, label, absent, tested=tested)
    waiting = [name for name, group in ((ours_name, mine), (other_name, theirs)) if not group.finished]
    found = combine(measure, (ours_name, other_name), ((1.0, mine), (-1.0, theirs)), side, setting, tested)
    return replace(found, why_not=f"{' and '.join(waiting)} not finished") if waiting else found


def combine(
    measure: Measure,
    names: tuple[str, str],
    terms: Sequence[tuple[float, Group]],
    side: str = "",
    setting: Setting | str = "",
    tested: bool = True,
) -> Comparison:
    """A weighted sum of groups, per seed: (a − b) − (c − d), or an effect of a factorial."""
    label = setting.label if isinstance(setting, Setting) else setting
    values = [(weight, measure.by_seed(group)) for weight, group in terms]
    own = contrast(values) if all(group.finished for _, group in terms) else None
    pooled, why_own = None, ""
    if own is not None and isinstance(setting, Setting):
        pooled, why_own = with_pool(own, [weight for weight, _ in terms], [v for _, v in values], setting.pool(measure))
    return Comparison(*names, measure, side, own, label, (), "", pooled, why_own, tested)


def with_pool(
    own: Estimate, weights: Sequence[float], cells: Sequence[dict], pool: Pool | None
) -> tuple[Estimate | None, str]:
    """(the contrast with the setting's error term, why it is not used)."""
    if pool is None or own.seeds < 2 or not own.paired:
        return None, "" if own.paired else "no shared seeds"
    if pool.cells <= 2:
        return None, "only two mechanisms vary in this setting"
    if not pool.usable:
        return None, f"unequal variances (Bartlett's p = {pool.equal:.2g})"
    if any(len(set(cell.values())) < 2 for cell in cells):
        return None, "constant in one of the mechanisms"
    return pool.interval(own, weights), ""


def in_families(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons of one claim with Holm's corrected p, each setting being one family."""
    found = list(comparisons)
    for setting in dict.fromkeys(each.setting for each in found):
        members = [
            (index, p)
            for index, each in enumerate(found)
            if each.setting == setting
            and each.tested
            and each.side
            and each.decisive
            and (p := each.decisive.p) is not None
        ]
        for (index, _), adjusted in zip(members, holm([p for _, p in members]), strict=True):
            found[index] = replace(found[index], adjusted=adjusted)
    return found


def family_verdict(comparisons: Iterable[Comparison]) -> str:
    """The verdict of a claim from those of its tests."""
    verdicts = {each.verdict for each in comparisons if each.verdict}
    if HOLDS in verdicts and FAILS in verdicts:
        return MIXED
    if HOLDS in verdicts:
        return IN_PART if OPEN in verdicts else HOLDS
    return FAILS if FAILS in verdicts else OPEN


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
