"""Writes run folders like the stages of the lab do, with made-up numbers, for the report to read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from affine_attention.files import plain_numbers, write_json
from affine_attention.lab.recipe import Recipe
from affine_attention.nn import Mechanism

WORDS = [
    "The",
    " quick",
    " brown",
    " fox",
    " jumps",
    " over",
    " the",
    " lazy",
    " dog",
    ",",
    " then",
    " rests",
    ".",
    "\n",
]
EDGES = np.arange(-0.01, 1.02, 0.02)
LOSS = {"softmax": 0.0, "sink": -0.005, "affine": -0.03, "gated": -0.04, "affine_gated": -0.06}
TASKS = ("winogrande", "piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq", "lambada_openai")


def make_run(
    folder: Path,
    mechanism: str | Mechanism = "affine",
    seed: int = 0,
    *,
    steps: int = 120,
    planned: int | None = None,
    layers: int = 4,
    heads: int = 6,
    map_length: int = 32,
    tokens: list[str] | None = None,
    finished: bool = True,
    evaluated: bool = True,
    inspected: bool = True,
    **settings: Any,
) -> Path:
    """A run folder with every file of the contract; settings go to the recipe."""
    mechanism = mechanism if isinstance(mechanism, Mechanism) else Mechanism.named(mechanism, bias_length=256)
    settings = {"name": "tiny_cpu", "warmup_steps": 10, **settings}
    recipe = Recipe(mechanism=mechanism, seed=seed, data_seed=seed, steps=planned or max(steps, 10), **settings)
    random = np.random.default_rng([seed, sum(map(ord, mechanism.name))])
    write_json(folder / "recipe.json", recipe.to_dict())
    write_json(folder / "manifest.json", make_manifest(mechanism))
    lines = [make_step(step, recipe, mechanism, random, layers, heads) for step in range(1, steps + 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(plain_numbers(line)) + "\n" for line in lines))
    events = [{"time": "2026-11-15T06:00:00+00:00", "event": "start"}]
    if finished:
        events.append({"time": "2026-11-15T06:05:00+00:00", "event": "finish"})
        write_json(folder / "model" / "config.json", {})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if evaluated:
        write_json(folder / "evaluation.json", make_evaluation(mechanism, random))
    if inspected:
        tokens = tokens if tokens is not None else [WORDS[k % len(WORDS)] for k in range(map_length)]
        maps = make_maps(mechanism, random, layers, heads, map_length)
        write_json(folder / "inspection.json", make_inspection(mechanism, random, layers, heads, tokens))
        (folder / "inspection").mkdir(exist_ok=True)
        save_file({f"layer.{k}": weights for k, weights in maps.items()}, folder / "inspection" / "maps.safetensors")
    return folder


def make_manifest(mechanism: Mechanism) -> dict[str, Any]:
    return {
        "date": "2026-11-15T06:00:00+00:00",
        "device": "cpu, x86_64, 2 cores",
        "python": "3.11.2",
        "versions": {"affine_attention": "0.3.0", "torch": "2.13.0", "transformers": "5.17.0"},
        "commit": "abc1234",
        "command": "__main__.py train --recipe tiny_cpu",
        "data": {"fingerprint": "9e107d9d372bb6826bd81d3542a419d6"},
        "attention": {"implementation": "composed", "why": "the tensors are on the CPU"},
        "parameters": 1_000_000 + 3 * mechanism.extra_parameters(128, 8, 16),
    }


def make_step(step: int, recipe: Recipe, mechanism: Mechanism, random: Any, layers: int, heads: int) -> dict[str, Any]:
    loss = 2.5 + 4 * math.exp(-step / 25) + LOSS.get(mechanism.name, 0.0) + 0.02 * random.standard_normal()
    line: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "kd_loss": loss,
        "ce_loss": loss + 0.6,
        "grad_norm": 0.5 + 3 * math.exp(-step / 20) + 0.05 * abs(random.standard_normal()) + 2.0 * (step % 37 == 0),
        "learning_rate": recipe.learning_rate * min(1, step / 10),
        "tokens": step * recipe.tokens_per_step,
        "tokens_per_second": 5e4 + 1e3 * random.standard_normal(),
        "mfu": None,
        "seconds": step * 0.08,
    }
    if step % 10 == 0 or step == 1:
        line["mean_logit"] = (-(step / 100) + 0.2 * random.standard_normal((layers, heads))).tolist()
        line["saturated"] = [0.001 * step] * layers if mechanism.has_alpha else None
        line["gate_saturated"] = [0.002 * step] * layers if mechanism.gate else None
        line["running_alpha"] = (0.5 - 0.5 * 0.9**step + np.zeros((layers, heads))).tolist() if mechanism.bias else None
    if step % 40 == 0:
        line["eval_loss"] = loss + 0.05
    return line


def make_evaluation(mechanism: Mechanism, random: Any) -> dict[str, Any]:
    nll = 3.1 + LOSS.get(mechanism.name, 0.0) + 0.005 * random.standard_normal()
    sizes = {"tokens": 50_000, "words": 40_000, "bytes": 210_000, "documents": 120}
    per = {form: math.exp(nll * 50_000 / sizes[f"{form}s"]) for form in ("token", "word", "byte")}
    text = {**per, "bits_per_byte": nll * 50 / 210 / math.log(2), **sizes, "stderr": 0.011, "protocol": {"length": 256}}
    tasks = {}
    for index, name in enumerate(TASKS):
        value = 0.3 + 0.05 * index - LOSS.get(mechanism.name, 0.0) / 2 + 0.004 * random.standard_normal()
        tasks[name] = {"metric": "acc", "value": value, "stderr": 0.012, "n": 1000, "metrics": {"acc": value}}
    return {"schema": 1, "made": {"date": "2026-11-15"}, "perplexity": {"c4": text}, "tasks": tasks}


def make_inspection(mechanism: Mechanism, random: Any, layers: int, heads: int, tokens: list[str]) -> dict[str, Any]:
    def grid(centre: float, spread: float) -> list[list[float]]:
        return (centre + spread * random.standard_normal((layers, heads))).tolist()

    free = mechanism.has_alpha or mechanism.sink is not None
    sums = np.clip(random.normal(0.6, 0.15, (layers, heads, 400)), 0, 1) if free else np.ones((layers, heads, 400))
    counts = [[np.histogram(sums[x, y], EDGES)[0].tolist() for y in range(heads)] for x in range(layers)]
    averaged = sums.mean(axis=1)
    over_heads = {
        "mean": averaged.mean(axis=1).tolist(),
        "std": averaged.std(axis=1).tolist(),
        "median": np.median(averaged, axis=1).tolist(),
        "counts": [np.histogram(averaged[x], EDGES)[0].tolist() for x in range(layers)],
    }
    histogram = {"edges": EDGES.tolist(), "counts": counts}
    total = sums.mean(axis=2).tolist()
    alpha = {"mean": grid(0.5, 0.1), "std": grid(0.2, 0.02), "histogram": histogram}
    return {
        "schema": 1,
        "made": {"date": "2026-11-15"},
        "mechanism": mechanism.to_dict(),
        "sequences": 10,
        "length": 1024,
        "layers": layers,
        "heads": heads,
        "text": {"source": "held-out", "fingerprint": "0f"},
        "missing": [],
        "row_sum": {"mean": total, "std": sums.std(axis=2).tolist(), "histogram": histogram, "over_heads": over_heads},
        "first_token": {"mean": grid(0.15 if free else 0.45, 0.04)},
        "total_weight": {"mean": total, "std": sums.std(axis=2).tolist()},
        "entropy": {"softmax": grid(3.2, 0.2), "weights": grid(3.5, 0.2), "negative_mass": grid(0.02, 0.001)},
        "alpha": alpha if mechanism.has_alpha else None,
        "running_alpha": grid(0.5, 0.05) if mechanism.bias else None,
        "mean_logit": grid(-1.0, 0.4),
        "gate": {"mean": [0.4] * layers, "saturated": [0.1] * layers} if mechanism.gate else None,
        "maps": {"tokens": tokens, "length": len(tokens), "layers": list(range(layers))},
    }


def make_maps(mechanism: Mechanism, random: Any, layers: int, heads: int, length: int) -> dict[int, np.ndarray]:
    """Signed weights alpha p + beta, with a strong first token for softmax."""
    found = {}
    visible = np.tril(np.ones((length, length)))
    for layer in range(layers):
        scores = random.standard_normal((heads, length, length)) + 1.5 * np.eye(length)
        scores[:, :, :1] += 0.5 if mechanism.has_alpha else 3.0
        powers = np.exp(scores) * visible
        weights = powers / powers.sum(axis=-1, keepdims=True)
        if mechanism.has_alpha:
            alpha = random.uniform(0.3, 1.0, (heads, length, 1))
            beta = (0.6 - alpha) / 256 if mechanism.bias else 0.0
            weights = (alpha * weights + beta) * visible
        found[layer] = weights.astype(np.float16)
    return found
