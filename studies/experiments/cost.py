"""Estimates the GPU minutes of E1, E2, E4 and E5 from the stored runs of the study and measured speeds.

python -m studies.experiments.cost        # prints the table of README.md
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from statistics import fmean

from affine_attention.lab.recipe import Recipe
from affine_attention.lab.report.collect import Run, load_run

from .design_runs import ALL_SEEDS, design, split_name
from .e1_report import STORED
from .plans import E5_LONG

AT_ONCE = 8  # students on one GPU in E1 and E4, as in the study
# Tokens per second with the teacher's forward, softmax, compiled layers, one H200 (benchmarks/results).
SPEED_30M = 481_248  # train-study: the student of the study, 64 x 1,024 tokens
SPEED_100M = 401_454  # train-compiled: llama-100m with a teacher of its size
SPEED_135M = SPEED_100M * 100 / 135  # no measurement: scaled by the names of the models
PLANNED = {"e1": 14, "e2": 50, "e4": 15, "e5": 75}  # minutes for all seeds, from the designs


def measured(stored: Path = STORED) -> tuple[float, float]:
    """(training, evaluation and inspection) of a run of the study in seconds, eight at a time; means."""
    runs = [load_run(path) for path in sorted(stored.iterdir()) if path.is_dir()]
    times = [_times(run) for run in runs if run.finished and run.evaluation and run.inspection]
    return fmean(end - start for start, end, _ in times), fmean(last - end for _, end, last in times)


def minutes(experiment: str) -> float:
    """The estimate for all seeds of a design, without starting a machine and packing."""
    training, after = measured()
    recipes = design(experiment)
    if experiment == "e2":
        return sum(recipe.tokens / SPEED_135M + after for recipe in recipes.values()) / 60
    if experiment == "e5":
        return sum(_trained_tokens(name, recipe) / SPEED_30M + after for name, recipe in recipes.items()) / 60
    stored_steps = 1200
    return sum(training * recipe.steps / stored_steps + after for recipe in recipes.values()) / AT_ONCE / 60


def _trained_tokens(name: str, recipe: Recipe) -> int:
    """Tokens that a run of E5 trains on: a branch continues a long run and trains only its decay."""
    is_long = recipe.steps == E5_LONG["steps"]
    return recipe.tokens if is_long else recipe.tokens * recipe.decay_steps // recipe.steps


def _times(run: Run) -> tuple[float, float, float]:
    """(start, end of training, end of the inspection) in seconds since 1970."""
    found = {event["event"]: event["time"] for event in run.events if event.get("event") in ("start", "finish")}
    dates = (found["start"], found["finish"], run.inspection["made"]["date"])
    start, end, last = (datetime.fromisoformat(date).timestamp() for date in dates)
    return start, end, last


def table() -> list[str]:
    lines = ["| | runs | seeds | GPU minutes, planned | estimated |", "|---|---|---|---|---|"]
    for experiment, planned in PLANNED.items():
        runs = design(experiment)
        assert {split_name(name)[1] for name in runs} == set(ALL_SEEDS[experiment])
        seeds = len(ALL_SEEDS[experiment])
        lines.append(f"| {experiment.upper()} | {len(runs)} | {seeds} | {planned} | {minutes(experiment):.0f} |")
    return lines


def main() -> None:
    training, after = measured()
    print(f"A run of the study: {training:.0f} s of training, {after:.0f} s of evaluation, {AT_ONCE} at a time.\n")
    print("\n".join(table()))


if __name__ == "__main__":
    main()
