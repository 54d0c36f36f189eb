"""The folder of a run: its recipe, manifest, log and events, and the results of each stage.

A stored run may have any of these files compressed, under the same name with .xz appended; reading is transparent.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..files import open_for_appending, plain_numbers, read_lines, read_table
from .machine import now
from .recipe import Recipe

SCHEMA = 1


class _File:
    """A path inside the run folder, as an attribute."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, run: RunFolder, owner: type) -> Path:
        return run.path.joinpath(*self.parts)


class RunFolder:
    """The paths of a run, and functions that read and write them. The constructor does not touch the disk."""

    recipe_file = _File("recipe.json")
    manifest_file = _File("manifest.json")
    log_file = _File("log.jsonl")
    events_file = _File("events.jsonl")
    checkpoints = _File("checkpoints")
    model = _File("model")
    evaluation_file = _File("evaluation.json")
    inspection_file = _File("inspection.json")
    maps_file = _File("inspection", "maps.safetensors")

    def __init__(self, path: Path | str) -> None:
        if not str(path).strip():
            raise ValueError("the folder of a run must not be an empty string; is a variable unset?")
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        """True if the folder holds a run."""
        return self.recipe_file.is_file()

    @property
    def finished(self) -> bool:
        """True if the folder holds the trained model."""
        return (self.model / "config.json").is_file()

    def recipe(self) -> Recipe:
        return read_recipe(self.recipe_file)

    def manifest(self) -> dict[str, Any]:
        return read_table(self.manifest_file)

    def log(self) -> list[dict[str, Any]]:
        """The steps, oldest first. An incomplete last line, left by a killed process, is skipped."""
        return list(read_lines(self.log_file))

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events_file))

    def add_event(self, event: str, **details: Any) -> None:
        """Appends an event with the current time to events.jsonl."""
        line = json.dumps(plain_numbers({"time": now(), "event": event, **details}), allow_nan=False)
        self.path.mkdir(parents=True, exist_ok=True)
        with open_for_appending(self.events_file) as file:
            file.write(line.encode() + b"\n")


def open_run(path: Path | str) -> RunFolder:
    """The run in a folder; raises if the folder does not hold one."""
    run = RunFolder(path)
    if not run.path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give the folder that `affine train` wrote")
    if not run.exists:
        if os.path.lexists(run.recipe_file):
            raise ValueError(
                f"{run.recipe_file} must be a regular file, got a folder, a pipe, a device or a broken link"
            )
        raise FileNotFoundError(f"{path} does not hold a run: it has no recipe.json")
    return run


def read_recipe(path: Path) -> Recipe:
    """The settings of a run; errors name the file."""
    settings = read_table(path)
    try:
        return Recipe.from_dict(settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
