"""Trains a recipe in a run folder: builds student, teacher and data, checks that they fit, trains, saves the model.

    train(recipe, "runs/affine")      starts a run, or resumes it from the newest valid checkpoint

Errors that can be detected early are raised before the first step. With several ranks, every rank calls `train`
(started by torchrun or accelerate); rank 0 writes the files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ...files import write_json
from ...hf import STUDENTS
from ...hf.loading import load_tokenizer_of
from ...visible import printable
from ..data import Corpus, check_same_data, prepare
from ..device import choose_device
from ..distill.teacher import check_same_tokens, load_teacher
from ..distill.teacher_cache import cache_teacher_states
from ..estimate import make_utilisation
from ..fingerprint import fingerprint_model, fingerprint_source
from ..machine import describe_machine
from ..recipe import Recipe
from ..run import SCHEMA, RunFolder
from .checkpoints import Checkpoints, check_disk_space
from .compilation import compile_layers
from .contents import check_contents
from .distill_trainer import DistillTrainer
from .final_model import save_model
from .lock import check_folder, lock_run, prepare_run
from .nonfinite import NotFiniteError
from .pressure import check_pressure
from .progress import Progress, wants_progress
from .sequence_split import SequenceSplit
from .signals import Stopped, StopSignals
from .steplog import StepLog
from .stream_position import ResumableStream
from .student import build_student, check_fit, check_sources, check_teacher, explain_attention, fingerprint_start
from .trainer_arguments import check_report_to, training_arguments

CACHING_TOKENS = 2**15  # tokens per forward while the teacher's states are cached before training
BYTES_PER_PARAMETER = 12  # in a checkpoint: float32 weight and AdamW's two moments


def train(
    recipe: Recipe,
    folder: Path | str,
    *,
    resume: bool = True,
    quiet: bool | None = None,
    report_to: tuple[str, ...] = (),
    device: torch.device | str | None = None,
    cache: Path | str | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Trains a recipe in a folder and returns the folder; an existing run is resumed.

    >>> train(Recipe(data=("text.txt",), steps=20, warmup_steps=2), "runs/first")  # doctest: +SKIP

    Args:
        recipe: every setting. If the folder holds a run with other settings, ValueError lists the differences.
        folder: the run folder; created if it does not exist.
        resume: False raises ValueError if the folder already holds a run.
        quiet: True shows no progress; None shows it on a terminal.
        report_to: integrations of Trainer: ("tensorboard",) writes to the run folder; "trackio" and "wandb" get a run
            with the name of the folder.
        device: "cpu" or "cuda"; None uses a GPU if there is one.
        cache: folder for tokenized text; by default the user's cache folder.
        on_step: called on rank 0 with each entry of the log.

    Raises:
        Stopped: on SIGINT or SIGTERM, after the current step was saved. It is a SystemExit with code 130 or 143.
        NotFiniteError: a loss or gradient is not finite; the step was not applied.
        CheckpointError: a checkpoint could not be written; earlier checkpoints are unchanged.
    """
    run, device = RunFolder(folder), _device(device)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    recipe.micro_batches(ranks)  # first: a cheap check that fails most often
    check_report_to(report_to)
    first = int(os.environ.get("RANK", 0)) == 0
    check_folder(run, recipe, resume)
    if run.finished:
        if first:
            print(printable(f"{run.path} is already finished: its model is in {run.model}"), file=sys.stderr)
        return run.path
    with lock_run(run, first), _quiet_transformers():
        progress = Progress(recipe.steps, wants_progress(quiet) and first, recipe.name)
        try:
            return _train(recipe, run, ranks, device, report_to, cache, progress, on_step)
        except Stopped:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if first and run.exists:
                event = "stop" if isinstance(error, NotFiniteError | KeyboardInterrupt) else "error"
                with suppress(OSError):  # the disk may be the cause
                    run.add_event(event, reason=f"{type(error).__name__}: {error}")
            raise
        finally:
            progress.close()


def _train(
    recipe: Recipe,
    run: RunFolder,
    ranks: int,
    device: torch.device,
    report_to: tuple[str, ...],
    cache: Path | str | None,
    progress: Progress,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> Path:
    arguments = training_arguments(recipe, run, ranks, device=device, report_to=report_to)
    if arguments.world_size != ranks:
        raise ValueError(
            f"accelerate sees {arguments.world_size} ranks, but WORLD_SIZE is {ranks}; start the ranks with torchrun "
            "or accelerate launch"
        )
    first, device = arguments.process_index == 0, arguments.device
    sources = recipe.located(run.path)
    check_sources(sources)
    corpus = load_corpus(sources, cache)
    text: Any = corpus.train_dataset(recipe.steps * recipe.global_batch, recipe.data_seed)
    if corpus.streaming:
        text = ResumableStream(text, recipe.global_batch)
    heldout = corpus.heldout_dataset()
    student = build_student(sources)
    check_fit(sources, student, corpus.vocabulary_size)
    check_pressure(sources, student)
    sequence = None
    if recipe.sequence_parallel > 1:
        sequence = SequenceSplit(student, recipe.sequence_parallel, ranks, device)
    teacher = _load_teacher(sources, student, device)
    caches_teacher = recipe.remember_teacher and teacher is not None and recipe.kd_weight > 0
    if caches_teacher:
        text = cache_teacher_states(
            teacher, text, corpus.fingerprint, dtype=getattr(torch, recipe.dtype), cache=cache,
            batch=max(arguments.per_device_train_batch_size, CACHING_TOKENS // recipe.sequence_length),
            before=lambda: compile_layers(teacher) if recipe.compile else None,
        )  # fmt: skip
    attention = explain_attention(recipe, student, arguments.per_device_train_batch_size, device)
    if run.exists and run.manifest_file.is_file():
        check_same_data(manifest_part(run, "data", dict), corpus)
    teacher_hash = None if teacher is None else fingerprint_source(str(sources.teacher)) or fingerprint_model(teacher)
    student_hash = fingerprint_start(sources, student)
    if run.exists and run.manifest_file.is_file():
        check_same_teacher(run, sources, teacher_hash)
        check_same_start(run, sources, student_hash)
    identity = {"recipe": recipe.digest(), "data": corpus.fingerprint, "teacher": teacher_hash}
    check_stream = text.check if isinstance(text, ResumableStream) else None
    checkpoints = Checkpoints(
        run.checkpoints, recipe.keep_checkpoints, identity,
        lambda path, step: check_contents(path, step, student, check_stream),
    )  # fmt: skip
    parameters = sum(parameter.numel() for parameter in student.parameters())
    if first:
        missing = max(recipe.keep_checkpoints + 1 - len(checkpoints.steps()), 1)
        needed = parameters * (BYTES_PER_PARAMETER * missing + 4)
        check_disk_space(run.path, needed, f"{missing} checkpoints and the model")

    # From here on, files in the folder are written.
    start = _from_rank_0(prepare_run(run, recipe, checkpoints, progress) if first else None)
    if recipe.compile:
        compile_layers(student, teacher)
    done = 0 if start is None else checkpoints.step_of(start)

    def begin() -> None:
        """Called on rank 0 after the checkpoint was loaded: earlier files are not changed if loading fails."""
        _write_manifest(run, corpus, arguments, parameters, attention, teacher_hash, student_hash)
        StepLog(run.log_file).rewind(done)
        run.add_event("start" if start is None else "resume", step=done, ranks=ranks, device=str(device))

    signals = StopSignals()
    with _tensorboard_in(run.path / "tensorboard"):
        trainer = DistillTrainer(
            recipe, run, student, arguments, text, checkpoints=checkpoints, heldout=heldout, teacher=teacher,
            sequence=sequence, tokenizer=corpus.tokenizer, signals=signals, progress=progress, on_step=on_step,
            on_ready=begin,
            utilisation=make_utilisation(
                student, recipe.sequence_length, device, ranks, None if caches_teacher else teacher
            ),
        )  # fmt: skip
    # Before this point there is nothing to save, so signals keep their usual effect.
    with signals, closing(trainer.step_log):
        if start is None:
            trainer.train()
        else:
            trainer.resume_from(start)
    if trainer.stopped_by:
        stopped = Stopped(trainer.stopped_by, trainer.state.global_step, run.path)
        if first:
            run.add_event("stop", step=stopped.step, reason=stopped.signal)
            progress.say(str(stopped))
        raise stopped
    save_model(trainer, run, corpus.tokenizer)
    return run.path


def check_same_teacher(run: RunFolder, recipe: Recipe, now: str | None) -> None:
    """Raises ValueError if the teacher's weights changed since the run started."""
    before = run.manifest().get("teacher")
    if before != now:
        raise ValueError(
            f"the weights of the teacher {recipe.teacher!r} changed since {run.path} started (sha256 {before}, now "
            f"{now}); restore the old weights to resume, or start a new run"
        )


def check_same_start(run: RunFolder, recipe: Recipe, now: str | None) -> None:
    """Raises ValueError if the checkpoint that the student starts from changed since the run started."""
    before = run.manifest().get("student", now)  # runs made before it was recorded have none
    if before != now:
        raise ValueError(
            f"the checkpoint of the student {recipe.student!r} changed since {run.path} started (sha256 {before}, now "
            f"{now}); restore the old weights to resume, or start a new run"
        )


def manifest_part(run: RunFolder, key: str, kind: type) -> Any:
    """One entry of manifest.json; raises ValueError if it is missing or has another type."""
    found = run.manifest().get(key)
    if not isinstance(found, kind):
        words = "an object" if kind is dict else "a list"
        raise ValueError(f"{run.manifest_file} must have {key} as {words}; restore the file, or start a new run")
    return found


def load_corpus(recipe: Recipe, cache: Path | str | None = None) -> Corpus:
    """The data of a recipe, tokenized and packed, or from the cache. Tokenizers that do not agree raise first."""
    if not recipe.data:
        raise ValueError(
            "data is empty: give text, jsonl or parquet files, folders, globs, or hf:NAME[:CONFIG][@SPLIT]"
        )
    known = _known_tokenizers(recipe)
    corpus = prepare(
        recipe.data,
        sequence_length=recipe.sequence_length,
        tokenizer=recipe.tokenizer if recipe.tokenizer is not None else next(iter(known.values()), None),
        vocabulary_size=recipe.vocabulary_size,
        document_boundaries=recipe.document_boundaries,
        special_tokens=recipe.special_tokens,
        heldout=recipe.heldout,
        text_column=recipe.text_column,
        streaming=recipe.streaming,
        cache=cache,
        seed=recipe.data_seed,
    )
    if recipe.tokenizer is not None:
        for owner, tokenizer in known.items():
            check_same_tokens(corpus.tokenizer, tokenizer, "run", owner)
    return corpus


def _known_tokenizers(recipe: Recipe) -> dict[str, Any]:
    """The tokenizers of the student's checkpoint and of the teacher, by owner; if there are two, they are the same."""
    sources = {} if recipe.student in STUDENTS else {"student": recipe.student}
    if recipe.teacher is not None and recipe.teacher not in sources.values():
        sources["teacher"] = recipe.teacher
    found = {owner: load_tokenizer_of(source, owner) for owner, source in sources.items()}
    known = {owner: tokenizer for owner, tokenizer in found.items() if tokenizer is not None}
    if sources and not known and recipe.tokenizer is None:
        owner, source = next(iter(sources.items()))
        raise ValueError(
            f"{owner} {source!r} has no tokenizer in its folder; set tokenizer to the one it was trained with"
        )
    if len(known) == 2:
        check_same_tokens(known["student"], known["teacher"])
    return known


def _device(device: torch.device | str | None) -> torch.device:
    chosen = choose_device(device)
    if chosen.index:
        raise ValueError(
            f"device={str(chosen)!r}: a process uses the first GPU that it sees; choose another with "
            f"CUDA_VISIBLE_DEVICES={chosen.index}, or use several GPUs with torchrun"
        )
    return chosen


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Switches off transformers' progress bars and warnings: a run has its own bar."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _tensorboard_in(folder: Path) -> Iterator[None]:
    """Sets the TensorBoard folder for a Trainer that is created inside, unless the user has set one."""
    name = "TENSORBOARD_LOGGING_DIR"
    own = name in os.environ
    os.environ.setdefault(name, str(folder))
    try:
        yield
    finally:
        if not own:
            del os.environ[name]


def _load_teacher(recipe: Recipe, student: Any, device: torch.device) -> Any:
    if recipe.teacher is None:
        return None
    teacher = load_teacher(recipe.teacher, device=device, dtype=getattr(torch, recipe.dtype))
    check_teacher(recipe, student, teacher)
    return teacher


def _from_rank_0(value: Any) -> Any:
    values = [value]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values)
    return values[0]


def _write_manifest(
    run: RunFolder,
    corpus: Corpus,
    arguments: TrainingArguments,
    parameters: int,
    attention: dict[str, Any],
    teacher: str | None,
    student: str | None,
) -> None:
    """Writes the facts about the run; a resumed run keeps those of its start and adds a session."""
    machine = describe_machine(arguments.device)
    session = machine | {"ranks": arguments.world_size, "attention": attention}
    if run.manifest_file.is_file():
        manifest = run.manifest() | {"sessions": [*manifest_part(run, "sessions", list), session]}
    else:
        manifest = {"schema": SCHEMA} | session | {
            "parameters": parameters,
            "data": corpus.manifest,
            "teacher": teacher,
            "student": student,
            "train_tokens": corpus.stats["tokens"],
            "heldout_tokens": corpus.stats["heldout_tokens"],
            "sessions": [session],
        }  # fmt: skip
    write_json(run.manifest_file, manifest)
