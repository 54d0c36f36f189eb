"""Runs a plan: each run through training, evaluation and inspection, skipping what is done, then the report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..lab.recipe import Recipe
from ..lab.run import RunFolder, read_json, write_json
from .live import LiveTable
from .plan import Job, Plan

PAPER_SEQUENCES, PAPER_LENGTH = 10, 1024  # what the paper looks at ("ten sequences of 1k")


def run_study(plan: Plan, out: Path | str, *, device: str | None = None, quiet: bool | None = None) -> Path:
    """Runs what is missing of a plan in the folder `out`, and writes `out/report.html`.

    Started again after an interruption it goes on where it stopped. A run that is there with other settings is refused
    before anything starts; more mechanisms or seeds in the same folder are welcome.
    """
    from ..lab.report import report

    out = Path(out)
    teacher = plan.teacher
    jobs = ([Job("teacher", teacher)] if teacher is not None else []) + plan.jobs(out)
    check_earlier_runs(jobs, out)
    check_space(jobs, out)
    write_json(out / "study.json", plan.to_dict())
    cache: dict[Any, Any] = {}  # the tokens of held-out texts and tasks are made once for all runs
    with LiveTable([(job.name, job.recipe.steps) for job in jobs], quiet) as table:
        for job in jobs:
            _train(job, out, table, device)
            if job.name != "teacher":
                _evaluate(plan, job, out, table, device, cache)
                _inspect(job, out, table, device)
            table.finish(job.name, perplexity=_heldout_perplexity(out / job.name))
    return report(finished_runs(out), out / "report.html")


def finished_runs(out: Path) -> list[Path]:
    """Every finished student in a study's folder, also of earlier calls."""
    folders = sorted(path for path in out.iterdir() if path.is_dir() and path.name != "teacher")
    return [path for path in folders if RunFolder(path).exists and RunFolder(path).finished]


def check_earlier_runs(jobs: list[Job], out: Path) -> None:
    """Refuses, with the difference, when a folder holds a run with other settings."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, got the file {out}")
    complaints = []
    for job in jobs:
        run = RunFolder(out / job.name)
        if not run.exists:
            continue
        try:
            difference = run.recipe().difference(job.recipe)
        except (ValueError, TypeError, KeyError) as error:
            complaints.append(f"{run.path}: {error}")
            continue
        complaints += [f"{run.path}: {line}" for line in difference]
    if complaints:
        shown = "\n  ".join(complaints[:12]) + ("\n  ..." if len(complaints) > 12 else "")
        raise ValueError(
            f"{out} holds runs that this study would not make; take another --out, or move these away:\n  {shown}"
        )


def check_space(jobs: list[Job], out: Path) -> None:
    """Refuses before the first step when the runs cannot fit on the disk."""
    needed = sum(_bytes_of(job.recipe) for job in jobs if not RunFolder(out / job.name).finished)
    place = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            f"the runs need about {needed / 2**30:.1f} GiB in {out}, and {free / 2**30:.1f} GiB are free; take another "
            "--out, or keep fewer checkpoints (--set keep_checkpoints=1)"
        )


def _bytes_of(recipe: Recipe) -> int:
    """A finished model, and checkpoints with AdamW's two moments; one more of these while the newest is written."""
    from ..lab.estimate import count_parameters, meta_student

    weights = 4 * count_parameters(meta_student(recipe)).total
    return weights + 3 * weights * (recipe.keep_checkpoints + 1)


def _train(job: Job, out: Path, table: LiveTable, device: str | None) -> None:
    from ..lab.training import train

    run = RunFolder(out / job.name)
    if run.finished:
        return
    table.start(job.name, "trains")
    train(job.recipe, run.path, quiet=True, device=device, on_step=lambda record: table.step(job.name, record))


def _evaluate(plan: Plan, job: Job, out: Path, table: LiveTable, device: str | None, cache: Any) -> None:
    from ..lab.evaluation import DEFAULT_TASKS, evaluate

    run = RunFolder(out / job.name)
    wanted = {"heldout", *plan.perplexity}
    known = read_json(run.evaluation_file) if run.evaluation_file.exists() else {}
    missing_sets = wanted - set(known.get("perplexity", {}))
    names = DEFAULT_TASKS if plan.tasks == ("paper",) else plan.tasks or ()
    missing_tasks = [task for task in names if task not in known.get("tasks", {})]
    if not missing_sets and not missing_tasks:
        return
    table.start(job.name, "evaluates")
    sets: dict[str, Any] = {name: file for name, file in plan.perplexity.items() if name in missing_sets}
    if "heldout" in missing_sets:
        sets["heldout"] = None  # the run's own
    evaluate(
        run.path, perplexity=sets, tasks=missing_tasks, task_data=plan.task_data, engine=plan.engine,
        device=device, autocast=None if job.recipe.dtype == "float32" else job.recipe.dtype, cache=cache,
    )  # fmt: skip


def _inspect(job: Job, out: Path, table: LiveTable, device: str | None) -> None:
    from ..lab.inspection import inspect

    run = RunFolder(out / job.name)
    if run.inspection_file.exists():
        return
    table.start(job.name, "inspects")
    length = min(PAPER_LENGTH, job.recipe.sequence_length)
    inspect(run.path, sequences=PAPER_SEQUENCES, length=length, device=device)


def _heldout_perplexity(folder: Path) -> float | None:
    run = RunFolder(folder)
    if not run.evaluation_file.exists():
        return None
    return read_json(run.evaluation_file)["perplexity"].get("heldout", {}).get("token")
