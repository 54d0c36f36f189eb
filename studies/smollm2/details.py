"""Prints the tables of docs/study.md that the report does not have, from the stored runs.

    python -m studies.smollm2.details

Means over the seeds of the 30M students; layers are counted from the first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pvariance, stdev
from typing import Any

from affine_attention.files import read_json
from affine_attention.lab.run import RunFolder

RUNS = Path(__file__).parent / "30m"
SEEDS = (0, 1, 2)
T_95 = 4.3027  # Student's t, two degrees of freedom
TRAINED = ("softmax", "affine", "affine_no_bias", "head_gated", "gated", "affine_gated")
WINDOWS = ((1, 50), (51, 100), (201, 300), (501, 700), (1151, 1200))
TEXTS = {"wikipedia2006": "Wikipedia", "openstax": "OpenStax", "elife": "eLife", "novels": "novels", "c4": "C4"}


def of_seeds(mechanism: str, read: Callable[[RunFolder], float]) -> float:
    """The mean over seeds of one number of a run."""
    return fmean(read(RunFolder(RUNS / f"{mechanism}-seed{seed}")) for seed in SEEDS)


def losses() -> list[str]:
    lines = [f"| mean loss of steps | {' | '.join(TRAINED)} |", f"|{'---|' * (len(TRAINED) + 1)}"]
    logs = {m: [[line["loss"] for line in RunFolder(RUNS / f"{m}-seed{s}").log()] for s in SEEDS] for m in TRAINED}
    for first, last in WINDOWS:
        cells = [f"{fmean(fmean(log[first - 1 : last]) for log in logs[mechanism]):.2f}" for mechanism in TRAINED]
        lines.append(f"| {first} to {last} | {' | '.join(cells)} |")
    return lines


def perplexities() -> list[str]:
    lines = [f"| | {' | '.join(TEXTS.values())} |", f"|{'---|' * (len(TEXTS) + 1)}"]
    for mechanism in ("softmax", "affine", "head_gated"):
        cells = [
            f"{of_seeds(mechanism, lambda run, t=text: read_json(run.evaluation_file)['perplexity'][t]['token']):.1f}"
            for text in TEXTS
        ]
        lines.append(f"| {mechanism} | {' | '.join(cells)} |")
    return lines


def by_layer(title: str, mechanisms: tuple[str, ...], *keys: str) -> list[str]:
    """A quantity of the inspection in every layer, the mean over its heads."""
    layers = 11
    lines = [f"| {title}, layer | {' | '.join(map(str, range(1, layers + 1)))} |", f"|{'---|' * (layers + 1)}"]
    for mechanism in mechanisms:
        cells = [f"{of_seeds(mechanism, lambda run, n=n: fmean(inside(run, keys)[n])):.2f}" for n in range(layers)]
        lines.append(f"| {mechanism} | {' | '.join(cells)} |")
    return lines


def inside(run: RunFolder, keys: tuple[str, ...]) -> Any:
    found = read_json(run.inspection_file)
    for key in keys:
        found = found[key]
    return found


def shares() -> list[str]:
    """Single numbers: means over layers and heads, in percent."""

    def mean(mechanism: str, *keys: str) -> float:
        return 100 * of_seeds(mechanism, lambda run: fmean(value for row in inside(run, keys) for value in row))

    first = ("first_token", "mean")
    heads = [value for s in SEEDS for row in inside(RunFolder(RUNS / f"softmax-seed{s}"), first) for value in row]
    return [
        f"- softmax, weight on the first token: {mean('softmax', *first):.1f} %, "
        f"{100 * max(heads):.0f} % in the strongest head of all seeds",
        f"- affine, α clipped at 0: {mean('affine', 'alpha', 'saturated_low'):.0f} %, at 1: "
        f"{mean('affine', 'alpha', 'saturated_high'):.0f} %; share of the weights' mass that is negative: "
        f"{mean('affine', 'entropy', 'negative_mass'):.1f} %",
    ]


def gradients() -> list[str]:
    """Variance and CV of the gradient norm over several ranges of steps; differences are paired by seed."""
    lines = ["| steps | measure | affine | softmax | affine − softmax |", "|---|---|---|---|---|"]
    norms = {m: [[line["grad_norm"] for line in RunFolder(RUNS / f"{m}-seed{s}").log()] for s in SEEDS]
             for m in ("affine", "softmax")}  # fmt: skip
    measures = {"variance": pvariance, "CV": lambda norm: pvariance(norm) ** 0.5 / fmean(norm)}
    for first, last in ((1, 500), (101, 500), (101, 1200)):
        for name, measure in measures.items():
            of = {m: [measure(norm[first - 1 : last]) for norm in norms[m]] for m in norms}
            differences = [a - b for a, b in zip(of["affine"], of["softmax"], strict=True)]
            half = T_95 * stdev(differences) / len(SEEDS) ** 0.5
            cells = [f"{first} to {last}", name, *(f"{fmean(of[m]):.3f}" for m in ("affine", "softmax"))]
            lines.append(f"| {' | '.join(cells)} | {fmean(differences):+.3f} ± {half:.3f} |".replace("| -", "| −"))
    return lines


def tables() -> list[list[str]]:
    return [
        losses(),
        gradients(),
        perplexities(),
        by_layer("mean α", ("affine", "head_gated"), "alpha", "mean"),
        by_layer("entropy of the softmax part, nats", ("softmax", "affine", "head_gated"), "entropy", "softmax"),
        shares(),
    ]


if __name__ == "__main__":
    print("\n\n".join("\n".join(table) for table in tables()))
