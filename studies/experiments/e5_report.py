"""E5 (e5.md): turns long runs and their branches into gaps to softmax at three lengths and the tests of the design.

python -m studies.experiments.report e5 RUNS...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, variance

from affine_attention.lab.names import folder_name
from affine_attention.lab.report.first_tokens import sink_rate
from affine_attention.lab.report.measures import heldout_loss
from affine_attention.lab.report.pooled import UNEQUAL, Pool, bartlett, contrast, pool
from affine_attention.lab.report.statistics import Estimate, estimate, t_quantile

from .design_runs import DesignRuns, Values, collect, design
from .plans import E5_BRANCHES, E5_LONG, E5_MECHANISMS, SEEDS
from .verdicts import CONFIRMED, MISSING, REFUTED, Verdict, is_above, is_below, shown, signed, verdict_lines, waiting

TOKENS_OF_A_STEP = 64 * 1024
LENGTHS = (*(branch["steps"] for branch in E5_BRANCHES), E5_LONG["steps"])  # in steps
OTHERS = E5_MECHANISMS[1:]


def cell_of(mechanism: str, steps: int) -> str:
    """`affine_steps=580_decay_steps=58`, or the mechanism itself for the long run."""
    branch = next((branch for branch in E5_BRANCHES if branch["steps"] == steps), {})
    return folder_name("+".join([mechanism, *(f"{key}={value}" for key, value in branch.items())]))


def report_e5(folders: Mapping[str, Path]) -> list[list[str]]:
    runs = collect(design("e5"), folders)
    losses = runs.values(heldout_loss)
    return [runs.notes(), verdict_lines(tests(runs)), loss_table(losses), gap_table(losses), power_table(losses)]


def tests(runs: DesignRuns) -> list[Verdict]:
    losses = runs.values(heldout_loss)
    return [lasts(losses), shrinks(losses), ends_better(losses), sinks_form(runs)]


def lasts(losses: Values) -> Verdict:
    test, first, last = "H1, the gap lasts", LENGTHS[0], LENGTHS[-1]
    needed = [cell_of(mechanism, steps) for mechanism in ("softmax", "affine") for steps in (first, last)]
    if row := waiting(test, losses, needed, SEEDS):
        return row
    gap, remark = gap_of(losses, "softmax", "affine", last)
    before = gap_of(losses, "softmax", "affine", first)[0].mean
    statistic = f"g(152M) {shown(gap)}, g(38M) {signed(before)}"
    if not is_above(gap):
        return Verdict(test, statistic, REFUTED, remark)
    if gap.mean >= before / 2:
        return Verdict(test, statistic, CONFIRMED, remark)
    return Verdict(test, statistic, "undecided", f"above 0, but less than half of g(38M); {remark}")


def shrinks(losses: Values) -> Verdict:
    test = "H2, it shrinks with a power"
    needed = [cell_of(mechanism, steps) for mechanism in ("softmax", "affine") for steps in LENGTHS]
    if row := waiting(test, losses, needed, SEEDS):
        return row
    values, logarithmic = powers(losses, "affine")
    own = estimate(values)
    assert own is not None
    pooled = pooled_power(losses, own)
    remark = f"own interval {shown(own)}"
    if pooled is None:
        remark = "own interval: the variances of the mechanisms cannot be pooled"
    chosen = pooled or own
    name = "p" if logarithmic else "− slope of g (a gap is not positive)"
    verdict = CONFIRMED if is_above(chosen) else "refuted: it grows" if is_below(chosen) else "no shrinking shown"
    return Verdict(test, f"{name} {shown(chosen)}", verdict, remark)


def ends_better(losses: Values) -> Verdict:
    test, last = "H3, affine ends better than a gate", LENGTHS[-1]
    if row := waiting(test, losses, [cell_of("affine", last), cell_of("head_gated", last)], SEEDS):
        return row
    gap, remark = gap_of(losses, "head_gated", "affine", last)
    verdict = CONFIRMED if is_above(gap) else REFUTED if is_below(gap) else "no evidence"
    return Verdict(test, f"head_gated − affine {shown(gap)}", verdict, remark)


def sinks_form(runs: DesignRuns) -> Verdict:
    test, rates = "H4, sinks form by then", runs.values(partial(sink_rate, kind="softmax"))
    if row := waiting(test, rates, ["softmax"], SEEDS):
        return row
    found = [rates["softmax"][seed] for seed in SEEDS]
    statistic = f"sink rate of softmax {' / '.join(f'{rate:.1f}' for rate in found)} %"
    if all(rate > 0 for rate in found):
        return Verdict(test, statistic, CONFIRMED)
    if not any(found):
        return Verdict(test, statistic, REFUTED, "sinks need more than 152M tokens here")
    return Verdict(test, statistic, "undecided", "the seeds do not agree")


def gap_of(losses: Values, baseline: str, ours: str, steps: int) -> tuple[Estimate, str]:
    """L(baseline) − L(ours) at a length, paired by seed, and a remark about the interval.

    The error is that of the residuals of all mechanisms at this length; where Bartlett's test finds unequal variances,
    it is that of the differences themselves (decision 0050).
    """
    cells = {mechanism: losses.get(cell_of(mechanism, steps), {}) for mechanism in E5_MECHANISMS}
    own = contrast([(1.0, cells[baseline]), (-1.0, cells[ours])])
    noise: Pool | None = pool(list(cells.values()))
    assert own is not None
    if noise is None or own.half_width is None:
        return own, "own interval"
    pooled = noise.interval(own, (1.0, -1.0))
    if not noise.usable:
        return own, f"own interval, as variances differ (Bartlett's p {noise.equal:.3f}); pooled {shown(pooled)}"
    return pooled, f"own interval {shown(own)}"


def powers(losses: Values, mechanism: str) -> tuple[list[float], bool]:
    """(minus the slope of log g over log D for each seed with all lengths, True).

    If a gap is not positive: (minus the slope of g over log D, False).
    """
    gaps = []
    for seed in SEEDS:
        pairs = [(losses.get(cell_of("softmax", n), {}), losses.get(cell_of(mechanism, n), {})) for n in LENGTHS]
        if all(seed in theirs and seed in ours for theirs, ours in pairs):
            gaps.append([theirs[seed] - ours[seed] for theirs, ours in pairs])
    logarithmic = all(gap > 0 for each in gaps for gap in each)
    values = [[math.log(gap) for gap in each] for each in gaps] if logarithmic else gaps
    return [-slope([math.log(steps) for steps in LENGTHS], each) for each in values], logarithmic


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of y over x."""
    middle = fmean(x)
    return math.fsum((a - middle) * b for a, b in zip(x, y, strict=True)) / math.fsum((a - middle) ** 2 for a in x)


def pooled_power(losses: Values, own: Estimate) -> Estimate | None:
    """The same mean with the variance within mechanisms, pooled over the three mechanisms.

    The effect of a seed is not removed, because p of one mechanism contains it. None if a value is missing, if some
    mechanisms have p and others the slope of g, or if Bartlett's test finds unequal variances (decision 0050).
    """
    found = [powers(losses, mechanism) for mechanism in OTHERS]
    if any(len(values) < len(SEEDS) for values, _ in found) or len({kind for _, kind in found}) > 1:
        return None
    variances, freedoms = [variance(values) for values, _ in found], [len(values) - 1 for values, _ in found]
    if bartlett(variances, freedoms) < UNEQUAL:
        return None
    half = t_quantile(sum(freedoms)) * math.sqrt(fmean(variances) / own.seeds)
    return Estimate(own.mean, half, own.seeds, True, sum(freedoms))


def loss_table(losses: Values) -> list[str]:
    heads = [f"{steps * TOKENS_OF_A_STEP / 1e6:.0f}M tokens" for steps in LENGTHS]
    lines = [f"| held-out loss | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for mechanism in E5_MECHANISMS:
        cells = [losses.get(cell_of(mechanism, steps), {}) for steps in LENGTHS]
        words = [" / ".join(f"{seeds[s]:.3f}" for s in SEEDS if s in seeds) or "–" for seeds in cells]
        lines.append(f"| {mechanism} | {' | '.join(words)} |")
    return lines


def gap_table(losses: Values) -> list[str]:
    heads = [f"{steps * TOKENS_OF_A_STEP / 1e6:.0f}M tokens" for steps in LENGTHS]
    lines = [f"| softmax − | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for mechanism in OTHERS:
        words = []
        for steps in LENGTHS:
            both = [losses.get(cell_of(name, steps), {}) for name in ("softmax", mechanism)]
            words.append(shown(gap_of(losses, "softmax", mechanism, steps)[0]) if set(both[0]) & set(both[1]) else "–")
        lines.append(f"| {mechanism} | {' | '.join(words)} |")
    return lines


def power_table(losses: Values) -> list[str]:
    lines = ["| p of g = c D^−p | by seed | mean, Student's interval | pooled interval |", "|---|---|---|---|"]
    for mechanism in OTHERS:
        values, logarithmic = powers(losses, mechanism)
        own = estimate(values)
        if own is None:
            lines.append(f"| {mechanism} | {MISSING} | – | – |")
            continue
        pooled = pooled_power(losses, own) if own.half_width is not None else None
        words = " / ".join(f"{value:.2f}" for value in values).replace("-", "−") + (
            "" if logarithmic else " (− slope of g)"
        )
        lines.append(f"| {mechanism} | {words} | {shown(own, 2)} | {shown(pooled, 2) if pooled is not None else '–'} |")
    return lines
