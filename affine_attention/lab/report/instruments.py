"""Tables of the instruments: activations, values and alpha from the inspection, robustness from the evaluation.

The weight on the first token and the sink rate of the weights are in first_tokens.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .cells import Cell, Row, Table, estimate_cell
from .collect import Run, grid, number
from .groups import Group
from .measures import Measure
from .tables import head_cells, head_columns

VARIANTS = {
    "a8_tensor": "int8 inputs, per tensor",
    "a8_token": "int8 inputs, per token",
    "a4_token": "int4 inputs, per token",
    "w8": "int8 weights",
    "w4": "int4 weights",
    "w8a8_tensor": "int8 both, per tensor",
    "w8a8_token": "int8 both, per token",
    "w4a4_token": "int4 both, per token",
}
FACTORS = ("1x", "2x", "4x")


def activation_table(groups: list[Group]) -> Table:
    """What goes with attention sinks, from inspection.json."""
    measures = [
        Measure("Sink rate of softmax part %", softmax_sink_rate, digits=1,
                title="share of heads with more than 0.3 of their softmax part on the first token, over 64 queries"),
        Measure("Largest activation", largest_activation, digits=1, title="over layers, tokens and channels"),
        Measure("Largest / median", activation_ratio, digits=0,
                title="the largest over layers of largest activation / median activation"),
        Measure("Value norm of first token", value_ratio, better="", digits=2,
                title="relative to that of the other tokens, mean over layers and heads"),
        Measure("α within heads", partial(alpha_spread, within=True), better="", digits=4,
                title="standard deviation of α over the tokens of a head, root mean square over heads and layers"),
        Measure("α between heads", partial(alpha_spread, within=False), better="", digits=4,
                title="standard deviation over heads of the mean α of a head, root mean square over layers"),
    ]  # fmt: skip
    having = [group for group in groups if any("sink_rate" in run.inspection for run in group.runs)]
    return _table(
        "activations",
        "Activations, values and the use of α",
        "Heads that are sinks whatever their α, activations between layers, values of the first token, spread of α.",
        having,
        measures,
        "No run was inspected with these instruments yet; `affine inspect RUN` measures them.",
        ["The softmax part of a head is sum(α p) / sum(α) over queries: it does not fall with a smaller α."],
    )  # fmt: skip


def robustness_table(groups: list[Group]) -> Table:
    """Differences of the loss without the first key and in low precision, from evaluation.json."""
    measures = [
        Measure("First key evicted", partial(delta, path=("eviction", "first_key")),
                partial(delta_error, path=("eviction", "first_key")),
                title="the first key is removed from the cache after 64 tokens"),
        *(Measure(label, partial(delta, path=("quantisation", "variants", name)),
                  partial(delta_error, path=("quantisation", "variants", name)),
                  title="simulated: symmetric absmax rounding; weights have one scale per output channel")
          for name, label in VARIANTS.items()),
    ]  # fmt: skip
    return _table(
        "robustness",
        "Loss without the first key and in low precision",
        "Increase of the loss in nats per token when the same model is changed and nothing is trained again.",
        groups,
        measures,
        "No run was measured with these instruments yet; `affine evaluate RUN --instruments all` measures them.",
        ["Inputs and weights of the decoder's linear layers are rounded; the LM head, W_a and everything between the "
         "linear layers stay as they are."],
    )  # fmt: skip


def length_table(groups: list[Group]) -> Table:
    """The loss beyond the training length, from evaluation.json."""
    measures = []
    for name in FACTORS:
        path = ("length", "factors", name)
        measures += [
            Measure(f"Loss, {name}", partial(loss_of, path=path), title="tokens up to this multiple of the training "
                    "length, from the one before it on"),
            Measure(f"Cost of context, {name}", partial(delta, path=path), partial(delta_error, path=path),
                    title="minus the loss of the same tokens in separate windows of the training length"),
        ]  # fmt: skip
    return _table(
        "lengths",
        "Beyond the training length",
        "Loss in nats per token at one, two and four times the training length.",
        groups,
        measures,
        "No run was measured beyond its training length yet; `affine evaluate RUN --instruments length` does that.",
        [],
    )


def instrument_tables(groups: list[Group]) -> list[Table]:
    return [activation_table(groups), robustness_table(groups), length_table(groups)]


def softmax_sink_rate(run: Run) -> float:
    """In per cent."""
    return 100 * number(_entry(run.inspection, "sink_rate", "rate").get("softmax"))


def largest_activation(run: Run) -> float:
    return _largest(_numbers(run, "activations", "largest"))


def activation_ratio(run: Run) -> float:
    largest, median = _numbers(run, "activations", "largest"), _numbers(run, "activations", "median")
    if largest.shape != median.shape or not (median > 0).all():
        return math.nan
    return _largest(largest / median)


def value_ratio(run: Run) -> float:
    first, others = run.inspected("value_norm", "first"), run.inspected("value_norm", "others")
    if first is None or others is None or first.shape != others.shape or not (others > 0).all():
        return math.nan
    return _mean(first / others)


def alpha_spread(run: Run, within: bool) -> float:
    """Computed from the means and deviations of each head, so that older inspections have it too."""
    mean, deviation = run.inspected("alpha", "mean"), run.inspected("alpha", "std")
    if mean is None or deviation is None:
        return math.nan
    squares = deviation**2 if within else mean.var(1)
    return math.sqrt(_mean(squares)) if not np.isnan(squares).any() else math.nan


def loss_of(run: Run, path: tuple[str, ...]) -> float:
    return number(_entry(run.evaluation, "instruments", *path).get("loss"))


def delta(run: Run, path: tuple[str, ...]) -> float:
    return number(_entry(run.evaluation, "instruments", *path).get("delta"))


def delta_error(run: Run, path: tuple[str, ...]) -> float:
    return number(_entry(run.evaluation, "instruments", *path).get("stderr"))


def _table(
    key: str,
    title: str,
    caption: str,
    groups: list[Group],
    measures: list[Measure],
    missing: str,
    notes: list[str],
) -> Table:
    """One row for each group that has a measure, and one column for each measure that a group has."""
    found = {measure.label: [measure.of(group) for group in groups] for measure in measures}
    shown = [measure for measure in measures if any(found[measure.label])]
    rows = []
    for index, group in enumerate(groups):
        cells: list[Cell] = [
            estimate_cell(found[m.label][index], m.digits, m.error_of(group), sign=m.label.startswith("Cost"))
            for m in shown
        ]
        if any(found[measure.label][index] for measure in shown):
            rows.append(Row([*head_cells(group, groups), *cells]))
    titles = {measure.label: measure.title for measure in shown}
    columns = [*head_columns(groups), *(measure.label for measure in shown)]
    return Table(key, title, caption, columns, rows, notes if rows else [], titles, missing)


def _entry(table: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _numbers(run: Run, *keys: str) -> np.ndarray:
    """A list of numbers of inspection.json, one per layer; NaN where one is missing."""
    *outer, last = keys
    found = _entry(run.inspection, *outer).get(last)
    return grid([found]).flatten() if isinstance(found, list) else np.zeros(0)


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(values)) if values.size and not np.isnan(values).all() else math.nan


def _mean(values: np.ndarray | None) -> float:
    return math.nan if values is None or np.isnan(values).all() else float(np.nanmean(values))
