"""Merges means, standard deviations and histograms per head from parts, with constant memory."""

from __future__ import annotations

import torch
from torch import Tensor

from . import metrics


class Moments:
    """Count, mean and standard deviation per head, merged from parts in fp64 without cancellation."""

    def __init__(self, heads: int) -> None:
        self.count, self.mean, self.squares = (torch.zeros(heads, dtype=torch.float64) for _ in range(3))

    def add(self, values_BHT: Tensor, counted_BHT: Tensor) -> None:
        values = values_BHT.detach().cpu().double().transpose(0, 1).flatten(1)
        counted = counted_BHT.cpu().expand_as(values_BHT).transpose(0, 1).flatten(1)
        count = counted.sum(1).double()
        mean = torch.where(counted, values, 0).sum(1) / count.clamp(min=1)
        squares = torch.where(counted, values - mean[:, None], 0).square().sum(1)
        together = self.count + count
        share = count / together.clamp(min=1)
        step = mean - self.mean
        self.squares += squares + step.square() * self.count * share
        self.mean += step * share
        self.count = together

    def means(self) -> list[float | None]:
        return metrics.finite_or_none(torch.where(self.count > 0, self.mean, torch.nan).tolist())

    def deviations(self) -> list[float | None]:
        """Population standard deviation (divided by n)."""
        return metrics.finite_or_none((self.squares / self.count).sqrt().tolist())


class Histogram:
    """Counts per head between fixed edges; non-finite values are not counted."""

    def __init__(self, heads: int, edges: Tensor) -> None:
        self.edges = edges
        self.counts = torch.zeros(heads, len(edges) - 1, dtype=torch.int64)

    def add(self, values_BHT: Tensor, counted_BHT: Tensor) -> None:
        values = values_BHT.detach().cpu().double().transpose(0, 1).flatten(1)
        counted = counted_BHT.cpu().expand_as(values_BHT).transpose(0, 1).flatten(1) & values.isfinite()
        heads, bins = self.counts.shape
        places = (
            torch.bucketize(values.contiguous(), self.edges[1:-1], right=True) + bins * torch.arange(heads)[:, None]
        )
        self.counts += torch.bincount(places[counted], minlength=heads * bins).view(heads, bins)
