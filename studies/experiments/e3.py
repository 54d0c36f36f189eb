"""Runs E3 (e3.md): Bigram-Backcopy models of one and three layers for eight mechanisms and five seeds.

    python -m studies.experiments.e3 runs/e3               # 80 runs, about 50 minutes on one core; resumes
    python -m studies.experiments.e3 runs/e3 --layers 1    # in a second process: --layers 3

Each run is one JSON file in the folder. After the last one, `--store` collects them into the stored result:

    python -m studies.experiments.e3 runs/e3 --store
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from affine_attention.files import read_table, write_json, write_text
from affine_attention.lab.machine import describe_machine, now
from examples.bigram_backcopy.measure import attention_map, measure
from examples.bigram_backcopy.model import Setting, make_model, train
from examples.bigram_backcopy.task import Task, make_task

MECHANISMS = ("softmax", "off_by_one", "sink", "gated", "head_gated", "affine_no_bias", "affine", "affine_gated")
SEEDS = (0, 1, 2, 3, 4)
SETTINGS = {1: Setting(layers=1, steps=2000), 3: Setting(layers=3, steps=1500)}
EVALUATED, EVALUATION_SEED = 256, 7  # sequences that no run trains on
TRAINING_SEED = 1000  # + the seed of the run
MAPPED = 24  # tokens of the attention map of the first seed with one layer
CURVE = (0, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1250, 1500, 1750, 2000)  # steps with measures
RESULTS = Path(__file__).parent / "results"
DIGITS = 5


def run_one(task: Task, setting: Setting, mechanism: str, seed: int) -> dict[str, Any]:
    """Trains and measures one model."""
    evaluated = task.sample(EVALUATED, setting.length, EVALUATION_SEED)
    data = task.sample(setting.batch * setting.steps, setting.length, TRAINING_SEED + seed)
    model = make_model(task, setting, mechanism, seed)
    curve = [point(0, measure(model, task, evaluated))]

    def on_step(step: int, loss: float) -> None:
        if step in CURVE:
            curve.append(point(step, measure(model, task, evaluated)))

    begin = time.process_time()
    train(model, data, setting, on_step)
    found = {
        "mechanism": mechanism,
        "seed": seed,
        "setting": setting.to_dict(),
        "date": now(),
        "cpu_seconds": time.process_time() - begin,
        "curve": curve,
        "final": measure(model, task, evaluated),
    }
    if seed == SEEDS[0] and setting.layers == 1:
        found["map"] = attention_map(model, evaluated[:1, : min(MAPPED, setting.length)])
    return found


def point(step: int, found: dict[str, Any]) -> dict[str, float]:
    """The measures of one step that the curves show."""
    return {
        "step": step,
        "first_softmax": max(layer["first_softmax_bigram"] for layer in found["layers"]),
        "first_weight": max(layer["first_weight_bigram"] for layer in found["layers"]),
        "value_norm": strongest(found)["value_norm_first"],
        "loss_bigram_excess": found["loss_bigram_excess"],
        "loss_backcopy": found["loss_backcopy"],
    }


def strongest(found: dict[str, Any]) -> dict[str, Any]:
    """The layer whose softmax part puts the largest share on the first token at bigram queries."""
    return max(found["layers"], key=lambda layer: layer["first_softmax_bigram"])


def rounded(value: Any) -> Any:
    """The value with floats rounded to five digits, to keep the stored file small."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def run_grid(out: Path, layers: list[int], settings: dict[int, Setting] = SETTINGS, **grid: Any) -> None:
    """Runs what is missing in the folder; `grid` may name fewer mechanisms and seeds."""
    task = make_task()
    for depth in layers:
        for seed in grid.get("seeds", SEEDS):
            for mechanism in grid.get("mechanisms", MECHANISMS):
                file = out / f"layers{depth}-{mechanism}-seed{seed}.json"
                if file.exists():
                    continue
                found = run_one(task, settings[depth], mechanism, seed)
                write_json(file, rounded(found))
                print(f"{file.stem}: {found['cpu_seconds']:.0f} s", flush=True)


def store(out: Path, results: Path = RESULTS) -> Path:
    """Collects all runs of the folder into one dated file, one line per run."""
    runs = [read_table(file) for file in sorted(out.glob("layers*.json"))]
    expected = len(SETTINGS) * len(MECHANISMS) * len(SEEDS)
    if len(runs) != expected:
        raise ValueError(f"{out} must hold {expected} runs, got {len(runs)}; run the grid first")
    machine = describe_machine("cpu")
    lines = [json.dumps(run, separators=(",", ":")) for run in runs]
    head = json.dumps({"experiment": "E3", "machine": machine, "characters": make_task().characters})
    path = results / f"e3_cpu_{machine['date'][:10]}.jsonl"
    write_text(path, "\n".join([head, *lines]) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--store", action="store_true", help="collect the runs instead")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more, and the result does not depend on the machine's cores
    if given.store:
        print(f"written to {store(given.out)}")
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        run_grid(given.out, given.layers)


if __name__ == "__main__":
    main()
