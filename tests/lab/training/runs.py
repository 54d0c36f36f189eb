"""Helpers for tests of `train`: text, a recipe that trains in a second, and a bitwise comparison of two runs."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from affine_attention.files import read_json
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.steplog import TIMING
from affine_attention.lab.training.train import train

STUDENT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320,
}  # fmt: skip


def write_text(path: Path, documents: int = 120, seed: int = 0) -> Path:
    """Documents of made-up words with different frequencies, the same on every machine."""
    numbers = random.Random(seed)
    words = ["".join(numbers.choices("abcdefghiklmnoprstuvw", k=numbers.randint(2, 7))) for _ in range(200)]
    text = (" ".join(numbers.choices(words, [1 / (n + 1) for n in range(200)], k=numbers.randint(20, 90)))
            for _ in range(documents))  # fmt: skip
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return path


def tiny_recipe(text: Path, mechanism: str = "affine", **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "name": "tiny", "mechanism": mechanism, "student_changes": STUDENT, "data": (str(text),), "heldout": 0.1,
        "vocabulary_size": 320, "sequence_length": 32, "document_boundaries": True, "steps": 6, "global_batch": 8,
        "device_batch": 4, "learning_rate": 1e-2, "warmup_steps": 2, "decay_steps": 2, "save_every": 2,
        "probe_every": 2, "eval_every": 3,
    }  # fmt: skip
    recipe = Recipe(**(settings | changes))
    return recipe.with_settings({"mechanism.bias_length": recipe.sequence_length}) if recipe.mechanism.bias else recipe


def log_without_timing(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMING} for line in RunFolder(run).log()]


def differences(run: Path, other: Path) -> list[str]:
    """What is not bitwise equal in two finished runs: logs (except for timing), last checkpoints, models."""
    found = []
    lines, others = log_without_timing(run), log_without_timing(other)
    if lines != others:
        at = next(
            (n for n, (a, b) in enumerate(zip(lines, others, strict=False)) if a != b), min(len(lines), len(others))
        )
        found.append(f"log.jsonl differs from line {at + 1} on ({len(lines)} and {len(others)} lines)")
    last = f"checkpoints/step-{len(others):08d}"
    for name in (f"{last}/model.safetensors", f"{last}/optimizer.safetensors", "model/model.safetensors"):
        if not (run / name).is_file() or (run / name).read_bytes() != (other / name).read_bytes():
            found.append(f"{name} differs")
    states = [read_json(folder / last / "training.json") | {"seconds": 0} for folder in (run, other)]
    if states[0] != states[1]:
        found.append(f"{last}/training.json differs")
    return found


class Place:
    """Text, its tokens and finished runs, shared by the tests of `train`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, write_text(folder / "text.txt")
        self.made: dict[str, Path] = {}

    def recipe(self, mechanism="affine", **changes):
        return tiny_recipe(self.text, mechanism, **changes)

    def train(self, run, recipe, **options):
        return train(recipe, run, device="cpu", cache=self.folder / "cache", **options)

    def run(self, mechanism="affine", **changes) -> Path:
        """A finished run with these settings, which tests must not change."""
        key = json.dumps([mechanism, changes])
        if key not in self.made:
            path = self.folder / f"made-{len(self.made)}"
            self.made[key] = self.train(path, self.recipe(mechanism, **changes))
        return self.made[key]

    def teacher(self) -> Path:
        """A finished run that can be used as a teacher."""
        return self.run("softmax")


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(run).log()]


def stop_after(run: Path, steps: int, number: int, session: int = 1) -> threading.Thread:
    """Sends a signal to this process when session number `session` of a run has made `steps` steps."""

    def watch():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            started = sum(event["event"] in ("start", "resume") for event in RunFolder(run).events())
            if started == session and len(RunFolder(run).log()) >= steps:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread
