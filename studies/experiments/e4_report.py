"""E4 (e4.md): turns held-out losses at five learning rates into sensitivities, the tests of the design and a figure.

python -m studies.experiments.report e4 RUNS...         # the GPU version
python -m studies.experiments.e4_cpu --report           # the stored result of the CPU version
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from affine_attention.lab.report.statistics import t_quantile
from affine_attention.lab.run import RunFolder

from .design_runs import collect, design, split_name
from .plans import E4_MECHANISMS, RATES, SEEDS
from .verdicts import CONFIRMED, MISSING, REFUTED, Verdict, signed, verdict_lines

TWO = SEEDS[:2]
CLIPPED = 1.0  # the clipping norm of the recipe
WITHIN = 0.1  # nats: a rate whose loss is within this of the best is usable
HIGH_RATES = RATES[-2:]  # of H4
Losses = Mapping[tuple[str, float, int], float]  # (mechanism, rate, seed) -> held-out loss


def report_e4(folders: Mapping[str, Path]) -> list[list[str]]:
    found = collect(design("e4"), folders, with_diverged=True)
    summaries = []
    for name, run in found.runs.items():
        cell, seed = split_name(name)
        mechanism, _, rate = cell.partition("_learning_rate=")
        summaries.append({"mechanism": mechanism, "learning_rate": float(rate), "seed": seed, **summary(run.folder)})
    if found.missing:
        waits = [Verdict(test, "–", MISSING, "needs all 50 runs") for test in ("H1", "H2", "H3", "H4")]
        return [found.notes(), verdict_lines(waits), *run_table(summaries)]
    return [found.notes(), *tables(summaries)]


def summary(run: RunFolder) -> dict[str, Any]:
    """The numbers of one run; the held-out loss of a diverged run is None.

    The loss of the untrained model is the training loss of the first batch, before the first update.
    """
    log, warmup = run.log(), run.recipe().warmup_steps
    norms = [line["grad_norm"] for line in log[warmup:]]
    return {
        "untrained_loss": log[0]["loss"],
        "eval_loss": log[-1].get("eval_loss"),
        "clipped_share": fmean(norm > CLIPPED for norm in norms) if norms else None,
        "grad_norm_std": pstdev(norms) if norms else None,
    }


def losses_of(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, float, int], float]:
    """min(held-out loss, loss of the untrained model) of every run."""
    found = {}
    for run in runs:
        ours, start = run["eval_loss"], run["untrained_loss"]
        finite = ours is not None and math.isfinite(ours)
        found[run["mechanism"], run["learning_rate"], run["seed"]] = min(ours, start) if finite else start
    return found


def best_rate(losses: Losses, mechanism: str) -> float:
    return min(RATES, key=lambda rate: fmean(losses[mechanism, rate, seed] for seed in TWO))


def sensitivity(losses: Losses, mechanism: str) -> float:
    """Mean over rates of the loss above that of the best rate, mean over seeds (Wortsman et al., arXiv 2309.14322)."""
    best = best_rate(losses, mechanism)
    return fmean(losses[mechanism, rate, seed] - losses[mechanism, best, seed] for rate in RATES for seed in TWO)


def residual_deviation(losses: Losses) -> tuple[float, int]:
    """(standard deviation of one run after removing the means of its cell and seed, degrees of freedom)."""
    cells = [(mechanism, rate) for mechanism in E4_MECHANISMS for rate in RATES]
    differences = [losses[(*cell, TWO[1])] - losses[(*cell, TWO[0])] for cell in cells]
    mean, freedom = fmean(differences), len(cells) - 1
    return math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / freedom / 2), freedom


def half_width(losses: Losses) -> float:
    """Half of the 95 % interval of a difference of two sensitivities, with the best rates fixed."""
    deviation, freedom = residual_deviation(losses)
    share = 1 / len(RATES)
    weights = (len(RATES) - 1) * share**2 + (1 - share) ** 2  # squared weights of one mechanism's losses
    return t_quantile(freedom) * deviation * math.sqrt(2 * weights / len(TWO))


def half_width_of_a_gap(losses: Losses) -> float:
    """Half of the 95 % interval of the difference of two mechanisms at one rate."""
    deviation, freedom = residual_deviation(losses)
    return t_quantile(freedom) * deviation * math.sqrt(2 / len(TWO))


def tests(runs: Sequence[dict[str, Any]]) -> list[Verdict]:
    """H1 to H4 of the design."""
    losses = losses_of(runs)
    half, found = half_width(losses), []
    names = {"H1": "affine is less sensitive than softmax", "H2": "more than a gate", "H3": "β matters for it"}
    for number, other in (("H1", "softmax"), ("H2", "head_gated"), ("H3", "affine_no_bias")):
        gap = sensitivity(losses, "affine") - sensitivity(losses, other)
        verdict = CONFIRMED if gap + half < 0 else REFUTED if gap - half > 0 else "no evidence"
        statistic = f"sensitivity, affine − {other}: {signed(gap)} ± {half:.3f}"
        found.append(Verdict(f"{number}, {names[number]}", statistic, verdict))
    return [*found, calmer(runs)]


def calmer(runs: Sequence[dict[str, Any]]) -> Verdict:
    """H4: the sign of affine − softmax in the share of clipped steps, at both high rates and in both seeds."""
    shares = {(run["mechanism"], run["learning_rate"], run["seed"]): run["clipped_share"] for run in runs}
    gaps = []
    for rate in HIGH_RATES:
        for seed in TWO:
            ours, theirs = shares["affine", rate, seed], shares["softmax", rate, seed]
            gaps.append(math.nan if ours is None or theirs is None else ours - theirs)
    verdict = "undecided"
    if all(gap < 0 for gap in gaps):
        verdict = CONFIRMED
    elif all(gap > 0 for gap in gaps):
        verdict = REFUTED
    points = [signed(100 * gap, 0) for gap in gaps]
    pairs = [f"{'/'.join(points[2 * n : 2 * n + 2])} at {rate:g}" for n, rate in enumerate(HIGH_RATES)]
    return Verdict(
        "H4, calmer at high rates", f"clipped steps, affine − softmax in points: {', '.join(pairs)}", verdict
    )


def tables(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Verdicts, losses with sensitivities, gaps to softmax, clipped steps, and the noise as a sentence."""
    losses = losses_of(runs)
    rates = [f"{rate:g}" for rate in RATES]
    first = [f"| held-out loss at | {' | '.join(rates)} | sensitivity | highest rate within +{WITHIN:g} |"]
    first.append(f"|{'---|' * (len(rates) + 3)}")
    second = [f"| loss − softmax at | {' | '.join(rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    third = [f"| clipped steps after warm-up at | {' | '.join(rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    for mechanism in E4_MECHANISMS:
        means = {rate: fmean(losses[mechanism, rate, seed] for seed in TWO) for rate in RATES}
        usable = max(rate for rate, loss in means.items() if loss <= min(means.values()) + WITHIN)
        cells = [f"{loss:.3f}" for loss in means.values()] + [f"{sensitivity(losses, mechanism):.3f}", f"{usable:g}"]
        first.append(f"| {mechanism} | {' | '.join(cells)} |")
        if mechanism != "softmax":
            softmax = {rate: fmean(losses["softmax", rate, seed] for seed in TWO) for rate in RATES}
            second.append(f"| {mechanism} | {' | '.join(signed(means[rate] - softmax[rate]) for rate in RATES)} |")
        third.append(f"| {mechanism} | {' | '.join(_shares(runs, mechanism, rate) for rate in RATES)} |")
    deviation, freedom = residual_deviation(losses)
    diverged = [run for run in runs if run["eval_loss"] is None]
    noise = [
        f"Means over two seeds. One run's residual deviation is {deviation:.4f} nats with {freedom} degrees of "
        f"freedom; the 95 % interval of a gap at one rate is ± {half_width_of_a_gap(losses):.3f}. "
        f"Runs that became non-finite: {len(diverged)}."
    ]
    return [verdict_lines(tests(runs)), first, second, third, noise]


def run_table(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The runs that are there, if some are missing."""
    if not runs:
        return []
    lines = ["| mechanism | learning rate | seed | held-out loss | clipped steps |", "|---|---|---|---|---|"]
    for run in runs:
        loss = "non-finite" if run["eval_loss"] is None else f"{run['eval_loss']:.3f}"
        share = "–" if run["clipped_share"] is None else f"{100 * run['clipped_share']:.0f} %"
        lines.append(f"| {run['mechanism']} | {run['learning_rate']:g} | {run['seed']} | {loss} | {share} |")
    return [lines]


def _shares(runs: Sequence[dict[str, Any]], mechanism: str, rate: float) -> str:
    """`3/5 %`: both seeds."""
    found = [run["clipped_share"] for run in runs if (run["mechanism"], run["learning_rate"]) == (mechanism, rate)]
    return "/".join("–" if share is None else f"{100 * share:.0f}" for share in found) + " %"
