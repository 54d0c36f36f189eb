"""The error term of a setting: the residual variance of all its cells, and contrasts of cells with it.

Every seed sets the initial weights and the order of the data of all mechanisms, so a seed is a block: the value of a
run is its mechanism's mean plus an effect of its seed plus a residual. A difference within a seed is free of the seed's
effect, and its variance is twice the residual variance. Three differences estimate that variance with two degrees of
freedom; the residuals of all mechanisms of a setting, after removing their means and the effects of the seeds, estimate
it with many more. (The plain variance within cells would keep the seeds' effects, which a paired difference does not
have.) With two mechanisms both estimates are the same number. The pooled one needs equal residual variances, which
Bartlett's test checks, with and without the effects of the seeds; where they differ, the contrast's own values per seed
are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .statistics import Estimate, chi_squared_tail, difference, estimate, noncentrality, t_quantile

Values = Mapping[Any, float]  # by seed
UNEQUAL = 0.05  # Bartlett's p below which variances count as unequal
CONSTANT = 1e-6  # a cell whose range is below this share of the range of all cells has no variance to pool


@dataclass(frozen=True)
class Pool:
    """Residuals of the cells of a setting: their standard deviation, degrees of freedom and Bartlett's p."""

    deviation: float
    freedom: int
    cells: int
    equal: float  # p of the hypothesis that all cells have the same variance

    @property
    def usable(self) -> bool:
        return self.equal >= UNEQUAL

    def interval(self, own: Estimate, weights: Sequence[float]) -> Estimate:
        """The contrast `own` with the pooled error: its variance is σ² Σ weight² / seeds."""
        error = self.deviation * math.sqrt(math.fsum(weight**2 for weight in weights) / own.seeds)
        return Estimate(own.mean, t_quantile(self.freedom) * error, own.seeds, True, self.freedom)

    def visible_difference(self, seeds: int) -> float:
        """Half of the 95 % interval of a difference of two cells: a larger difference excludes zero."""
        return t_quantile(self.freedom) * self.deviation * math.sqrt(2 / seeds)

    def detectable_difference(self, seeds: int, power: float = 0.8) -> float:
        """The true difference whose interval excludes zero, on the right side, with this probability."""
        return noncentrality(self.freedom, power) * self.deviation * math.sqrt(2 / seeds)


def pool(cells: Sequence[Values]) -> Pool | None:
    """The residuals of a two-way layout (cell + seed); None without degrees of freedom or without variance.

    Cells with one seed, and cells in which the measure is constant by definition, carry no information and are omitted.
    """
    finite = [{seed: value for seed, value in cell.items() if math.isfinite(value)} for cell in cells]
    everything = [value for cell in finite for value in cell.values()]
    if not everything:
        return None
    least = CONSTANT * (max(everything) - min(everything))
    used = [cell for cell in finite if len(cell) > 1 and max(cell.values()) - min(cell.values()) > least]
    rows = [(index, seed, value) for index, cell in enumerate(used) for seed, value in cell.items()]
    seeds = list(dict.fromkeys(seed for _, seed, _ in rows))
    design = np.zeros((len(rows), len(used) + len(seeds)))
    for row, (index, seed, _) in enumerate(rows):
        design[row, index] = design[row, len(used) + seeds.index(seed)] = 1.0
    values = np.array([value for *_, value in rows])
    if not len(rows):
        return None
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    freedom = len(rows) - int(rank)
    residuals = values - design @ fitted
    if freedom < 1 or float(residuals @ residuals) == 0.0:
        return None
    without_seeds = values - design[:, len(used) :] @ fitted[len(used) :]
    owners = np.array([index for index, *_ in rows])
    freedoms = [len(cell) - 1 for cell in used]
    equal = min(
        bartlett([float(given[owners == index].var(ddof=1)) for index in range(len(used))], freedoms)
        for given in (values, without_seeds)
    )
    return Pool(math.sqrt(float(residuals @ residuals) / freedom), freedom, len(used), equal)


def contrast(terms: Sequence[tuple[float, Values]]) -> Estimate | None:
    """Σ weight · cell per seed, over the seeds that all cells share; of two cells without a shared seed, Welch's."""
    shared = [seed for seed in terms[0][1] if all(seed in values for _, values in terms)]
    shared = [seed for seed in shared if all(math.isfinite(values[seed]) for _, values in terms)]
    if shared:
        return estimate([math.fsum(weight * values[seed] for weight, values in terms) for seed in shared])
    if [weight for weight, _ in terms] == [1.0, -1.0]:
        return difference(terms[0][1], terms[1][1])
    return None


def bartlett(variances: Sequence[float], freedoms: Sequence[int]) -> float:
    """p of Bartlett's test that all variances are equal; 1.0 with fewer than two positive variances."""
    pairs = [(v, f) for v, f in zip(variances, freedoms, strict=True) if v > 0 and f > 0]
    if len(pairs) < 2:
        return 1.0
    total = sum(f for _, f in pairs)
    pooled = math.fsum(v * f for v, f in pairs) / total
    statistic = total * math.log(pooled) - math.fsum(f * math.log(v) for v, f in pairs)
    correction = 1 + (math.fsum(1 / f for _, f in pairs) - 1 / total) / (3 * (len(pairs) - 1))
    return chi_squared_tail(statistic / correction, len(pairs) - 1)
