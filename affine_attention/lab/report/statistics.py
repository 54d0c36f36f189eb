"""Means and differences over seeds with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

CONFIDENCE = 0.95
POINTS = 500  # of the midpoint rule


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, or a difference of two means. `half_width` is None with fewer than two seeds."""

    mean: float
    half_width: float | None
    seeds: int
    paired: bool = True
    freedom: int = 0  # degrees of freedom of the interval

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.half_width is None:
            return None
        return self.mean - self.half_width, self.mean + self.half_width

    @property
    def p(self) -> float | None:
        """Two-sided p of the hypothesis that the true value is zero; None without an interval of some width."""
        if not self.half_width:
            return None
        return 1 - _within(abs(self.mean) / self.half_width * t_quantile(self.freedom), self.freedom)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value per seed with Student's interval; None without a finite value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = math.fsum(finite) / len(finite)
    if len(finite) < 2:
        return Estimate(mean, None, 1)
    error = _standard_error(finite, mean)
    freedom = len(finite) - 1
    return Estimate(mean, t_quantile(freedom) * error, len(finite), True, freedom)


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
    # Degrees of freedom are rounded down, so that the interval is slightly conservative.
    freedom = max(1, math.floor((a + b) ** 2 / (a**2 / (first.seeds - 1) + b**2 / (second.seeds - 1))))
    return Estimate(gap, t_quantile(freedom) * math.sqrt(a + b), seeds, False, freedom)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p values: with a threshold of 0.05, any false positive in the family has a chance below 5 %."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


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


@lru_cache(maxsize=256)
def noncentrality(freedom: int, power: float) -> float:
    """The true mean in standard errors that a two-sided test with 95 % confidence finds with this probability.

    P(T > t) of the noncentral t is the mean of Φ(δ − t s) over s, the estimated deviation relative to the true one,
    whose density is proportional to s^(ν−1) exp(−ν s² / 2).
    """
    limit = t_quantile(freedom)
    scales = [(k + 0.5) * 6 / POINTS for k in range(POINTS)]
    weights = [math.exp((freedom - 1) * math.log(s) - freedom * s * s / 2) for s in scales]
    total = math.fsum(weights)

    def found(shift: float) -> float:
        parts = (w * math.erfc((limit * s - shift) / math.sqrt(2)) for w, s in zip(weights, scales, strict=True))
        return math.fsum(parts) / (2 * total)

    low, high = 0.0, 8.0 * limit
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < power else (low, middle)
    return (low + high) / 2


def chi_squared_tail(value: float, freedom: int) -> float:
    """P(chi² > value) for integer degrees of freedom: the finite sums of Abramowitz and Stegun 26.4.4 and 26.4.5."""
    if value <= 0:
        return 1.0
    half, odd = value / 2, freedom % 2
    exponents = [k + odd / 2 for k in range(freedom // 2)]
    terms = [math.exp(exponent * math.log(half) - half - math.lgamma(exponent + 1)) for exponent in exponents]
    return min(1.0, math.fsum(terms) + (math.erfc(math.sqrt(half)) if odd else 0.0))


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
