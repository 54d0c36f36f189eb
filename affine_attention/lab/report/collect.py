"""Reads run folders, complete or not, into Run objects that also list what is missing or broken."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...files import LARGEST_LOG, is_there, parse_json, read_bytes
from ..run import RunFolder, open_run

LARGEST_RECIPE = 2**20  # bytes of recipe.json
LARGEST_MAPS = 512 * 2**20  # bytes of maps.safetensors
LARGEST_GRID = 2**22  # layers x heads
DEEPEST = 60  # levels of nested JSON


@dataclass
class Run:
    """One run folder in memory. Files that could not be read are listed in `problems`, and their data is empty."""

    folder: RunFolder
    recipe: dict[str, Any]
    manifest: dict[str, Any] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    inspection: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _read: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def recipe_name(self) -> str:
        return str(self.recipe.get("name") or "run")

    @property
    def mechanism(self) -> dict[str, Any]:
        found = self.recipe.get("mechanism")
        return found if isinstance(found, dict) else {"name": str(found or "softmax")}

    @property
    def mechanism_name(self) -> str:
        return str(self.mechanism.get("name") or "softmax")

    @property
    def seeds(self) -> tuple[Any, Any]:
        """(seed, data_seed), which distinguish the repetitions of a setting."""
        return self.recipe.get("seed", 0), self.recipe.get("data_seed", 0)

    @property
    def seed_label(self) -> str:
        seed, data_seed = self.seeds
        return f"{seed}" if data_seed == seed else f"{seed} (data {data_seed})"

    @property
    def steps(self) -> int:
        """Steps in the log."""
        return max((int(entry["step"]) for entry in self.log), default=0)

    @property
    def planned_steps(self) -> int | None:
        planned = self.recipe.get("steps")
        return planned if isinstance(planned, int) else None

    @property
    def tokens(self) -> float:
        """Training tokens so far, from the log."""
        return last_number(self.log, "tokens")

    @property
    def finished(self) -> bool:
        """True if the folder holds a model, or if the events record that training finished."""
        return self.folder.finished or any(event.get("event") == "finish" for event in self.events)

    @property
    def status(self) -> str:
        """ "finished", "stopped at step n of m", ..., or "not started"."""
        if self.finished:
            return "finished"
        if not self.log:
            return "not started"
        how = next((e.get("event") for e in reversed(self.events) if e.get("event") in ("stop", "error")), None)
        word = {"stop": "stopped", "error": "failed"}.get(str(how), "unfinished")
        return f"{word} at step {self.steps}" + (f" of {self.planned_steps}" if self.planned_steps else "")

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one entry of the log; steps without it are skipped, null becomes NaN."""
        if ("series", key) not in self._read:
            found = [(entry["step"], number(entry[key])) for entry in self.log if key in entry]
            if key == "eval_loss":  # may be null for steps without an evaluation
                found = [(step, value) for step, value in found if not math.isnan(value)]
            steps, values = zip(*found, strict=True) if found else ((), ())
            self._read["series", key] = np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)
        return self._read["series", key]

    def probes(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [P] and values [P, layers, heads] of a probed quantity; missing layers are NaN."""
        if ("probes", key) not in self._read:
            found = [(entry["step"], grid(entry[key])) for entry in self.log if isinstance(entry.get(key), list)]
            layers = max((values.shape[0] for _, values in found), default=0)
            heads = max((values.shape[1] for _, values in found), default=0)
            if len(found) * layers * heads > 16 * LARGEST_GRID:
                self.note(f"log.jsonl: {key} has more layers and heads than a model can have, and was ignored")
                found, layers, heads = [], 0, 0
            stacked = np.full((len(found), layers, heads), np.nan)
            for index, (_, values) in enumerate(found):
                stacked[index, : values.shape[0], : values.shape[1]] = values
            self._read["probes", key] = np.array([step for step, _ in found], dtype=np.int64), stacked
        return self._read["probes", key]

    def inspected(self, *keys: str) -> np.ndarray | None:
        """A [layers, heads] array of inspection.json, or None: `run.inspected("entropy", "softmax")`."""
        found: Any = self.inspection
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        values = grid(found)
        return values if values.size and not np.isnan(values).all() else None

    @cached_property
    def map_tokens(self) -> list[str]:
        maps = self.inspection.get("maps")
        tokens = maps.get("tokens") if isinstance(maps, dict) else None
        return [str(token) for token in tokens] if isinstance(tokens, list) else []

    def maps(self) -> dict[int, np.ndarray]:
        """Signed attention weights [heads, n, n] by layer; empty if none were stored."""
        if not self.folder.maps_file.is_file():
            return {}
        if self.folder.maps_file.stat().st_size > LARGEST_MAPS:
            self.note(f"inspection/maps.safetensors has more than {LARGEST_MAPS:,} bytes and was ignored")
            return {}
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(self.folder.maps_file)
        except (SafetensorError, OSError, ValueError) as error:
            self.note(f"inspection/maps.safetensors cannot be read ({error})")
            return {}
        found = {}
        for name, weights in tensors.items():
            layer = name.removeprefix("layer.")
            if layer.isdigit() and weights.ndim == 3 and weights.shape[1] == weights.shape[2] and weights.size:
                found[int(layer)] = weights.astype(np.float32)
        return dict(sorted(found.items()))

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def load_run(path: Path | str | Run) -> Run:
    """Reads a run folder; broken files are noted in `problems`, a folder without a run raises."""
    if isinstance(path, Run):
        return path
    folder = open_run(path)
    run = Run(folder, {})
    content = read_bytes(folder.recipe_file, LARGEST_RECIPE).decode("utf-8", errors="replace")
    recipe = parse_json(content, str(folder.recipe_file))
    if not isinstance(recipe, dict):
        raise ValueError(f"{folder.recipe_file} must hold a table of settings, got {type(recipe).__name__}")
    check_depth(recipe, str(folder.recipe_file))
    run.recipe = recipe
    run.manifest = _table(run, folder.manifest_file)
    run.evaluation = _table(run, folder.evaluation_file)
    run.inspection = _table(run, folder.inspection_file)
    run.events = _lines(run, folder.events_file)
    run.log = _steps(_lines(run, folder.log_file))
    missing = run.inspection.get("missing")
    run.problems += [f"inspection: {words}" for words in missing] if isinstance(missing, list) else []
    return run


def load_runs(
    paths: Path | str | Run | Iterable[Path | str | Run], unreadable: dict[str, str] | None = None
) -> list[Run]:
    """Reads one or several run folders; duplicates are read once.

    Args:
        paths: run folders.
        unreadable: if given, collects runs that cannot be read with the reason; raises only if none can be read.
    """
    several = [paths] if isinstance(paths, Path | str | Run) else list(paths)
    runs: dict[Path, Run] = {}
    for path in several:
        try:
            run = load_run(path)
        except (ValueError, OSError) as error:
            # A folder without a run is a wrong path, not an unreadable run.
            if unreadable is None or len(several) == 1 or isinstance(error, FileNotFoundError):
                raise
            unreadable[str(path)] = str(error)
            continue
        runs.setdefault(run.folder.path.resolve(), run)
    if unreadable and not runs:
        raise ValueError(f"none of the {len(several)} runs can be read: {next(iter(unreadable.values()))}")
    return list(runs.values())


def check_depth(value: Any, where: str) -> None:
    """Raises ValueError for JSON that is nested more deeply than this package ever writes."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"{where} is JSON nested more than {DEEPEST} levels deep; was it edited?")


def number(value: Any) -> float:
    """A float; NaN for anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    if isinstance(value, int) and abs(value) >= 2**1000:
        return math.nan  # too large for a float
    return float(value) if math.isfinite(value) else math.nan


def grid(value: Any) -> np.ndarray:
    """Nested lists [layers][heads] as an array; missing layers, heads or numbers are NaN; a flat list is one column."""
    if not isinstance(value, list) or not value:
        return np.zeros((0, 0))
    with contextlib.suppress(ValueError, TypeError):  # the usual case, complete and rectangular
        whole = np.array(value, dtype=np.float64)
        if whole.ndim == 2:
            return np.where(np.isfinite(whole), whole, np.nan)
    rows = [row if isinstance(row, list) else ([] if row is None else [row]) for row in value]
    if len(rows) * max(map(len, rows), default=0) > LARGEST_GRID:
        return np.zeros((0, 0))  # not [layers][heads], such as one long row among many short ones
    filled = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = [number(entry) for entry in row]
    return filled


def last_number(log: Sequence[dict[str, Any]], key: str) -> float:
    return next((value for entry in reversed(log) if not math.isnan(value := number(entry.get(key)))), math.nan)


def _table(run: Run, path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    try:
        found = parse_json(read_bytes(path).decode("utf-8", errors="replace"), path.name)
        check_depth(found if isinstance(found, dict) else {}, path.name)
    except (ValueError, OSError) as error:
        run.note(f"{error}; it was ignored")
        return {}
    if not isinstance(found, dict):
        run.note(f"{path.name} is not a JSON object and was ignored")
        return {}
    return found


def _lines(run: Run, path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file. Broken lines, such as the incomplete last line of a killed process, are noted."""
    if not is_there(path):
        return []
    found, broken = [], 0
    try:
        lines = read_bytes(path, LARGEST_LOG).split(b"\n")
    except (ValueError, OSError) as error:
        run.note(str(error))
        return []
    for line in lines:
        if not line.strip():
            continue
        try:
            entry = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            broken += 1
            continue
        if isinstance(entry, dict):
            found.append(entry)
        else:
            broken += 1
    if broken:
        run.note(f"{broken} broken line{'s' * (broken > 1)} of {path.name} ignored")
    return found


def _steps(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per step, in order; if a step was written twice, the later entry is used."""
    by_step = {}
    for entry in entries:
        step = entry.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**53:
            by_step[step] = entry
    return [by_step[step] for step in sorted(by_step)]
