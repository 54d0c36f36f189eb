"""E2 (e2.md): turns converted models, with and without pressure on their sinks, into the tests of the design.

python -m studies.experiments.report e2 RUNS...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from affine_attention.lab.names import folder_name
from affine_attention.lab.report.attention_measures import first_token, first_token_of_softmax
from affine_attention.lab.report.collect import Run
from affine_attention.lab.report.first_tokens import sink_rate
from affine_attention.lab.report.instruments import alpha_spread, delta, largest_activation, value_ratio
from affine_attention.lab.report.measures import accuracy, heldout_loss, perplexity
from affine_attention.lab.report.statistics import Estimate, t_quantile
from studies.smollm2.run import TASKS

from .design_runs import DesignRuns, Values, collect, design
from .plans import E2_MECHANISMS, E2_PRESSURE, SEEDS
from .verdicts import CONFIRMED, REFUTED, Verdict, is_below, shown, signed, verdict_lines, waiting

TWO = SEEDS[:2]
PLAIN, PRESSURE = E2_PRESSURE
CLOSE = 0.01  # nats: held-out loss of affine minus that of the softmax control
CHEAP, EXPENSIVE = 0.3, 0.6  # nats: int8 per tensor
USED, UNUSED = 0.05, 0.01  # spread of α within a head
INT8 = ("quantisation", "variants", "a8_tensor")


class Column(NamedTuple):
    title: str
    read: Callable[[Run], float]
    digits: int = 3


def spread_within_heads(run: Run) -> float:
    """Standard deviation of α over the tokens of a head, mean over heads and layers."""
    found = run.inspected("alpha", "std")
    return math.nan if found is None else float(np.nanmean(found))


COLUMNS = (
    Column("held-out KL", heldout_loss, 4),
    Column("held-out perplexity", partial(perplexity, name="heldout", form="token"), 2),
    Column("first token, softmax part", first_token_of_softmax),
    Column("first token, weights", first_token),
    Column("sink rate %, softmax part", partial(sink_rate, kind="softmax"), 1),
    Column("sink rate %, weights", partial(sink_rate, kind="weights"), 1),
    Column("largest activation", largest_activation, 0),
    Column("value norm of first token", value_ratio, 2),
    Column("int8 per tensor", partial(delta, path=INT8)),
    Column("int8 per token", partial(delta, path=("quantisation", "variants", "a8_token"))),
    Column("int4 per token", partial(delta, path=("quantisation", "variants", "a4_token"))),
    Column("first key evicted", partial(delta, path=("eviction", "first_key"))),
    Column("α within heads", spread_within_heads),
    Column("α between heads", partial(alpha_spread, within=False)),
    *(Column(f"{task} %", partial(accuracy, task=task), 1) for task in TASKS),
)


def cell_of(mechanism: str, pressure: str) -> str:
    return folder_name(mechanism + pressure)


CELLS = [cell_of(mechanism, pressure) for pressure in E2_PRESSURE for mechanism in E2_MECHANISMS]


def report_e2(folders: Mapping[str, Path]) -> list[list[str]]:
    runs = collect(design("e2"), folders)
    return [runs.notes(), verdict_lines(tests(runs)), conclusion(runs), *measure_tables(runs)]


def noise_of(values: Values) -> tuple[float, int]:
    """(standard deviation of one run, degrees of freedom), from the differences between the seeds of each cell."""
    several = [list(seeds.values()) for seeds in values.values() if len(seeds) > 1]
    freedom = sum(len(seeds) - 1 for seeds in several)
    if not freedom:
        return math.nan, 0
    return math.sqrt(math.fsum((len(seeds) - 1) * variance(seeds) for seeds in several) / freedom), freedom


def difference_of(values: Values, ours: str, baseline: str, share: float = 1.0) -> Estimate:
    """Mean of ours − share · mean of the baseline, with the pooled 95 % interval."""
    deviation, freedom = noise_of(values)
    gap = fmean(values[ours].values()) - share * fmean(values[baseline].values())
    half = t_quantile(freedom) * deviation * math.sqrt((1 + share**2) / len(TWO))
    return Estimate(gap, half, len(TWO), False, freedom)


def tests(runs: DesignRuns) -> list[Verdict]:
    shares = runs.values(first_token_of_softmax)
    return [
        dissolves("H1, affine dissolves sinks without pressure", shares, PLAIN),
        dissolves("H2, with pressure", shares, PRESSURE),
        quantises(runs),
        pressure_alone(shares),
        *(uses_alpha(runs, pressure) for pressure in E2_PRESSURE),
    ]


def dissolves(test: str, shares: Values, pressure: str, mechanism: str = "affine") -> Verdict:
    """Below half of softmax's and below head_gated's, both beyond the interval; refuted if its mean is not lower."""
    ours, softmax, gate = (cell_of(name, pressure) for name in (mechanism, "softmax", "head_gated"))
    if row := waiting(test, shares, [ours, softmax, gate], TWO):
        return row
    half, to_gate = difference_of(shares, ours, softmax, 0.5), difference_of(shares, ours, gate)
    means = [fmean(shares[cell].values()) for cell in (ours, softmax, gate)]
    statistic = f"{means[0]:.3f}, softmax {means[1]:.3f}, head_gated {means[2]:.3f}"
    remark = f"− ½ softmax {shown(half)}; − head_gated {shown(to_gate)}"
    if is_below(half) and is_below(to_gate):
        return Verdict(test, statistic, CONFIRMED, remark)
    if means[0] >= means[1]:
        return Verdict(test, statistic, REFUTED, remark)
    why = "below half of softmax, not below head_gated" if is_below(half) else "not shown to be below half of softmax"
    return Verdict(test, statistic, "undecided", f"{why}; {remark}")


def quantises(runs: DesignRuns) -> Verdict:
    """Confirmed if affine under one of the conditions is cheap with a close loss; refuted if both are expensive."""
    test, costs, losses = "H3, quantises better", runs.values(partial(delta, path=INT8)), runs.values(heldout_loss)
    ours = [cell_of("affine", pressure) for pressure in E2_PRESSURE]
    controls = [cell_of("softmax", pressure) for pressure in E2_PRESSURE]
    if row := waiting(test, costs, ours, TWO) or waiting(test, losses, [*ours, *controls], TWO):
        return row
    means = [fmean(costs[cell].values()) for cell in ours]
    gaps = [difference_of(losses, *pair) for pair in zip(ours, controls, strict=True)]
    statistic = f"plain {signed(means[0])}, pressure {signed(means[1])} nats"
    remark = f"held-out loss − softmax: plain {shown(gaps[0], 4)}, pressure {shown(gaps[1], 4)}"
    if any(cost < CHEAP and gap.mean <= CLOSE for cost, gap in zip(means, gaps, strict=True)):
        return Verdict(test, statistic, CONFIRMED, remark)
    return Verdict(test, statistic, REFUTED if min(means) > EXPENSIVE else "undecided", remark)


def pressure_alone(shares: Values) -> Verdict:
    """H4 compares the means, as the design does; the interval is shown."""
    test, cells = "H4, pressure alone does it", (cell_of("softmax", PRESSURE), cell_of("softmax", PLAIN))
    if row := waiting(test, shares, cells, TWO):
        return row
    under, plain = (fmean(shares[cell].values()) for cell in cells)
    verdict = CONFIRMED if under < plain / 2 else REFUTED if under >= plain else "undecided"
    remark = f"− ½ plain {shown(difference_of(shares, *cells, 0.5))}"
    return Verdict(test, f"softmax {under:.3f} under pressure, {plain:.3f} plain", verdict, remark)


def uses_alpha(runs: DesignRuns, pressure: str) -> Verdict:
    test = f"H5, α is used ({'pressure' if pressure else 'plain'})"
    spreads, cell = runs.values(spread_within_heads), cell_of("affine", pressure)
    if row := waiting(test, spreads, [cell], TWO):
        return row
    mean = fmean(spreads[cell].values())
    verdict = CONFIRMED if mean > USED else REFUTED if mean < UNUSED else "undecided"
    return Verdict(test, f"{mean:.4f}", verdict)


def conclusion(runs: DesignRuns) -> list[str]:
    """What the design says follows for the paper's account."""
    shares, losses = runs.values(first_token_of_softmax), runs.values(heldout_loss)
    lines = []
    for pressure, name in ((PLAIN, "without pressure"), (PRESSURE, "under pressure")):
        affine, softmax = cell_of("affine", pressure), cell_of("softmax", pressure)
        row = dissolves("", shares, pressure)
        if row.verdict not in (CONFIRMED, REFUTED, "undecided") or waiting("", losses, [affine, softmax], TWO):
            return ["No conclusion about the paper's account: runs are missing."]
        gap = difference_of(losses, affine, softmax).mean
        alone = pressure == PRESSURE and pressure_alone(shares).verdict == CONFIRMED
        holds = row.verdict == CONFIRMED and not alone and gap <= CLOSE
        reasons = [
            text
            for text, applies in (
                ("affine does not dissolve the sinks by the rule", row.verdict != CONFIRMED),
                ("softmax does so too", alone),
                (f"the loss is {signed(gap, 4)} nats above the control", gap > CLOSE),
            )
            if applies
        ]
        words = "is supported" if holds else f"is not supported ({'; '.join(reasons)})"
        lines.append(f"The paper's account {words} {name}.")
        gate = difference_of(shares, cell_of("head_gated", pressure), softmax, 0.5)
        if is_below(gate):
            lines.append(f"head_gated falls below half of softmax {name} as well: it is the gate, not the affine part.")
    return lines


def measure_tables(runs: DesignRuns) -> list[list[str]]:
    """All measures of the design: both seeds and the noise of one run, in tables of few columns."""
    tables = []
    for first in range(0, len(COLUMNS), 5):
        columns = COLUMNS[first : first + 5]
        measured = [runs.values(column.read) for column in columns]
        lines = [f"| | {' | '.join(column.title for column in columns)} |", f"|{'---|' * (len(columns) + 1)}"]
        for cell in CELLS:
            shown_cells = [
                " / ".join(f"{seeds[s]:.{column.digits}f}" for s in TWO if s in seeds).replace("-", "−") or "–"
                for column, values in zip(columns, measured, strict=True)
                for seeds in [values.get(cell, {})]
            ]
            lines.append(f"| {cell} | {' | '.join(shown_cells)} |")
        noise = [noise_of(values) for values in measured]
        words = [f"{d:.{c.digits + 1}f} ({n} df)" if n else "–" for c, (d, n) in zip(columns, noise, strict=True)]
        lines.append(f"| deviation of one run | {' | '.join(words)} |")
        tables.append(lines)
    return tables
