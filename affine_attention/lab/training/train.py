"""Turns a recipe into a run folder: builds student, teacher and data, checks that they fit, trains, keeps the model.

    train(recipe, "runs/affine")      starts, or goes on where the newest whole checkpoint is

Everything that can be known to be wrong is an error before the first step. On many ranks every rank calls `train`
(torchrun or accelerate start them); rank 0 writes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from ...visible import printable
from ..data import Corpus, check_same_data, prepare
from ..device import choose_device
from ..distill.remembered import remember
from ..distill.teacher import check_same_tokens, load_teacher, load_teacher_tokenizer
from ..estimate import make_utilisation
from ..fingerprint import fingerprint_model, fingerprint_source
from ..recipe import Recipe
from ..run import SCHEMA, RunFolder, describe_machine, write_json
from .arguments import training_arguments
from .checkpoints import Checkpoints, check_room, sync, temporary_name
from .claim import check_folder, claim, open_run
from .contents import check_contents
from .guard import NotFiniteError, Stopped, StopSignals
from .places import KeptPlaces
from .progress import Progress, wants_progress
from .state import whole_on_cpu
from .steplog import StepLog
from .student import build_student, check_fit, check_teacher, explain_attention
from .trainer import DistillTrainer

REMEMBERED_TOKENS = 2**15  # in one forward of a teacher that is run before the training
BYTES_OF_A_PARAMETER = 12  # float32 weights and AdamW's two averages


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
    """Trains by a recipe in a folder, and returns the folder; a run that is there already goes on.

    >>> train(Recipe(data=("text.txt",), steps=20, warmup_steps=2), "runs/first")  # doctest: +SKIP

    Args:
        recipe: every setting. A folder that holds a run of other settings is refused, with what differs.
        folder: the run; made if it is not there.
        resume: False refuses a folder that holds a run.
        quiet: True shows no progress; None shows it on a terminal.
        report_to: integrations of Trainer, such as ("tensorboard",).
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        cache: where tokenized text is kept; by default the user's cache folder.
        on_step: called with each line of the log, on rank 0.

    Raises:
        Stopped: SIGINT or SIGTERM came; the step was finished and saved. It is a SystemExit with code 130 or 143.
        NotFiniteError: a loss or gradient was not finite; nothing was changed by that step.
        CheckpointError: a checkpoint could not be written; those before it are there.
    """
    run, device = RunFolder(folder), _device(device)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    recipe.micro_batches(ranks)  # the arithmetic first: it costs nothing and is most often wrong
    first = int(os.environ.get("RANK", 0)) == 0
    check_folder(run, recipe, resume)
    if run.finished:
        if first:
            print(printable(f"{run.path} is finished: its model is in {run.model}"), file=sys.stderr)
        return run.path
    with claim(run, first), _quiet():
        progress = Progress(recipe.steps, wants_progress(quiet) and first, recipe.name)
        try:
            return _train(recipe, run, ranks, device, report_to, cache, progress, on_step)
        except Stopped:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if first and run.exists:
                event = "stop" if isinstance(error, NotFiniteError | KeyboardInterrupt) else "error"
                with suppress(OSError):  # the disk may be what has failed
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
            f"accelerate sees {arguments.world_size} ranks where WORLD_SIZE says {ranks}; start ranks with torchrun or "
            "accelerate launch"
        )
    first, device = arguments.process_index == 0, arguments.device
    sources = recipe.located(run.path)
    corpus = load_corpus(sources, cache)
    text: Any = corpus.train_dataset(recipe.steps * recipe.global_batch, recipe.data_seed)
    if corpus.streaming:
        text = KeptPlaces(text, recipe.global_batch)
    heldout = corpus.heldout_dataset()
    student = build_student(recipe)
    check_fit(recipe, student, corpus.vocabulary_size)
    teacher = _load_teacher(sources, student, device)
    remembers = recipe.remember_teacher and teacher is not None and recipe.kd_weight > 0
    if remembers:
        text = remember(
            teacher, text, corpus.fingerprint, dtype=getattr(torch, recipe.dtype), cache=cache,
            batch=max(arguments.per_device_train_batch_size, REMEMBERED_TOKENS // recipe.sequence_length),
            before=lambda: _compile_layers(teacher) if recipe.compile else None,
        )  # fmt: skip
    attention = explain_attention(recipe, student, arguments.per_device_train_batch_size, device)
    if run.exists and run.manifest_file.is_file():
        check_same_data(manifest_part(run, "data", dict), corpus)
    teacher_is = None if teacher is None else fingerprint_source(str(sources.teacher)) or fingerprint_model(teacher)
    if run.exists and run.manifest_file.is_file():
        check_same_teacher(run, sources, teacher_is)
    identity = {"recipe": recipe.digest(), "data": corpus.fingerprint, "teacher": teacher_is}
    check_place = text.check if isinstance(text, KeptPlaces) else None
    checkpoints = Checkpoints(
        run.checkpoints, recipe.keep_checkpoints, identity,
        lambda path, step: check_contents(path, step, student, check_place),
    )  # fmt: skip
    parameters = sum(parameter.numel() for parameter in student.parameters())
    if first:
        missing = max(recipe.keep_checkpoints + 1 - len(checkpoints.steps()), 1)
        check_room(run.path, parameters * (BYTES_OF_A_PARAMETER * missing + 4), f"{missing} checkpoints and the model")

    # From here on the folder is written.
    start = _from_rank_0(open_run(run, recipe, checkpoints, progress) if first else None)
    if recipe.compile:
        _compile_layers(student, teacher)
    done = 0 if start is None else checkpoints.step_of(start)

    def begin() -> None:
        """Of rank 0. Nothing of an earlier session is changed before its checkpoint has been loaded."""
        _write_manifest(run, corpus, arguments, parameters, attention, teacher_is)
        StepLog(run.log_file).rewind(done)
        run.add_event("start" if start is None else "resume", step=done, ranks=ranks, device=str(device))

    signals = StopSignals()
    with _tensorboard_in(run.path / "tensorboard"):
        trainer = DistillTrainer(
            recipe, run, student, arguments, text, checkpoints=checkpoints, heldout=heldout, teacher=teacher,
            tokenizer=corpus.tokenizer, signals=signals, progress=progress, on_step=on_step, on_ready=begin,
            utilisation=make_utilisation(
                student, recipe.sequence_length, device, ranks, None if remembers else teacher
            ),
        )  # fmt: skip
    # Before this there is nothing to save, so a signal may do what it always does.
    with signals, closing(trainer.step_log):
        if start is None:
            trainer.train()
        else:
            trainer.go_on_from(start)
    if trainer.stopped_by:
        stopped = Stopped(trainer.stopped_by, trainer.state.global_step, run.path)
        if first:
            run.add_event("stop", step=stopped.step, reason=stopped.signal)
            progress.say(str(stopped))
        raise stopped
    keep_model(trainer, run, corpus.tokenizer)
    return run.path


def check_same_teacher(run: RunFolder, recipe: Recipe, now: str | None) -> None:
    """Refuses to go on with a teacher whose weights were replaced since the run began."""
    before = run.manifest().get("teacher")
    if before != now:
        raise ValueError(
            f"the weights of the teacher {recipe.teacher!r} are not those that {run.path} began with (sha256 {before}, "
            f"now {now}); bring the old weights back to resume, or start a new run"
        )


def manifest_part(run: RunFolder, key: str, kind: type) -> Any:
    """One part of manifest.json; an error names the file where it is missing or of another kind."""
    found = run.manifest().get(key)
    if not isinstance(found, kind):
        words = "an object" if kind is dict else "a list"
        raise ValueError(f"{run.manifest_file} must have {key} as {words}; put the old file back, or start a new run")
    return found


def load_corpus(recipe: Recipe, cache: Path | str | None = None) -> Corpus:
    """The data of a recipe: read, tokenized and packed, or found in the cache."""
    if not recipe.data:
        raise ValueError(
            "data is empty: name text, jsonl or parquet files, folders, globs, or hf:NAME[:CONFIG][@SPLIT]"
        )
    corpus = prepare(
        recipe.data,
        sequence_length=recipe.sequence_length,
        tokenizer=recipe.tokenizer if recipe.tokenizer is not None else _teacher_tokenizer(recipe),
        vocabulary_size=recipe.vocabulary_size,
        document_boundaries=recipe.document_boundaries,
        special_tokens=recipe.special_tokens,
        heldout=recipe.heldout,
        text_column=recipe.text_column,
        streaming=recipe.streaming,
        cache=cache,
        seed=recipe.data_seed,
    )
    if recipe.teacher is not None and recipe.tokenizer is not None:
        theirs = load_teacher_tokenizer(recipe.teacher)
        if theirs is not None:
            check_same_tokens(corpus.tokenizer, theirs)
    return corpus


def _teacher_tokenizer(recipe: Recipe) -> Any:
    if recipe.teacher is None:
        return None
    tokenizer = load_teacher_tokenizer(recipe.teacher)
    if tokenizer is None:
        raise ValueError(
            f"teacher {recipe.teacher!r} has no tokenizer beside it; name the one that it was trained with"
        )
    return tokenizer


def keep_model(trainer: DistillTrainer, run: RunFolder, tokenizer: Any) -> None:
    """Writes model/ beside and renames it: where it is, the run is finished. Every rank must call."""
    from safetensors import SafetensorError

    model = trainer.model
    state = {name: whole_on_cpu(tensor) for name, tensor in model.state_dict().items()} if _is_sharded(model) else None
    if trainer.is_world_process_zero():
        beside = run.path / temporary_name("model")
        try:
            beside.mkdir()
            model.save_pretrained(beside, state_dict=state)
            tokenizer.save_pretrained(beside)
            for path in (*beside.iterdir(), beside):
                if path.is_file():
                    path.chmod(0o666 & ~_umask())  # safetensors' writer makes files that only their owner can read
                sync(path)
            if run.model.is_dir():  # to remove a pipe in its place would wait for somebody who writes to it
                shutil.rmtree(run.model)
            os.rename(beside, run.model)
            sync(run.path)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(run.path).free
            raise OSError(
                f"the model could not be written to {run.model}: {error} ({free:,} bytes free on its disk); the last "
                "checkpoint is there, so training again writes the model alone"
            ) from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        run.add_event("finish", step=trainer.state.global_step, seconds=round(trainer.watch.seconds, 3))
    trainer.accelerator.wait_for_everyone()


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _device(device: torch.device | str | None) -> torch.device:
    chosen = choose_device(device)
    if chosen.index:
        raise ValueError(
            f"device={str(chosen)!r}: one process takes the first GPU that it sees; choose another with "
            f"CUDA_VISIBLE_DEVICES={chosen.index}, or take several with torchrun"
        )
    return chosen


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, transformers keeps its bars and advice to itself: a run has one bar, and errors are raised."""
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
    """Where Trainer's TensorBoard integration, made inside, writes; a user's own choice stands."""
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


def _compile_layers(*models: nn.Module | None) -> None:
    """Each layer by itself, in place: the mask is made outside, and no name in the state dict changes.

    All layers of a model share one graph. What earlier runs of this process compiled is forgotten: dynamo keeps a few
    graphs of one function and then falls back to eager code, which nobody would notice.
    """
    torch._dynamo.reset()
    for model in models:
        if model is not None:
            _compile_in_place(model)


# Four projections read the normed input where plain attention has three. In backward their gradients are added up, and
# inductor writes what reads more than four tensors to memory, in float32, to read it back in the norm's backward.
COMPILE_OPTIONS = {"realize_reads_threshold": 8}


def _compile_in_place(model: nn.Module) -> None:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(options=COMPILE_OPTIONS)


def _write_manifest(
    run: RunFolder,
    corpus: Corpus,
    arguments: TrainingArguments,
    parameters: int,
    attention: dict[str, Any],
    teacher: str | None,
) -> None:
    """What someone needs to know about the run; a resumed one keeps the facts of its start and adds a session."""
    machine = describe_machine(arguments.device)
    session = machine | {"ranks": arguments.world_size, "attention": attention}
    if run.manifest_file.is_file():
        manifest = run.manifest() | {"sessions": [*manifest_part(run, "sessions", list), session]}
    else:
        manifest = {"schema": SCHEMA} | session | {
            "parameters": parameters,
            "data": corpus.manifest,
            "teacher": teacher,
            "train_tokens": corpus.stats["tokens"],
            "heldout_tokens": corpus.stats["heldout_tokens"],
            "sessions": [session],
        }  # fmt: skip
    write_json(run.manifest_file, manifest)


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
