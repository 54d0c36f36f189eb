"""Means and differences over seeds with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, or a difference of two means. `half_width` is None with fewer than two seeds."""

    mean: float
    half_width: float | None
    seeds: int
    paired: bool = True

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.half_width is None:
            return None
        return self.mean - self.half_width, self.mean + self.half_width


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value per seed with Student's interval; None without a finite value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = math.fsum(finite) / len(finite)
    if len(finite) < 2:
        return Estimate(mean, None, 1)
    error = _standard_error(finite, mean)
    return Estimate(mean, t_quantile(len(finite) - 1) * error, len(finite))


def difference(ours: Mapping[Any, float], baseline: Mapping[Any, float]) -> Estimate | None:
    """Mean of ours − baseline, paired by seed if seeds are shared, else with Welch's interval of two means."""
    ours = {seed: value for seed, value in ours.items() if math.isfinite(value)}
    baseline = {seed: value for seed, value in baseline.items() if math.isfinite(value)}
    shared = [seed for seed in ours if seed in baseline]
    if shared:
        return estimate([ours[seed] - baseline[seed] for seed in shared])
    first, second = estimate(list(ours.values())), estimate(list(baseline.values()))
    if first is None or second is None:
        return None
    gap, seeds = first.mean - second.mean, min(first.seeds, second.seeds)
    if seeds < 2:
        return Estimate(gap, None, seeds, paired=False)
    a = _standard_error(list(ours.values()), first.mean) ** 2
    b = _standard_error(list(baseline.values()), second.mean) ** 2
    if a + b == 0:
        return Estimate(gap, 0.0, seeds, paired=False)
    freedom = (a + b) ** 2 / (a**2 / (first.seeds - 1) + b**2 / (second.seeds - 1))
    # Degrees of freedom are rounded down, so that the interval is slightly conservative.
    return Estimate(gap, t_quantile(max(1, math.floor(freedom))) * math.sqrt(a + b), seeds, paired=False)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Two-sided quantile of Student's t: P(|t| <= quantile) = confidence."""
    if freedom < 1:
        raise ValueError(f"freedom must be at least 1, got {freedom}")
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """P(|T| <= t) for integer degrees of freedom: the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _standard_error(values: Sequence[float], mean: float) -> float:
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(spread / len(values))
