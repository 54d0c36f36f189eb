"""Measures attention sinks: how many heads put much of their weight on the first token, and the norms of its values.

The sink rate is that of Gu et al. (arXiv 2410.10781): the mean weight of the first LENGTH queries on the first token,
the first query included, must exceed EPSILON; the rate is the share of (sequence, layer, head) for which it does. The
first query sees only the first token, so uniform attention would also put (1 + 1/2 + .. + 1/64) / 64 = 7.4 % there: the
baseline `uniform` that the mean weight must be compared with.

A mechanism with alpha and beta has two such weights: w itself, and the softmax part, sum(alpha p) / sum(alpha) over the
queries, which does not become smaller with alpha. Without alpha, beta and sink they are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import metrics
from .capture import AttentionCall
from .moments import Moments

EPSILON = 0.3
LENGTH = 64  # queries
KINDS = ("weights", "softmax")


class SinkTally:
    """The sink rate of one layer over all calls."""

    def __init__(self, heads: int) -> None:
        self.above = {kind: torch.zeros(heads, dtype=torch.float64) for kind in KINDS}
        self.sum = {kind: torch.zeros(heads, dtype=torch.float64) for kind in (*KINDS, "uniform")}
        self.count = torch.zeros(heads, dtype=torch.float64)  # sequences

    def add(self, rows: metrics.Rows) -> None:
        counted_BHT = rows.counted[:, :, :LENGTH].cpu()
        queries_BH = counted_BHT.sum(-1)
        known_BH = queries_BH > 0

        def total(values_BHT: Tensor) -> Tensor:
            return torch.where(counted_BHT, values_BHT[:, :, :LENGTH].cpu().double(), 0).sum(-1)

        mean_BH = {
            "weights": total(rows.first_token) / queries_BH,
            "softmax": total(rows.first_softmax) / total(rows.softmax_sum),
            "uniform": total(rows.first_uniform) / queries_BH,
        }
        # A head whose alpha is 0 for every query has no softmax part, and so no sink.
        mean_BH = {kind: values.nan_to_num(0.0) for kind, values in mean_BH.items()}
        for kind in KINDS:
            self.above[kind] += ((mean_BH[kind] > EPSILON) & known_BH).sum(0)
        for kind, values in mean_BH.items():
            self.sum[kind] += torch.where(known_BH, values, 0).sum(0)
        self.count += known_BH.sum(0)

    def rates(self, kind: str) -> Tensor:
        """Share of the sequences in which each head is a sink, [H]; NaN without a sequence."""
        return self.above[kind] / self.count

    def means(self, kind: str) -> Tensor:
        return self.sum[kind] / self.count


def summarise_sinks(tallies: list[SinkTally]) -> dict[str, Any]:
    """The entry `sink_rate` of inspection.json."""
    rate = {kind: torch.stack([tally.rates(kind) for tally in tallies]) for kind in KINDS}
    mean = {kind: torch.stack([tally.means(kind) for tally in tallies]) for kind in (*KINDS, "uniform")}
    return {
        "epsilon": EPSILON,
        "length": LENGTH,
        "rate": {kind: metrics.finite_or_none(float(values.mean())) for kind, values in rate.items()},
        "heads": {kind: metrics.finite_or_none(values.tolist()) for kind, values in rate.items()},
        "first_token": {kind: metrics.finite_or_none(mean[kind].tolist()) for kind in KINDS},
        "uniform": metrics.finite_or_none(float(mean["uniform"].mean())),
    }


class ValueTally:
    """Norms of the values of one layer: those of first tokens, and all others."""

    def __init__(self) -> None:
        self.first: Moments | None = None  # per key-value head, whose number the first call shows
        self.others: Moments | None = None

    def add(self, call: AttentionCall) -> None:
        norms_BGS = torch.linalg.vector_norm(
            call.value.float() if call.value.dtype.itemsize < 4 else call.value, dim=-1
        )
        if norms_BGS.shape[2] != call.query.shape[2]:
            return  # cached keys: their documents are not known
        if self.first is None or self.others is None:
            self.first, self.others = Moments(norms_BGS.shape[1]), Moments(norms_BGS.shape[1])
        own_BS = metrics.first_keys(call.visibility) == torch.arange(norms_BGS.shape[2], device=norms_BGS.device)
        first_BGS = own_BS[:, None].expand_as(norms_BGS)
        real_BGS = torch.ones_like(first_BGS)
        if call.token_mask is not None:
            real_BGS = call.token_mask[:, None].expand_as(norms_BGS)
        self.first.add(norms_BGS, first_BGS & real_BGS)
        self.others.add(norms_BGS, ~first_BGS & real_BGS)


def summarise_values(tallies: list[ValueTally]) -> dict[str, Any] | None:
    """The entry `value_norm` of inspection.json: [layer][key-value head]."""
    if any(tally.first is None or tally.others is None for tally in tallies):
        return None
    return {
        "first": [tally.first.means() for tally in tallies if tally.first is not None],
        "others": [tally.others.means() for tally in tallies if tally.others is not None],
    }
