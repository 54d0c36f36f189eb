"""Runs a plan: training, evaluation and inspection of each run, skipping finished stages, then the report."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..files import existing_parent, read_table, write_json
from ..lab.recipe import Recipe
from ..lab.run import RunFolder
from .live import LiveTable
from .plan import Job, Plan
from .workers import run_in_parallel

PAPER_SEQUENCES, PAPER_LENGTH = 10, 1024  # as in the paper ("ten sequences of 1k")


def run_study(
    plan: Plan,
    out: Path | str,
    *,
    device: str | None = None,
    quiet: bool | None = None,
    parallel: int = 1,
    keep_weights: bool = True,
    cache: Path | str | None = None,
    report_to: tuple[str, ...] = (),
) -> Path:
    """Runs the missing parts of a plan in the folder `out`, and writes `out/report.html`.

    After an interruption, the same call resumes. Raises ValueError before anything starts if the folder holds a run
    with other settings; mechanisms and seeds can be added to an existing folder.

    Args:
        plan: what to run.
        out: the study folder; each run is a folder in it.
        device: "cpu" or "cuda"; None uses a GPU if there is one.
        quiet: True shows no table.
        parallel: number of students that run at the same time, each in its own process.
        keep_weights: False deletes the weights and checkpoints of a student after evaluation and inspection.
        cache: folder for tokenized text; by default the user's cache folder.
        report_to: integrations of Trainer for every student and the teacher, as in `lab.training.train`.
    """
    from ..lab.report import report
    from ..lab.training.trainer_arguments import check_report_to

    check_report_to(report_to)
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1, got {parallel}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if parallel > 1 and ranks > 1:
        raise ValueError(
            f"parallel={parallel} starts its own processes, but this is one of {ranks} ranks of torchrun; use either "
            "several students at a time or several devices per student"
        )
    if not str(out).strip():
        raise ValueError("out must not be an empty string; is a variable unset?")
    out = Path(out)
    teacher = plan.teacher
    jobs = ([Job("teacher", teacher)] if teacher is not None else []) + plan.jobs(out)
    check_earlier_runs(jobs, out)
    sized = [Job(job.name, plan.of_known_size(job.recipe)) for job in jobs]
    check_space(sized, out, None if keep_weights else parallel)
    write_json(out / "study.json", plan.to_dict())
    work = StudentWork(plan, out, device, keep_weights, cache, report_to)
    with LiveTable([(job.name, job.recipe.steps) for job in jobs], quiet, parallel) as table:
        if teacher is not None:
            _train(jobs.pop(0), out, table, device, cache, report_to)
            table.finish("teacher")
        check_teacher_of_runs(jobs, out)
        if parallel > 1 and len(jobs) > 1:
            run_in_parallel(jobs, work, parallel, table)
        else:
            for job in jobs:
                work(job, table)
    return report(finished_runs(out), out / "report.html")


@dataclass
class StudentWork:
    """Trains, evaluates and inspects one student per call, and reports progress to a table."""

    plan: Plan
    out: Path
    device: str | None
    keep_weights: bool
    folder: Path | str | None = None  # of the cache on disk
    report_to: tuple[str, ...] = ()
    cache: dict[Any, Any] = field(default_factory=dict)  # tokens of held-out texts and tasks, shared by all students

    def __call__(self, job: Job, table: Table) -> None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of loading models
        run = RunFolder(self.out / job.name)
        if not is_done(run):
            _train(job, self.out, table, self.device, self.folder, self.report_to)
        if run.finished:  # the weights exist
            _evaluate(self.plan, job, self.out, table, self.device, self.cache)
            _inspect(job, self.out, table, self.device)
            if not self.keep_weights:
                shutil.rmtree(run.checkpoints, ignore_errors=True)
                shutil.rmtree(run.model)
        table.finish(job.name, perplexity=_heldout_perplexity(run.path))


class Table(Protocol):
    """Receives progress: a LiveTable, or a Messenger in a worker process."""

    def start(self, name: str, stage: str) -> None: ...

    def step(self, name: str, record: dict[str, Any]) -> None: ...

    def finish(self, name: str, *, perplexity: float | None = None) -> None: ...


def is_done(run: RunFolder) -> bool:
    """True if a student is trained: it has its weights, or its results if the weights were not kept."""
    if run.finished:
        return True
    trained = any(event.get("event") == "finish" for event in run.events())
    return trained and run.evaluation_file.exists() and run.inspection_file.exists()


def finished_runs(out: Path) -> list[Path]:
    """Every finished student in a study folder, including those of earlier calls."""
    folders = sorted(path for path in out.iterdir() if path.is_dir() and path.name != "teacher")
    return [path for path in folders if RunFolder(path).exists and is_done(RunFolder(path))]


def check_earlier_runs(jobs: list[Job], out: Path) -> None:
    """Raises ValueError with the differences if a folder holds a run with other settings."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, got the file {out}")
    differences = []
    for job in jobs:
        run = RunFolder(out / job.name)
        if not run.exists:
            continue
        try:
            difference = run.recipe().difference(job.recipe)
        except (ValueError, TypeError, KeyError) as error:
            differences.append(f"{run.path}: {error}")
            continue
        differences += [f"{run.path}: {line}" for line in difference]
    if differences:
        shown = "\n  ".join(differences[:12]) + ("\n  ..." if len(differences) > 12 else "")
        raise ValueError(
            f"{out} holds runs with other settings; choose another --out, or move these runs away:\n  {shown}"
        )


def check_teacher_of_runs(jobs: list[Job], out: Path) -> None:
    """Raises ValueError if the teacher changed since earlier students of the study were trained."""
    from ..lab.fingerprint import fingerprint_source

    now: dict[str, str | None] = {}
    for job in jobs:
        run = RunFolder(out / job.name)
        teacher = job.recipe.located(run.path).teacher
        if teacher is None or not run.manifest_file.is_file():
            continue
        before = run.manifest().get("teacher")
        if teacher not in now:
            now[teacher] = fingerprint_source(teacher) or before  # for a hub name, that of the first student
        if before != now[teacher]:
            raise ValueError(
                f"{run.path} was trained with other weights of the teacher {teacher} (sha256 {before}, now "
                f"{now[teacher]}), so the students are not comparable; restore the weights, or choose another --out"
            )


def check_space(jobs: list[Job], out: Path, at_once: int | None = None) -> None:
    """Raises OSError if the runs do not fit on the disk; with `at_once`, only so many have weights at a time."""
    sizes = sorted((_bytes_of(job.recipe) for job in jobs if not is_done(RunFolder(out / job.name))), reverse=True)
    needed = sum(sizes if at_once is None else sizes[:at_once])
    free = shutil.disk_usage(existing_parent(out)).free
    if needed > free:
        raise OSError(
            f"the runs need about {needed / 2**30:.1f} GiB in {out}, but {free / 2**30:.1f} GiB are free; choose "
            "another --out, or keep fewer checkpoints (--set keep_checkpoints=1)"
        )


def _bytes_of(recipe: Recipe) -> int:
    """The model and its checkpoints with AdamW's two moments, plus one checkpoint that is being written.

    0 if the student starts from a checkpoint on the hub that is not on this machine: training checks it again.
    """
    from ..lab.estimate import count_parameters, meta_student

    try:
        weights = 4 * count_parameters(meta_student(recipe)).total
    except OSError:
        return 0
    return weights + 3 * weights * (recipe.keep_checkpoints + 1)


def _train(
    job: Job, out: Path, table: Table, device: str | None, cache: Path | str | None, report_to: tuple[str, ...]
) -> None:
    from ..lab.training import train

    run = RunFolder(out / job.name)
    if run.finished:
        return
    table.start(job.name, "training")
    train(
        job.recipe, run.path, quiet=True, device=device, cache=cache, report_to=report_to,
        on_step=lambda record: table.step(job.name, record),
    )  # fmt: skip


def _evaluate(plan: Plan, job: Job, out: Path, table: Table, device: str | None, cache: Any) -> None:
    from ..lab.evaluation import DEFAULT_TASKS, evaluate
    from ..lab.evaluation.instruments import parse_instruments

    run = RunFolder(out / job.name)
    wanted = {"heldout", *plan.perplexity}
    known = read_table(run.evaluation_file) if run.evaluation_file.exists() else {}
    missing_sets = wanted - set(known.get("perplexity") or {})
    names = DEFAULT_TASKS if plan.tasks == ("paper",) else plan.tasks or ()
    missing_tasks = [task for task in names if task not in (known.get("tasks") or {})]
    instruments = [name for name in parse_instruments(plan.instruments) if name not in (known.get("instruments") or {})]
    if not missing_sets and not missing_tasks and not instruments:
        return
    table.start(job.name, "evaluating")
    sets: dict[str, Any] = {name: file for name, file in plan.perplexity.items() if name in missing_sets}
    if "heldout" in missing_sets:
        sets["heldout"] = None  # the held-out text of the run
    evaluate(
        run.path, perplexity=sets, tasks=missing_tasks, task_data=plan.task_data, engine=plan.engine,
        device=device, autocast=None if job.recipe.dtype == "float32" else job.recipe.dtype, cache=cache,
        instruments=instruments,
    )  # fmt: skip


def _inspect(job: Job, out: Path, table: Table, device: str | None) -> None:
    from ..lab.inspection import inspect

    run = RunFolder(out / job.name)
    if run.inspection_file.exists():
        return
    table.start(job.name, "inspecting")
    length = min(PAPER_LENGTH, job.recipe.sequence_length)
    inspect(run.path, sequences=PAPER_SEQUENCES, length=length, device=device)


def _heldout_perplexity(folder: Path) -> float | None:
    """Per word, the unit of the report."""
    run = RunFolder(folder)
    if not run.evaluation_file.exists():
        return None
    found: Any = read_table(run.evaluation_file)
    for key in ("perplexity", "heldout", "word"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, float) else None
