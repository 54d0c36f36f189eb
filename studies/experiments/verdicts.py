"""Turns intervals into the verdicts of a design, and verdicts into the lines of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from affine_attention.lab.report.pooled import Pool, contrast
from affine_attention.lab.report.statistics import Estimate, t_quantile

from .design_runs import Values, missing_runs

CONFIRMED, REFUTED = "confirmed", "refuted"
MISSING = "runs are missing"


class Verdict(NamedTuple):
    """One row of the table of verdicts: the test, its number, what follows, and a remark for the reader."""

    test: str
    statistic: str
    verdict: str
    remark: str = ""


class Contrast(NamedTuple):
    """Σ weight · cell, paired by seed, with the pooled interval and with the interval of its own values per seed."""

    pooled: Estimate
    own: Estimate


def contrast_of(
    values: Values, terms: Sequence[tuple[float, str]], pool: Pool | None, confidence: float
) -> Contrast | None:
    """None without a pooled variance or without two seeds that all cells share."""
    own = contrast([(weight, values[cell]) for weight, cell in terms])
    if own is None or own.half_width is None or pool is None:
        return None
    error = own.half_width / t_quantile(own.freedom)
    narrow = pool.deviation * math.sqrt(math.fsum(weight**2 for weight, _ in terms) / own.seeds)
    return Contrast(
        Estimate(own.mean, t_quantile(pool.freedom, confidence) * narrow, own.seeds, True, pool.freedom),
        Estimate(own.mean, t_quantile(own.freedom, confidence) * error, own.seeds, True, own.freedom),
    )


def waiting(test: str, values: Values, cells: Sequence[str], seeds: Sequence[int]) -> Verdict | None:
    """The row of a test whose runs are not all there; None if they are."""
    absent = missing_runs(values, cells, seeds)
    return Verdict(test, "–", MISSING, f"needs {', '.join(absent)}") if absent else None


def is_below(estimate: Estimate, limit: float = 0.0) -> bool:
    """True if the whole interval lies below the limit."""
    return estimate.interval is not None and estimate.interval[1] < limit


def is_above(estimate: Estimate, limit: float = 0.0) -> bool:
    return estimate.interval is not None and estimate.interval[0] > limit


def is_within(estimate: Estimate, limit: float) -> bool:
    return is_above(estimate, -limit) and is_below(estimate, limit)


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def shown(estimate: Estimate, digits: int = 3) -> str:
    """`−0.214 ± 0.033`."""
    half = "?" if estimate.half_width is None else f"{estimate.half_width:.{digits}f}"
    return f"{signed(estimate.mean, digits)} ± {half}"


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    lines = ["| test | statistic | verdict | |", "|---|---|---|---|"]
    return lines + [f"| {v.test} | {v.statistic} | **{v.verdict}** | {v.remark} |" for v in verdicts]
