"""Prints the tests and tables of E3 and draws its figure, from the stored result.

python -m studies.experiments.e3_report        # the tables are in docs/experiments.md, the figure in docs/images
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from affine_attention.files import read_lines
from affine_attention.lab.report.statistics import t_quantile

from .e3 import MECHANISMS, RESULTS, SEEDS, strongest

FAMILY = 0.05 / 4  # error rate of each of the four tests of a depth, so that all hold together with 95 %
Runs = dict[tuple[int, str, int], dict[str, Any]]  # (layers, mechanism, seed) -> run
Measure = Callable[[dict[str, Any]], float]


def load(path: Path | None = None) -> tuple[dict[str, Any], Runs]:
    """(machine and characters, runs) of a stored result; the newest by default."""
    head, *runs = read_lines(path or max(RESULTS.glob("e3_cpu_*.jsonl")))
    return head, {(run["setting"]["layers"], run["mechanism"], run["seed"]): run for run in runs}


def first_softmax(run: dict[str, Any]) -> float:
    return strongest(run["final"])["first_softmax_bigram"]


def first_weight(run: dict[str, Any]) -> float:
    return max(layer["first_weight_bigram"] for layer in run["final"]["layers"])


def value_norm(run: dict[str, Any]) -> float:
    return strongest(run["final"])["value_norm_first"]


def loss(run: dict[str, Any]) -> float:
    return run["final"]["loss_excess"]


def eviction(run: dict[str, Any]) -> float:
    return run["final"]["loss_bigram_excess_evicted"] - run["final"]["loss_bigram_excess"]


def scale(run: dict[str, Any], queries: str) -> float:
    """alpha, or the mean of the gate, at bigram queries or triggers in the layer of the largest share; 1 without."""
    layer = strongest(run["final"])
    return layer.get(f"alpha_{queries}", 1.0) * layer.get(f"gate_{queries}", 1.0)


def hidden_norm(run: dict[str, Any]) -> float:
    return max(layer["hidden_norm_first"] for layer in run["final"]["layers"])


def largest_activation(run: dict[str, Any]) -> float:
    return max(layer["largest_activation"] for layer in run["final"]["layers"])


def mean_and_half(values: Sequence[float], error: float = 0.05) -> tuple[float, float]:
    """The mean, and half of Student's interval."""
    mean = fmean(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, t_quantile(len(values) - 1, 1 - error) * spread / math.sqrt(len(values))


def of_seeds(runs: Runs, layers: int, mechanism: str, measure: Measure) -> list[float]:
    return [measure(runs[layers, mechanism, seed]) for seed in SEEDS]


def paired(runs: Runs, layers: int, ours: str, baseline: str, measure: Measure, error: float) -> tuple[float, float]:
    """ours − baseline, paired by seed: the mean and half of its interval."""
    both = zip(of_seeds(runs, layers, ours, measure), of_seeds(runs, layers, baseline, measure), strict=True)
    return mean_and_half([a - b for a, b in both], error)


def verdicts(runs: Runs, layers: int) -> list[tuple[str, str, str]]:
    """(test, numbers, verdict) for P0 to P4, by the rules of e3.md."""
    softmax = of_seeds(runs, layers, "softmax", first_softmax)
    norm = fmean(of_seeds(runs, layers, "softmax", value_norm))
    valid = min(softmax) > 0.3 and (norm < 0.5 or layers > 1)
    found = [
        (
            "P0, softmax forms a sink",
            f"F_p {min(softmax):.2f} to {max(softmax):.2f} over seeds, value norm {norm:.2f}",
            "**holds**" if valid else "**failed**",
        )
    ]
    mean, half = paired(runs, layers, "affine", "softmax", first_softmax, FAMILY)
    ours, theirs = fmean(of_seeds(runs, layers, "affine", first_softmax)), fmean(softmax)
    verdict = (
        "**refuted**" if mean + half >= 0 else "**supported**" if ours < theirs / 2 else "**reduces it, not by half**"
    )
    numbers = f"F_p {ours:.2f} against {theirs:.2f}, {signed(mean, half, 2)}"
    found.append(("P1, affine scaling removes the sink", numbers, verdict))
    mean, half = paired(runs, layers, "affine", "head_gated", first_softmax, FAMILY)
    verdict = "**supported**" if mean + half < 0 else "**refuted**" if mean - half > 0 else "**no evidence**"
    other = fmean(of_seeds(runs, layers, "head_gated", first_softmax))
    found.append(("P2, the affine part does it", f"head_gated {other:.2f}, {signed(mean, half, 2)}", verdict))
    mean, half = paired(runs, layers, "affine", "softmax", value_norm, FAMILY)
    verdict = "**supported**" if mean - half > 0 else "**refuted**" if mean + half < 0 else "**undecided**"
    found.append(("P3, no value drain", f"value norm {signed(mean, half, 2)}", verdict))
    mean, half = paired(runs, layers, "affine", "softmax", loss, FAMILY)
    verdict = "**supported**" if mean + half < 0.01 else "**refuted**" if mean - half > 0.01 else "**undecided**"
    found.append(("P4, at no price", f"loss {signed(mean, half, 4)}", verdict))
    return found


def signed(mean: float, half: float, digits: int) -> str:
    return f"{mean:+.{digits}f} ± {half:.{digits}f}".replace("-", "−")


def shown(values: Sequence[float], digits: int = 2) -> str:
    mean, half = mean_and_half(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}".replace("-", "−")


def verdict_table(runs: Runs) -> list[str]:
    lines = ["| | one layer | | three layers | |", "|---|---|---|---|---|"]
    for (test, *one), (_, *three) in zip(verdicts(runs, 1), verdicts(runs, 3), strict=True):
        lines.append(f"| {test} | {' | '.join(one)} | {' | '.join(three)} |")
    return lines


def mechanism_table(runs: Runs, layers: int) -> list[str]:
    """Means and 95 % intervals over seeds for every mechanism."""
    columns = (
        "F_p",
        "F_w",
        "value norm of `<s>`",
        "eviction",
        "scale: bigram → trigger",
        "excess loss: bigram",
        "backcopy",
    )
    lines = [f"| mechanism | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for mechanism in MECHANISMS:

        def of(measure: Measure, mechanism: str = mechanism) -> list[float]:
            return of_seeds(runs, layers, mechanism, measure)

        low, high = fmean(of(lambda run: scale(run, "bigram"))), fmean(of(lambda run: scale(run, "backcopy")))
        cells = [
            shown(of(first_softmax)), shown(of(first_weight), 3), shown(of(value_norm)), shown(of(eviction), 3),
            "–" if low == high == 1 else f"{low:.2f} → {high:.2f}",
            shown(of(lambda run: run["final"]["loss_bigram_excess"]), 4),
            shown(of(lambda run: run["final"]["loss_backcopy"]), 4),
        ]  # fmt: skip
        lines.append(f"| {mechanism} | {' | '.join(cells)} |")
    return lines


def activation_table(runs: Runs) -> list[str]:
    """Sink rate and residual stream of the models with three layers, as differences to softmax."""
    lines = [
        "| three layers | sink rate: softmax part | sink rate: weights | largest activation | hidden norm of `<s>` |",
        "|---|---|---|---|---|",
    ]
    for mechanism in MECHANISMS:
        cells = [
            shown(of_seeds(runs, 3, mechanism, lambda run: run["final"]["sink_rate_softmax_part"])),
            shown(of_seeds(runs, 3, mechanism, lambda run: run["final"]["sink_rate"])),
            shown(of_seeds(runs, 3, mechanism, largest_activation), 1),
            shown(of_seeds(runs, 3, mechanism, hidden_norm)),
        ]
        lines.append(f"| {mechanism} | {' | '.join(cells)} |")
    return lines


def tables(runs: Runs) -> list[list[str]]:
    return [verdict_table(runs), mechanism_table(runs, 1), mechanism_table(runs, 3), activation_table(runs)]


def main() -> None:
    from .e3_figure import write_figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", help="a stored result; default: the newest")
    head, runs = load(parser.parse_args().result)
    print("\n\n".join("\n".join(table) for table in tables(runs)))
    seconds = sum(run["cpu_seconds"] for run in runs.values())
    print(f"\n{len(runs)} runs, {seconds / 60:.0f} core-minutes, {head['machine']['device']}")
    print(f"written to {write_figure(head, runs)}")


if __name__ == "__main__":
    main()
