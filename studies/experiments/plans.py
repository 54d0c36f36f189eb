"""The plans of the experiments that need a GPU: E1, E2, E4 and E5, on the 30M setting of studies/smollm2."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from affine_attention.files import read_json, write_json
from affine_attention.lab.names import folder_name
from affine_attention.lab.recipe import Recipe, parse_setting
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.checkpoints import MANIFEST
from affine_attention.lab.training.student import build_student
from affine_attention.lab.training.train import load_corpus
from affine_attention.recipes import recipe
from affine_attention.study import Job, Plan
from studies.smollm2.run import make_plan

SEEDS = (0, 1, 2)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)

E1_STUDENTS = (
    "constant_alpha", "per_head_alpha+alpha_start=0.5", "head_gated_double", "affine_centred",
    "head_gated+alpha_start=0.25",
)  # fmt: skip
E1_RATED = ("softmax", "head_gated")  # also at half the learning rate
E1_VARIANTS = (*E1_STUDENTS, *(f"{mechanism}+learning_rate={5e-4}" for mechanism in E1_RATED))
E1_FACTORS = (0.5, 0.0)  # of the output projection of attention in softmax students

E2_MECHANISMS = ("softmax", "affine", "head_gated", "gated")
E2_PRESSURE = ("", "+sink_pressure=first_key")

E4_MECHANISMS = ("softmax", "affine", "affine_no_bias", "head_gated", "gated")
E4_SETTINGS = {"steps": 400, "warmup_steps": 100, "decay_steps": 40}

E5_MECHANISMS = ("softmax", "affine", "head_gated", "affine+activation=sigmoid")
E5_UNIT = 522  # steps; a checkpoint of the long run every so many steps
E5_LONG = {"steps": 2320, "decay_steps": 232}
E5_BRANCHES = ({"steps": 580, "decay_steps": 58}, {"steps": 1160, "decay_steps": 116})
E5_SETTINGS = {"global_batch": 64, "save_every": E5_UNIT, "keep_checkpoints": 5, "remember_teacher": False}


@dataclass(frozen=True)
class ScaledStarts(Plan):
    """A plan with further softmax students whose attention starts smaller: output projections multiplied by a factor.

    Attributes:
        starts: the folder in which the initial students are written.
        factors: the factors.
    """

    starts: Path = Path("starts")
    factors: tuple[float, ...] = E1_FACTORS

    def jobs(self, out: Path) -> list[Job]:
        scaled = [
            Job(f"softmax_start={factor:g}-seed{seed}", self._scaled_recipe(factor, seed))
            for seed in self.seeds
            for factor in self.factors
        ]
        return super().jobs(out) + scaled

    def write_starts(self) -> None:
        """Writes the initial students that do not exist yet: the softmax student of the seed, with scaled weights."""
        for seed in self.seeds:
            for factor in self.factors:
                folder = self._start(factor, seed)
                if (folder / "config.json").is_file():
                    continue
                usual = self._softmax(seed)
                student = build_student(usual)
                with torch.no_grad():
                    for layer in student.model.layers:
                        layer.self_attn.o_proj.weight *= factor
                partial = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                student.save_pretrained(partial)
                if usual.tokenizer is None:  # a student from a folder has its tokenizer there
                    load_corpus(usual).tokenizer.save_pretrained(partial)
                partial.rename(folder)

    def _start(self, factor: float, seed: int) -> Path:
        return self.starts / f"softmax_x{factor:g}-seed{seed}"

    def _softmax(self, seed: int) -> Recipe:
        return recipe(self.recipe, "softmax", {**self.settings, "seed": seed, "data_seed": seed})

    def _scaled_recipe(self, factor: float, seed: int) -> Recipe:
        start = {"student": str(self._start(factor, seed)), "student_changes": {}}
        return self._softmax(seed).with_settings(start)


@dataclass(frozen=True)
class MayDiverge(Plan):
    """A plan in which a run that becomes non-finite is a result: it is not trained again."""

    def jobs(self, out: Path) -> list[Job]:
        return [job for job in super().jobs(out) if not has_diverged(RunFolder(Path(out) / job.name))]


def has_diverged(run: RunFolder) -> bool:
    """True if training stopped because a loss or a gradient was not finite, and not by a signal."""
    ends = [event for event in run.events() if event.get("event") in ("stop", "error", "finish")]
    return bool(ends) and ends[-1]["event"] == "stop" and str(ends[-1].get("reason")).startswith("NotFiniteError")


def plan_e1(given: argparse.Namespace) -> list[Plan]:
    """The new students of E1, and one softmax student that repeats a stored run."""
    usual = make_plan(given, "30m", E1_VARIANTS, given.seeds or SEEDS, learning_rate=1e-3)
    return [
        ScaledStarts(**_fields(usual), starts=Path(given.out) / "starts"),
        make_plan(given, "30m", ["softmax"], [0], learning_rate=1e-3),
    ]


def plan_e2(given: argparse.Namespace) -> list[Plan]:
    """The teacher itself, converted to four mechanisms and trained on, with and without pressure on its sinks."""
    variants = [mechanism + pressure for pressure in E2_PRESSURE for mechanism in E2_MECHANISMS]
    usual = make_plan(given, "30m", ["softmax"], [0])
    own = ("tokenizer", "data", "heldout")
    settings = {key: usual.settings[key] for key in own} | {"name": "smollm2", "student": given.teacher}
    settings |= {"learning_rate": 3e-4, "save_every": 0, "keep_checkpoints": 1, "compile": True}
    settings |= dict(parse_setting(text) for text in given.settings)
    seeds = tuple(given.seeds or SEEDS[:1])
    plan = dataclasses.replace(usual, recipe="convert_gpu", mechanisms=tuple(variants), seeds=seeds, settings=settings)
    return [dataclasses.replace(plan, instruments=("all",))]


def plan_e4(given: argparse.Namespace) -> list[Plan]:
    """Five mechanisms at five learning rates; the held-out loss and the log are enough, so there are no tasks."""
    variants = [f"{mechanism}+learning_rate={rate}" for rate in RATES for mechanism in E4_MECHANISMS]
    plan = make_plan(given, "30m", variants, given.seeds or SEEDS[:2], **E4_SETTINGS)
    return [MayDiverge(**_fields(dataclasses.replace(plan, tasks=None, perplexity={})))]


def plan_e5(given: argparse.Namespace) -> list[Plan]:
    """The long runs, then their branches."""
    seeds = given.seeds or SEEDS[:1]
    long = make_plan(given, "30m", E5_MECHANISMS, seeds, learning_rate=1e-3, **E5_SETTINGS, **E5_LONG)
    variants = [
        "+".join([mechanism, *(f"{key}={value}" for key, value in branch.items())])
        for mechanism in E5_MECHANISMS
        for branch in E5_BRANCHES
    ]
    branches = make_plan(given, "30m", variants, seeds, learning_rate=1e-3, **E5_SETTINGS, **E5_LONG)
    return [dataclasses.replace(plan, tasks=None) for plan in (long, branches)]


def start_branches(branches: Plan, out: Path) -> None:
    """Gives each branch that has not started the checkpoint of its long run at the first step of its decay.

    Without that checkpoint (it is not in the archive), the branch is trained from its first step.
    """
    for seed in branches.seeds:
        for variant in branches.mechanisms:
            branch = RunFolder(out / f"{folder_name(variant)}-seed{seed}")
            long = RunFolder(out / f"{folder_name(variant.partition('+steps=')[0])}-seed{seed}")
            own = next(job.recipe for job in branches.jobs(out) if job.name == branch.path.name)
            if not branch.exists and checkpoint_before_decay(long, own).is_dir():
                start_branch(long, branch, own)


def checkpoint_before_decay(long: RunFolder, branch: Recipe) -> Path:
    return long.checkpoints / f"step-{branch.steps - branch.decay_steps:08d}"


def start_branch(long: RunFolder, branch: RunFolder, chosen: Recipe) -> None:
    """Copies a checkpoint of the long run into the folder of a run that differs in `steps` and `decay_steps` only.

    Up to the first step of its decay such a run is the long run, so training it from this checkpoint gives the same
    result as training it from the start.
    """
    differing = {line.partition(":")[0] for line in long.recipe().difference(chosen)}
    if not differing <= {"steps", "decay_steps"}:
        raise ValueError(f"a branch may change only steps and decay_steps, got {', '.join(sorted(differing))}")
    source, step = checkpoint_before_decay(long, chosen), chosen.steps - chosen.decay_steps
    target = branch.checkpoints / source.name
    shutil.copytree(source, target, dirs_exist_ok=True)
    manifest = read_json(target / MANIFEST)
    manifest["for"]["recipe"] = chosen.digest()
    write_json(target / MANIFEST, manifest)
    lines = [line for line in long.log() if line["step"] <= step]
    branch.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    write_json(branch.recipe_file, chosen.to_dict())  # last: from here on the folder is a run
    branch.add_event("branch", step=step, of=long.path.name)


def _fields(plan: Plan) -> dict[str, Any]:
    return {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}


PLANS: dict[str, Any] = {"e1": plan_e1, "e2": plan_e2, "e4": plan_e4, "e5": plan_e5}


def runs_of(plans: Sequence[Plan], out: Path) -> list[Job]:
    return [job for plan in plans for job in plan.jobs(out)]
