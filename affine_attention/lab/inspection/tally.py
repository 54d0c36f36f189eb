"""Accumulates means, standard deviations and histograms per head over the attention calls of a layer.

Memory is constant in the number of calls, except for one number per query: the row sum averaged over heads, whose
median Figure 3 shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import metrics
from .capture import AttentionCall
from .moments import Histogram, Moments
from .sinks import SinkTally, ValueTally

# The same edges for every mechanism and run, so that histograms are comparable; values outside are counted in the end
# bins. Alphas and row sums are in [0, 1]: a row sum is a mean of alpha and running_alpha weighted by n / N, or 1 minus
# the mass of a sink. The bins are centred at 0, 0.02, .. 1, so that softmax's 1 (up to rounding) and clipped alphas
# fall into one bin each.
SHARE_EDGES = torch.arange(-1, 102, 2, dtype=torch.float64) / 100
ENTROPY_EDGES = torch.arange(0, 45, dtype=torch.float64) / 4  # nats; log(32768) is 10.4


class LayerTally:
    """The statistics of one layer over all calls, as stored in inspection.json."""

    def __init__(self, heads: int) -> None:
        self.moments = {name: Moments(heads) for name in metrics.Rows._fields[:-1]}
        self.row_sum = Histogram(heads, SHARE_EDGES)
        self.entropy = {name: Histogram(heads, ENTROPY_EDGES) for name in ("entropy_softmax", "entropy_weights")}
        self.over_heads: list[Tensor] = []
        self.over_heads_histogram = Histogram(1, SHARE_EDGES)
        self.alpha, self.alpha_histogram = Moments(heads), Histogram(heads, SHARE_EDGES)
        self.low, self.high = Moments(heads), Moments(heads)
        self.logits, self.pairs = (torch.zeros(heads, dtype=torch.float64) for _ in range(2))
        self.gate, self.gate_saturated, self.gate_count = 0.0, 0.0, 0.0
        self.not_finite = 0
        self.sinks, self.values = SinkTally(heads), ValueTally()

    def add(self, call: AttentionCall) -> None:
        rows = metrics.measure_rows(
            call.query, call.key, alpha=call.alpha, beta=call.beta, sink=call.sink, visibility=call.visibility,
            softmax_scale=call.softmax_scale, token_mask=call.token_mask, difference=call.difference,
            weights=call.weights,
        )  # fmt: skip
        self.not_finite += int((~rows.row_sum.isfinite() & rows.counted).sum())
        with_weights = rows.counted & (rows.absolute_sum != 0)  # the entropy of a row of zeros is undefined
        for name, moments in self.moments.items():
            moments.add(getattr(rows, name), with_weights if name == "entropy_weights" else rows.counted)
        self.row_sum.add(rows.row_sum, rows.counted)
        self.entropy["entropy_softmax"].add(rows.entropy_softmax, rows.counted)
        self.entropy["entropy_weights"].add(rows.entropy_weights, with_weights)
        self._add_over_heads(rows)
        self.sinks.add(rows)
        self.values.add(call)
        sums, counts = metrics.logit_sums(call.query, call.key, call.visibility, call.softmax_scale, call.token_mask)
        self.logits += sums.cpu()
        self.pairs += counts.cpu()
        if call.alpha is not None:
            self._add_alpha(call.alpha, rows.counted)
        if call.gate is not None:
            self._add_gate(call.gate, call.token_mask)

    def _add_over_heads(self, rows: metrics.Rows) -> None:
        counted_BT = rows.counted.any(1)
        mean_BT = torch.where(rows.counted, rows.row_sum, 0).sum(1) / rows.counted.sum(1).clamp(min=1)
        self.over_heads.append(mean_BT[counted_BT].cpu())
        self.over_heads_histogram.add(mean_BT[:, None], counted_BT[:, None])

    def _add_alpha(self, alpha: Tensor, counted: Tensor) -> None:
        self.alpha.add(alpha, counted)
        self.alpha_histogram.add(alpha, counted)
        self.low.add(alpha <= 0, counted)
        self.high.add(alpha >= 1, counted)

    def _add_gate(self, gate: Tensor, token_mask: Tensor | None) -> None:
        total, count = metrics.share_sums(gate, token_mask)
        saturated, _ = metrics.share_sums(metrics.is_gate_saturated(gate), token_mask)
        self.gate += float(total.sum())
        self.gate_saturated += float(saturated.sum())
        self.gate_count += float(count.sum())

    def share_of_softmax(self) -> Tensor:
        """The first token's share of the softmax part by head, sum(alpha p) / sum(alpha); NaN where alpha is 0."""
        return self.moments["first_softmax"].mean / self.moments["softmax_sum"].mean

    def alpha_spread(self) -> tuple[float | None, float | None]:
        """Standard deviation of alpha over tokens within a head (root mean square over heads), and between the heads.

        The squares of the two add up to the variance of alpha over all tokens and heads of the layer.
        """
        known = self.alpha.count > 0
        if not known.any():
            return None, None
        within = (self.alpha.squares[known] / self.alpha.count[known]).mean().sqrt()
        between = self.alpha.mean[known].std(correction=0)
        return metrics.finite_or_none(float(within)), metrics.finite_or_none(float(between))

    def mean_logit(self) -> list[float | None]:
        return metrics.finite_or_none((self.logits / self.pairs).tolist())

    def over_heads_numbers(self) -> dict[str, Any]:
        """Mean, standard deviation and median of the row sums, averaged over heads first."""
        values = torch.cat([torch.zeros(0), *self.over_heads]).double()
        if not len(values):
            return {"mean": None, "std": None, "median": None}
        numbers = {"mean": values.mean(), "std": values.std(correction=0), "median": values.quantile(0.5)}
        return {name: metrics.finite_or_none(float(number)) for name, number in numbers.items()}
