"""Weight on the first token, what uniform attention would put there, and the sink rate of Gu et al."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from .attention_measures import FIRST_TOKEN, FIRST_TOKEN_OF_SOFTMAX
from .cells import Cell, Row, Table, blank, estimate_cell, shown
from .collect import Run, number
from .groups import Group
from .measures import Measure, counted
from .tables import head_cells, head_columns

NOT_STORED = "not stored"


def uniform_share(run: Run) -> float:
    """Mean over queries of 1 / visible keys, from the inspection or H(T) / T of T causal queries; NaN if not known."""
    if (measured := run.inspected("first_token", "uniform")) is not None:
        return float(np.nanmean(measured))
    length = number(run.inspection.get("length"))
    if (
        not 1 <= length <= 2**24
        or run.recipe.get("document_boundaries")
        or run.inspected("first_token", "mean") is None
    ):
        return math.nan
    return math.fsum(1 / n for n in range(1, int(length) + 1)) / length


def strongest_head(run: Run) -> float:
    found = run.inspected("first_token", "mean")
    return math.nan if found is None else max(float(value) for value in found.ravel() if not math.isnan(value))


def sink_rate(run: Run, kind: str) -> float:
    """In per cent, from the inspection: heads whose mean weight on the first token exceeds 0.3 over 64 tokens."""
    found = run.inspection.get("sink_rate")
    rates = found.get("rate") if isinstance(found, dict) else None
    return 100 * number(rates.get(kind) if isinstance(rates, dict) else None)


STRONGEST = Measure("Strongest head", strongest_head, digits=4, title="largest mean weight on the first token")
SINK_RATE = Measure("Sink rate %, w", partial(sink_rate, kind="weights"), digits=1,
                    title="share of heads whose mean weight on the first token of 64 exceeds 0.3")  # fmt: skip
SINK_RATE_OF_SOFTMAX = Measure("Sink rate %, softmax part", partial(sink_rate, kind="softmax"), digits=1,
                               title="the same for the softmax part, which does not shrink with α")  # fmt: skip
UNIFORM = Measure("Uniform attention", uniform_share, better="", digits=4,
                  title="mean of 1 / visible keys over the same queries")  # fmt: skip


def first_token_table(groups: list[Group]) -> Table:
    """Each group's weight on the first token, the uniform baseline, their ratio, and the sink rate."""
    rows = []
    for group in groups:
        if FIRST_TOKEN.of(group) is None:
            continue
        part, even = FIRST_TOKEN_OF_SOFTMAX.of(group), UNIFORM.of(group)
        cells = [estimate_cell(measure.of(group), 4) for measure in (FIRST_TOKEN, FIRST_TOKEN_OF_SOFTMAX)]
        cells += [blank() if even is None else Cell(shown(even.mean, 4))]
        cells += [blank() if part is None or not even else Cell(shown(part.mean / even.mean, 2))]
        cells += [estimate_cell(STRONGEST.of(group), 4), _rate_cell(SINK_RATE, group)]
        cells += [_rate_cell(SINK_RATE_OF_SOFTMAX, group)]
        rows.append(Row([*head_cells(group, groups), *cells]))
    notes = ["A ratio near 1 means that the softmax part does not use the first token as a sink."]
    if any(math.isnan(SINK_RATE.read(run)) for group in groups for run in counted(group) if run.inspection):
        notes.append(
            "Sink rate (Gu et al., arXiv 2410.10781): share of heads whose mean weight on the first token exceeds 0.3 "
            "over the first 64 tokens. Runs that were inspected before it was added do not store it; "
            "`affine inspect RUN` measures it again where the weights exist."
        )
    return Table(
        "first-tokens",
        "Weight on the first token, next to uniform attention",
        "Mean over layers, heads and queries; a share is a sink only if it exceeds what uniform attention puts there.",
        [*head_columns(groups), "w", "Softmax part", "Uniform attention", "Softmax part / uniform", STRONGEST.label,
         SINK_RATE.label, SINK_RATE_OF_SOFTMAX.label],
        rows,
        notes,
        {"w": FIRST_TOKEN.title, "Softmax part": FIRST_TOKEN_OF_SOFTMAX.title, UNIFORM.label: UNIFORM.title,
         STRONGEST.label: STRONGEST.title, SINK_RATE.label: SINK_RATE.title,
         SINK_RATE_OF_SOFTMAX.label: SINK_RATE_OF_SOFTMAX.title},
        "No run was inspected; `affine inspect RUN` measures the first token's weight.",
    )  # fmt: skip


def _rate_cell(measure: Measure, group: Group) -> Cell:
    rate = measure.of(group)
    if rate is None:
        return Cell(NOT_STORED, title="inspected before the inspection stored it")
    return estimate_cell(rate, measure.digits)
