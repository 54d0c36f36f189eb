"""Reads the runs of a design from the folders and archives of run.py, and names those that are missing."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from affine_attention.lab.recipe import Recipe
from affine_attention.lab.report.collect import Run, load_run
from affine_attention.lab.run import RunFolder

from .plans import PLANS, SEEDS, has_diverged, runs_of
from .run import parse, unpack

ALL_SEEDS = {"e1": SEEDS, "e2": SEEDS[:2], "e4": SEEDS[:2], "e5": SEEDS}
# Settings that say where something is, and not what is trained. `student` is one if it is a folder.
PLACES = {"name", "data", "heldout", "teacher", "tokenizer"}
Values = dict[str, dict[int, float]]  # cell -> seed -> value; a cell is the name of a run without its seed


@dataclass
class DesignRuns:
    """The runs of a design that were found.

    Attributes:
        runs: the runs that are evaluated, by name.
        missing: names of the design's runs that are not finished, with their state.
        differing: settings in which a run differs from the design, as in a trial.
        others: names of runs that are not part of the design.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def values(self, read: Callable[[Run], float]) -> Values:
        """A measure of every run, by cell and seed; a value that is not finite is left out."""
        found: Values = {}
        for name, run in self.runs.items():
            cell, seed = split_name(name)
            if math.isfinite(value := read(run)):
                found.setdefault(cell, {})[seed] = value
        return found

    def notes(self) -> list[str]:
        """Sentences about what is missing or different."""
        notes = []
        if self.missing:
            shown = ", ".join(f"{name} ({state})" for name, state in self.missing.items())
            notes.append(f"{len(self.missing)} of {len(self.missing) + len(self.runs)} runs are missing: {shown}.")
            notes.append("Intervals use the runs that are there; they can change when the others are added.")
        if self.differing:
            notes.append(
                f"These runs are a trial: they differ from the design in {', '.join(self.differing)}. Their verdicts "
                "are not results."
            )
        if self.others:
            notes.append(f"Not part of the design and not read: {', '.join(self.others)}.")
        return notes


def design(experiment: str) -> dict[str, Recipe]:
    """Every run of a design by its name, in execution order, with its recipe for placeholder folders."""
    seeds = [str(seed) for seed in ALL_SEEDS[experiment]]
    plans = PLANS[experiment](parse([experiment, "DATA", "teacher", "OUT", "--seeds", *seeds]))
    return {job.name: job.recipe for job in runs_of(plans, Path("OUT"))}


def split_name(name: str) -> tuple[str, int]:
    """`affine-seed0` -> ("affine", 0)."""
    cell, _, seed = name.rpartition("-seed")
    return cell, int(seed)


def collect(expected: Mapping[str, Recipe], folders: Mapping[str, Path], *, with_diverged: bool = False) -> DesignRuns:
    """The finished runs of a design among these folders; with `with_diverged`, those that became non-finite too."""
    found = DesignRuns(others=sorted(set(folders) - set(expected)))
    differing: dict[str, None] = {}
    for name, recipe in expected.items():
        if name not in folders:
            found.missing[name] = "not started"
            continue
        run = load_run(folders[name])
        if not (run.finished or (with_diverged and has_diverged(run.folder))):
            found.missing[name] = run.status
            continue
        found.runs[name] = run
        differing |= dict.fromkeys(_differing(run.folder, recipe))
    found.differing = list(differing)
    return found


@contextlib.contextmanager
def run_folders(places: Sequence[Path]) -> Iterator[dict[str, Path]]:
    """The run folders in study folders and archives, by name; each name may be finished in one place only."""
    with tempfile.TemporaryDirectory() as temporary:
        found: dict[str, Path] = {}
        for number, place in enumerate(places):
            if place.is_file():
                folder = Path(temporary) / str(number)
                folder.mkdir()
                unpack(place, folder, with_unfinished=True)
            elif place.is_dir():
                folder = place
            else:
                raise ValueError(f"RUNS must be a folder of runs or an archive of run.py, got {place}")
            for path in [folder] if RunFolder(folder).exists else sorted(folder.iterdir()):
                if not RunFolder(path).exists or "-seed" not in path.name:
                    continue
                other = found.setdefault(path.name, path)
                if other == path:
                    continue
                if load_run(other).finished and load_run(path).finished:
                    raise ValueError(f"{path.name} is finished in two of the given places; give only one of them")
                if load_run(path).finished:
                    found[path.name] = path
        yield found


def _differing(run: RunFolder, recipe: Recipe) -> list[str]:
    """Names of settings in which a run differs from its design, without those that only say where something is."""
    names = [line.partition(":")[0] for line in recipe.difference(run.recipe())]
    is_folder = not recipe.student.startswith("llama-")
    return [name for name in names if name not in PLACES and not (is_folder and name == "student")]


def missing_runs(values: Values, cells: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Names of the runs that a statistic needs and that have no value."""
    return [f"{cell}-seed{seed}" for cell in cells for seed in seeds if seed not in values.get(cell, {})]
