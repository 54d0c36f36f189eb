"""Changes files of a checkpoint and recomputes the hashes of its manifest, as an attacker would."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def reseal(checkpoint: Path) -> None:
    """Gives the manifest the hashes and sizes of the files as they are."""
    file = checkpoint / "MANIFEST.json"
    manifest = json.loads(file.read_text())
    manifest["files"] = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in sorted(checkpoint.iterdir())
        if path != file
    }
    file.write_text(json.dumps(manifest))


def change_tensors(checkpoint: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {key: tensor.clone() for key, tensor in load_file(checkpoint / name).items()}
    change(tensors)
    save_file(tensors, checkpoint / name)
    reseal(checkpoint)


def change_json(checkpoint: Path, name: str, change: Callable[[Any], Any]) -> None:
    """`change` edits the value, or returns another."""
    value = json.loads((checkpoint / name).read_text())
    other = change(value)
    (checkpoint / name).write_text(json.dumps(value if other is None else other))
    reseal(checkpoint)


def shrink_moments(tensors: dict[str, torch.Tensor]) -> None:
    for key in tensors:
        if key.startswith("exp_avg"):
            tensors[key] = torch.zeros(1)


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    """Sets one value inside nested objects and lists."""

    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


# (file, change, words of the refusal)
TENSORS = {
    "moments of one number": ("optimizer.safetensors", shrink_moments, "must be F32 ["),
    "a moment in half precision": (
        "optimizer.safetensors",
        lambda t: t.update({"exp_avg/model.norm.weight": t["exp_avg/model.norm.weight"].half()}),
        "must be F32 [32], got F16 [32]",
    ),
    "a step that is a matrix": (
        "optimizer.safetensors", lambda t: t.update({"step/model.norm.weight": torch.zeros(3, 3)}), "must be F32 []",
    ),
    "a state that AdamW lacks": (
        "optimizer.safetensors", lambda t: t.update({"max/model.norm.weight": torch.zeros(32)}), "holds max/",
    ),
    "a state too few": (
        "optimizer.safetensors", lambda t: t.pop("exp_avg_sq/model.norm.weight"), "lacks exp_avg_sq/model.norm.weight",
    ),
    "a step that is no number": (
        "optimizer.safetensors",
        lambda t: t.update({"step/model.norm.weight": torch.tensor(float("nan"))}),
        "finite number",
    ),
    "weights of another shape": (
        "model.safetensors", lambda t: t.update({"model.norm.weight": torch.zeros(1)}), "must be F32 [32], got F32 [1]",
    ),
    "weights of another dtype": (
        "model.safetensors",
        lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}),
        "must be F32 [32], got I64 [32]",
    ),
    "a weight too many": ("model.safetensors", lambda t: t.update({"more": torch.zeros(1)}), "holds more"),
}  # fmt: skip
STATES = {
    "another global step": ("trainer_state.json", put("global_step", value=3), "global_step must be 4"),
    "a global step of true": ("trainer_state.json", put("global_step", value=True), "global_step must be 4"),
    "an unknown counter": ("trainer_state.json", put("surprise", value=1), "surprise"),
    "a counter that is text": ("trainer_state.json", put("max_steps", value="6"), "max_steps must be"),
    "a history": ("trainer_state.json", put("log_history", value=[{}]), "log_history must be empty"),
    "a list of counters": ("trainer_state.json", lambda found: [found], "must hold a JSON object"),
    "a key too few": ("training.json", lambda found: found.pop("scheduler") and None, "must have the keys"),
    "a time that is text": ("training.json", put("seconds", value="1"), "seconds must be"),
    "a huge time": ("training.json", put("seconds", value=10**400), "seconds must be"),
    "groups that are text": ("training.json", put("optimizer", "groups", value="x"), "optimizer.groups must be"),
    "a group that is a number": ("training.json", put("optimizer", "groups", 0, value=1), "optimizer.groups must be"),
    "a parameter twice": (
        "training.json",
        lambda found: found["optimizer"]["groups"][0]["params"].append("model.norm.weight"),
        "must name each",
    ),
    "another optimizer setting": (
        "training.json", put("optimizer", "groups", 0, "amsgrad", value=True), "amsgrad = True",
    ),
    "a learning rate below 0": ("training.json", put("optimizer", "groups", 0, "lr", value=-1), "learning rate"),
    "an unknown setting": ("training.json", put("optimizer", "groups", 0, "hook", value=1), "hook"),
    "another schedule step": ("training.json", put("scheduler", "last_epoch", value=2), "last_epoch must be"),
    "an unknown schedule key": ("training.json", put("scheduler", "step", value=1), "has the keys step"),
    "no random state": ("training.json", put("random", value=[]), "at least one rank"),
    "torch's generator, short": ("training.json", put("random", 0, "torch", value=[1, 2]), "torch's generator"),
    "torch's generator, zeros": ("training.json", put("random", 0, "torch", value=[0] * 5056), "torch's generator"),
    "torch's generator, no bytes": ("training.json", put("random", 0, "torch", value=[256]), "list of bytes"),
    "numpy's position": ("training.json", put("random", 0, "numpy", 2, value=10**6), "position from 0 to 624"),
    "numpy's keys": ("training.json", put("random", 0, "numpy", 1, value=[1]), "624 keys"),
    "numpy's generator": ("training.json", put("random", 0, "numpy", 0, value="PCG64"), "MT19937"),
    "python's position": ("training.json", put("random", 0, "python", 1, -1, value=10**6), "Python's generator"),
    "python's version": ("training.json", put("random", 0, "python", 0, value=99), "Python's generator"),
    "another generator": ("training.json", put("random", 0, "more", value=[]), "must have the keys torch"),
}  # fmt: skip
