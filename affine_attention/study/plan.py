"""Plan: the students of a study, their seeds and settings, and what they are evaluated on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..lab.evaluation.instruments import parse_instruments
from ..lab.names import folder_name
from ..lab.recipe import Recipe, parse_setting
from ..nn import PRESETS, Mechanism
from ..recipes import STUDY_TEACHER, TEACHERS, recipe
from .sweep import check_sweeps, label_of, points

MECHANISM_SETTINGS = {item.name for item in dataclasses.fields(Mechanism)} - {"name"}
MOST_RUNS = 1000


@dataclass(frozen=True)
class Job:
    """One run of a study; its name is the name of its folder."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Plan:
    """The runs of a study.

    Attributes:
        recipe: the recipe of every student.
        mechanisms: names of presets; `affine+activation=sigmoid` or `softmax+learning_rate=0.002` changes settings of
            the mechanism or of the run for that student only.
        seeds: each mechanism is trained once per seed, which sets the initial weights and the order of the data.
        settings: changes of the recipe for every student.
        sweeps: grids of settings: each mechanism and seed is trained at every combination of these values.
        teacher_steps: steps of the teacher that the study trains if none is given.
        perplexity: further held-out texts by name, in addition to the run's own.
        tasks, task_data, engine, instruments: as in `affine evaluate`; no tasks and no instruments by default.
    """

    recipe: str = "tiny_cpu"
    mechanisms: tuple[str, ...] = ("softmax", "sink", "gated", "affine", "affine_gated")
    seeds: tuple[int, ...] = (0,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    sweeps: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    teacher_steps: int | None = None
    perplexity: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[str, ...] | None = None
    task_data: Path | None = None
    engine: Literal["harness", "direct"] = "harness"
    instruments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        grid = math.prod(len(values) for values in self.sweeps.values())
        if len(self.mechanisms) * len(self.seeds) * grid > MOST_RUNS:
            raise ValueError(
                f"a study has at most {MOST_RUNS:,} students, got {len(self.mechanisms):,} mechanisms with "
                f"{len(self.seeds):,} seeds" + f" at {grid:,} settings" * bool(self.sweeps)
            )
        parse_instruments(self.instruments)
        for name in ("mechanisms", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name} must not be empty")
            repeated = {value for value in values if values.count(value) > 1}
            if repeated:
                raise ValueError(f"{name} must not repeat, got {', '.join(map(str, sorted(repeated, key=str)))} twice")
        for key in self.sweeps:
            if key in self.settings:
                raise ValueError(f"{key} must be a setting or a grid, got both")
        check_sweeps(self.sweeps, self.teacher is not None)
        folders: dict[str, str] = {}
        recipes: dict[str, str] = {}
        for variant, point in self._students():
            name = variant + label_of(point)
            digest = self._recipe(variant, self.seeds[0], None, point).digest()
            other = folders.setdefault(folder_name(name).lower(), name)  # some file systems ignore case
            if other != name:
                raise ValueError(
                    f"every mechanism needs its own folder, but {other!r} and {name!r} would both use "
                    f"{folder_name(name)!r}; remove one of them"
                )
            if (same := recipes.setdefault(digest, name)) != name and self.sweeps:
                raise ValueError(f"the values of a grid must differ, but {same!r} and {name!r} are the same settings")

    @property
    def converts_its_own(self) -> bool:
        """True if the students start from the model that the study trains first."""
        return recipe(self.recipe, "softmax", self.settings).student == STUDY_TEACHER

    @property
    def teacher(self) -> Recipe | None:
        """The recipe of the model that the study trains first: the teacher if none is given, or the one to convert."""
        given = "teacher" in self.settings or "teacher" in self.sweeps or recipe(self.recipe).teacher is not None
        if self.recipe not in TEACHERS or (given and not self.converts_its_own):
            return None
        students_own = ("data", "heldout", "text_column", "tokenizer", "vocabulary_size", "sequence_length", "dtype")
        shared = {key: value for key, value in self.settings.items() if key in students_own}
        if self.teacher_steps is not None:
            warmup, decay = self.teacher_steps // 10, self.teacher_steps // 5
            shared |= {"steps": self.teacher_steps, "warmup_steps": warmup, "decay_steps": decay}
        vocabulary = recipe(self.recipe, "softmax", self.settings).student_changes.get("vocab_size")
        if vocabulary is not None:
            shared["student_changes.vocab_size"] = vocabulary
        return TEACHERS[self.recipe]().with_settings(shared)

    def jobs(self, out: Path) -> list[Job]:
        """The students in execution order: all mechanisms of a seed at every point of the grid, then the next seed."""
        # Relative to the run folder, so that a study can be moved.
        teacher = STUDY_TEACHER if self.teacher is not None and not self.converts_its_own else None
        return [
            Job(f"{folder_name(variant + label_of(point))}-seed{seed}", self._recipe(variant, seed, teacher, point))
            for seed in self.seeds
            for variant, point in self._students()
        ]

    def _students(self) -> list[tuple[str, dict[str, Any]]]:
        """(mechanism, point of the grid) of every student of a seed."""
        return [(variant, point) for point in points(self.sweeps) for variant in self.mechanisms]

    def _recipe(self, variant: str, seed: int, teacher: str | None, point: Mapping[str, Any]) -> Recipe:
        mechanism, settings = parse_variant(variant)
        for key in point:
            if key in settings:
                raise ValueError(f"{key} must be a grid or a setting of {variant!r}, got both")
        own: dict[str, Any] = {"seed": seed, "data_seed": seed}
        if teacher is not None:
            own["teacher"] = teacher
        return recipe(self.recipe, mechanism, {**self.settings, **own, **point, **settings})

    def of_known_size(self, built: Recipe) -> Recipe:
        """A recipe for estimates: a student that starts from a model which is not trained yet has that model's size."""
        first = self.teacher
        if first is None or built.student != STUDY_TEACHER:
            return built
        return dataclasses.replace(
            built, student=first.student, student_changes=first.student_changes, teacher=STUDY_TEACHER
        )

    def describe(self, out: Path = Path("runs/study")) -> str:
        """The runs of the study and their cost."""
        from ..lab.estimate import describe_run

        jobs = self.jobs(out)
        lines = [
            f"{len(jobs)} students: {', '.join(self.mechanisms)}; seeds {', '.join(map(str, self.seeds))}",
            *(f"grid: {key} = {', '.join(map(str, values))}" for key, values in self.sweeps.items()),
            f"teacher: {'trained first' if self.teacher else jobs[0].recipe.teacher or 'none (plain cross-entropy)'}",
            f"tokens: {sum(job.recipe.tokens for job in jobs):,} for the students"
            + (f", {self.teacher.tokens:,} for the teacher" if self.teacher else ""),
            "",
            f"the first student ({jobs[0].name}):",
            describe_run(self.of_known_size(jobs[0].recipe)),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "mechanisms": list(self.mechanisms),
            "seeds": list(self.seeds),
            "settings": dict(self.settings),
            "sweeps": {key: list(values) for key, values in self.sweeps.items()},
            "teacher_steps": self.teacher_steps,
            "perplexity": dict(self.perplexity),
            "tasks": None if self.tasks is None else list(self.tasks),
            "engine": self.engine,
            "instruments": list(self.instruments),
        }


def named_mechanisms(text: str) -> tuple[str, ...]:
    """`softmax,affine` -> the two names; `all` -> the names of all presets."""
    return tuple(PRESETS) if text == "all" else tuple(name for name in text.split(",") if name)


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """`affine+activation=sigmoid` -> ("affine", {"mechanism.activation": "sigmoid"})."""
    mechanism, *changes = text.split("+")
    Mechanism.named(mechanism)
    settings = {}
    for change in changes:
        key, value = parse_setting(change)
        settings[f"mechanism.{key}" if key in MECHANISM_SETTINGS else key] = value
    return mechanism, settings
