"""Runs the CPU version of E4 (e4.md): 1M-parameter students at five learning rates, five mechanisms, two seeds.

    python -m studies.experiments.e4_cpu runs/e4_cpu             # 50 runs, about 12 minutes on one core; resumes
    python -m studies.experiments.e4_cpu runs/e4_cpu --store     # collects them into the stored result
    python -m studies.experiments.e4_cpu --report                # prints the tables of docs/experiments.md

The GPU version with 30M parameters is `python -m studies.experiments.run e4`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from affine_attention.files import read_lines, write_text
from affine_attention.lab.machine import describe_machine
from affine_attention.lab.report.statistics import t_quantile
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training import train
from affine_attention.lab.training.nonfinite import NotFiniteError
from affine_attention.recipes import recipe

from .e3 import RESULTS, rounded
from .plans import E4_MECHANISMS, RATES

SEEDS = (0, 1)
SETTINGS = {
    "teacher": None, "steps": 120, "warmup_steps": 12, "decay_steps": 24, "save_every": 0, "keep_checkpoints": 1,
    "probe_every": 0,
}  # fmt: skip
CLIPPED = 1.0  # the clipping norm of the recipe
WITHIN = 0.1  # nats: a rate whose loss is within this of the best is usable
Losses = Mapping[tuple[str, float, int], float]  # (mechanism, rate, seed) -> held-out loss


def name_of(mechanism: str, rate: float, seed: int) -> str:
    return f"{mechanism}_learning_rate={rate}-seed{seed}"


def run_grid(out: Path, settings: Mapping[str, Any] = SETTINGS) -> None:
    """Trains what is missing; a run that becomes non-finite stays as it is and counts as diverged."""
    for seed in SEEDS:
        for rate in RATES:
            for mechanism in E4_MECHANISMS:
                run = RunFolder(out / name_of(mechanism, rate, seed))
                if run.finished or any(event["event"] == "stop" for event in run.events()):
                    continue
                own = {"learning_rate": rate, "seed": seed, "data_seed": seed}
                try:
                    train(recipe("tiny_cpu", mechanism, {**settings, **own}), run.path, quiet=True, device="cpu")
                except NotFiniteError as error:
                    print(f"{run.path.name}: {error}", flush=True)
                print(run.path.name, flush=True)


def summary(run: RunFolder) -> dict[str, Any]:
    """The numbers of one run; a diverged run has the loss of the untrained model."""
    log, warmup = run.log(), run.recipe().warmup_steps
    norms = [line["grad_norm"] for line in log[warmup:]]
    return {
        "untrained_loss": log[0]["loss"],
        "eval_loss": log[-1].get("eval_loss"),
        "clipped_share": fmean(norm > CLIPPED for norm in norms) if norms else None,
        "grad_norm_std": pstdev(norms) if norms else None,
    }


def store(out: Path, results: Path = RESULTS) -> Path:
    lines = []
    for seed in SEEDS:
        for rate in RATES:
            for mechanism in E4_MECHANISMS:
                run = RunFolder(out / name_of(mechanism, rate, seed))
                if not run.exists:
                    raise ValueError(f"{run.path} is missing; run the grid first")
                lines.append({"mechanism": mechanism, "learning_rate": rate, "seed": seed, **summary(run)})
    machine = describe_machine("cpu")
    path = results / f"e4_cpu_{machine['date'][:10]}.jsonl"
    head = {"experiment": "E4, CPU version", "machine": machine, "settings": SETTINGS}
    write_text(path, "".join(json.dumps(rounded(line)) + "\n" for line in (head, *lines)))
    return path


def losses_of(runs: list[dict[str, Any]]) -> dict[tuple[str, float, int], float]:
    """min(held-out loss, loss of the untrained model) of every run."""
    found = {}
    for run in runs:
        ours, start = run["eval_loss"], run["untrained_loss"]
        finite = ours is not None and math.isfinite(ours)
        found[run["mechanism"], run["learning_rate"], run["seed"]] = min(ours, start) if finite else start
    return found


def best_rate(losses: Losses, mechanism: str) -> float:
    return min(RATES, key=lambda rate: fmean(losses[mechanism, rate, seed] for seed in SEEDS))


def sensitivity(losses: Losses, mechanism: str) -> float:
    """Mean over rates of the loss above that of the best rate, mean over seeds (Wortsman et al., arXiv 2309.14322)."""
    best = best_rate(losses, mechanism)
    return fmean(losses[mechanism, rate, seed] - losses[mechanism, best, seed] for rate in RATES for seed in SEEDS)


def residual_deviation(losses: Losses) -> tuple[float, int]:
    """(standard deviation of one run after removing the means of its cell and seed, degrees of freedom)."""
    cells = [(mechanism, rate) for mechanism in E4_MECHANISMS for rate in RATES]
    differences = [losses[(*cell, SEEDS[1])] - losses[(*cell, SEEDS[0])] for cell in cells]
    mean, freedom = fmean(differences), len(cells) - 1
    return math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / freedom / 2), freedom


def half_width(losses: Losses) -> float:
    """Half of the 95 % interval of a difference of two sensitivities, with the best rates fixed."""
    deviation, freedom = residual_deviation(losses)
    share = 1 / len(RATES)
    weights = (len(RATES) - 1) * share**2 + (1 - share) ** 2  # squared weights of one mechanism's losses
    return t_quantile(freedom) * deviation * math.sqrt(2 * weights / len(SEEDS))


def tables(runs: list[dict[str, Any]]) -> list[list[str]]:
    losses, half = losses_of(runs), 0.0
    half = half_width(losses)
    rates = [f"{rate:g}" for rate in RATES]
    first = [f"| held-out loss at | {' | '.join(rates)} | sensitivity | highest rate within +{WITHIN:g} |"]
    first.append(f"|{'---|' * (len(rates) + 3)}")
    second = [f"| clipped steps after warm-up at | {' | '.join(rates)} |", f"|{'---|' * (len(rates) + 1)}"]
    for mechanism in E4_MECHANISMS:
        means = {rate: fmean(losses[mechanism, rate, seed] for seed in SEEDS) for rate in RATES}
        usable = max(rate for rate, loss in means.items() if loss <= min(means.values()) + WITHIN)
        cells = [f"{loss:.3f}" for loss in means.values()] + [f"{sensitivity(losses, mechanism):.3f}", f"{usable:g}"]
        first.append(f"| {mechanism} | {' | '.join(cells)} |")
        shares = [
            "/".join(f"{100 * run['clipped_share']:.0f}" for run in runs
                     if (run["mechanism"], run["learning_rate"]) == (mechanism, rate)) + " %"
            for rate in RATES
        ]  # fmt: skip
        second.append(f"| {mechanism} | {' | '.join(shares)} |")
    third = ["| sensitivity | difference | verdict |", "|---|---|---|"]
    for number, other in (("H1", "softmax"), ("H2", "head_gated"), ("H3", "affine_no_bias")):
        gap = sensitivity(losses, "affine") - sensitivity(losses, other)
        verdict = "confirmed" if gap + half < 0 else "refuted" if gap - half > 0 else "no evidence"
        shown = f"{gap:+.3f} ± {half:.3f}".replace("-", "−")
        third.append(f"| {number}: affine − {other} | {shown} | **{verdict}** |")
    return [first, second, third]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        _, *runs = read_lines(max(RESULTS.glob("e4_cpu_*.jsonl")))
        print("\n\n".join("\n".join(table) for table in tables(runs)))
        return
    if given.out is None:
        parser.error("OUT is needed unless --report is given")
    if given.store:
        print(f"written to {store(given.out)}")
        return
    torch.set_num_threads(1)
    run_grid(given.out)


if __name__ == "__main__":
    main()
