"""Turns a run into a folder and back: its recipe, manifest, log, events, and the files of each stage.

A run that is kept for later may hold any of these files compressed, under its name with .xz: it is read as it was.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..files import open_for_appending, read_lines, read_table, write_text
from ..version import __version__
from .recipe import Recipe

SCHEMA = 1


class RunFolder:
    """The paths of a run and the ways to read and write them. Making one touches nothing on disk."""

    def __init__(self, path: Path | str) -> None:
        if not str(path).strip():
            raise ValueError("the folder of a run must be named, got an empty name; is a variable unset?")
        self.path = Path(path)

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.json"

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def evaluation_file(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def inspection_file(self) -> Path:
        return self.path / "inspection.json"

    @property
    def maps_file(self) -> Path:
        return self.path / "inspection" / "maps.safetensors"

    @property
    def exists(self) -> bool:
        """True when there is a run in it."""
        return self.recipe_file.is_file()

    @property
    def finished(self) -> bool:
        return (self.model / "config.json").is_file()

    def recipe(self) -> Recipe:
        return read_recipe(self.recipe_file)

    def manifest(self) -> dict[str, Any]:
        return read_table(self.manifest_file)

    def log(self) -> list[dict[str, Any]]:
        """The steps, oldest first; what a killed process left half-written at the end is not a step."""
        return list(read_lines(self.log_file))

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events_file))

    def add_event(self, event: str, **details: Any) -> None:
        """Appends what happened, when, to events.jsonl."""
        line = json.dumps(plain_numbers({"time": now(), "event": event, **details}), allow_nan=False)
        self.path.mkdir(parents=True, exist_ok=True)
        with open_for_appending(self.events_file) as file:
            file.write(line.encode() + b"\n")


def open_run(path: Path | str) -> RunFolder:
    """A folder that holds a run, or an error that says what is missing."""
    run = RunFolder(path)
    if not run.path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give the folder that `affine train` wrote")
    if not run.exists:
        if os.path.lexists(run.recipe_file):
            raise ValueError(
                f"{run.recipe_file} must be a regular file, got a folder, a pipe, a device or a broken link"
            )
        raise FileNotFoundError(f"{path} holds no run: there is no recipe.json in it")
    return run


def read_recipe(path: Path) -> Recipe:
    """The settings of a run; an error names the file."""
    settings = read_table(path)
    try:
        return Recipe.from_dict(settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Numbers that JSON lacks become null."""
    write_text(path, json.dumps(plain_numbers(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def plain_numbers(value: Any) -> Any:
    """The same with NaN and infinities as None, tensors as lists, paths as text: what a strict JSON file can hold."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # half of a surrogate pair, which a byte-level tokenizer can leave, is no UTF-8
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return plain_numbers(value.tolist())
    return value


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe_machine(device: torch.device | str | None = None) -> dict[str, Any]:
    """Versions, device, commit and command: what someone needs to make a result again."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {_processor()}"
    packages = ("torch", "triton", "transformers", "accelerate", "tokenizers", "datasets", "lm-eval")
    return {
        "date": now(),
        "device": name,
        "python": platform.python_version(),
        "versions": {"affine_attention": __version__}
        | {package: version for package in packages if (version := _version(package))},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "",
    }


def _processor() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree that this package runs from, with a + when it was changed since; else None."""
    root = Path(__file__).parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        ).stdout.strip()
        return commit + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
