"""Evaluates a run, a checkpoint or a model: perplexities and task scores, written to evaluation.json.

>>> evaluate("runs/affine-0", perplexity={"c4": "heldout/c4.jsonl"}, task_data="evals")  # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ...files import kind, plain_numbers, read_table, write_json
from ..fingerprint import fingerprint_folder, fingerprint_model
from ..machine import describe_machine, now
from ..models import find_model, load, parse_dtype
from ..run import SCHEMA, RunFolder
from .direct import run_direct
from .harness import check_names, default_metric, run_harness
from .instruments import SEQUENCES, format_instruments, parse_instruments, run_instruments
from .perplexity import perplexity as measure_perplexity
from .perplexity import split_articles
from .scoring import max_length, mechanism_of
from .tasks import DEFAULT_TASKS, TASKS, TaskFile, choose_tasks, find_tasks, harness_folder

DEFAULT_LENGTH = 1024
PAPER = "paper"  # stands for DEFAULT_TASKS in a list of tasks


def evaluate(
    path_or_model: Any,
    *,
    tokenizer: Any = None,
    perplexity: Mapping[str, Any] | Sequence[str | Path] = (),
    tasks: Sequence[str] | None = None,
    task_data: str | Path | None = None,
    engine: Literal["harness", "direct"] = "harness",
    batch_size: int | None = None,
    length: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    output: str | Path | None = None,
    instruments: Sequence[str] | str | None = None,
    sequences: int = SEQUENCES,
    seed: int = 0,
    cache: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Evaluates a model and returns the content of evaluation.json; earlier results of the same weights are kept.

    Scores do not depend on the order of documents or items, nor (up to rounding) on the batch size.

    Args:
        path_or_model: a run folder, a folder that save_pretrained wrote, or a loaded model.
        tokenizer: needed for a loaded model, or if the folder has none.
        perplexity: {name: file}, or files, which are then named by their stems. A file is a source of
            `lab.data.read_documents` (text, jsonl, parquet, folders), a list of them, or None for the text that the run
            held out.
        tasks: task names; "paper" or None selects the paper's six tasks and LAMBADA. None selects no task if only
            perplexity is requested.
        task_data: a folder of task files (see tasks.py); None lets lm-evaluation-harness download its own.
        engine: "harness" runs lm-evaluation-harness; "direct" scores ready-made contexts without it (it need not be
            installed), in fewer and larger forwards, with the same accuracies.
        batch_size: maximum number of sequences per forward; None chooses by device.
        length: tokens per perplexity window; None: the run's sequence length, else the bias_length, else 1024.
        stride: scored tokens per window, see perplexity.py.
        limit: use only the first `limit` documents and items.
        device: None uses a GPU if there is one. A loaded model stays on its device.
        dtype: of the weights; None: as saved.
        autocast: run the forward under autocast with this dtype ("bfloat16": how models are trained here).
        output: a file, or a folder for evaluation.json; None: the run folder, or no file for other models.
        instruments: "all" or names of instruments.py (eviction, quantisation, length), measured on the text that the
            run held out, or else on the first text of `perplexity`.
        sequences: number of sequences for the instruments.
        seed: of the harness's samplers; zero-shot scores do not depend on it.
        cache: a dict that is shared between calls, so that text is tokenised once for models with the same tokenizer.
    """
    if engine not in ("harness", "direct"):
        raise ValueError(f'engine must be "harness" or "direct", got {engine!r}')
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be None or an integer of at least 1, got {limit!r}")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size must be None or an integer of at least 1, got {batch_size!r}")
    if isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 1:
        raise ValueError(f"sequences must be an integer of at least 1, got {sequences!r}")
    cache = {} if cache is None else cache
    texts, measured = _named_texts(perplexity), parse_instruments(instruments)
    chosen = _chosen_tasks(tasks, task_data, engine, bool(texts or measured))
    casting = parse_dtype("autocast", autocast)
    from_disk = isinstance(path_or_model, str | Path)
    folder, run = find_model(path_or_model) if from_disk else (None, None)
    documents = {name: _read(name, source, run, limit, cache) for name, source in texts.items()}
    if measured:
        has_heldout = run is not None and run.exists and bool(run.recipe().heldout)
        first = next(iter(documents.values()), None)
        inspected = _read("heldout", None, run, limit, cache) if has_heldout or first is None else first
    if folder is None:
        model = check_loaded_model(path_or_model, dtype)
    else:
        model, tokenizer = load(folder, tokenizer, device=device, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"tokenizer must be given: {folder or 'a loaded model'} has none")
    identity = fingerprint_model(model) if folder is None else fingerprint_folder(folder)

    numerics = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "autocast": None if casting is None else str(casting).removeprefix("torch."),
    }

    results: dict[str, Any] = {"perplexity": {}, "tasks": {}, "instruments": {}}
    window = length or default_length(model, run)
    for name, (source, texts_of_source) in documents.items():
        found = measure_perplexity(
            model, tokenizer, texts_of_source, length=window, stride=stride, batch_size=batch_size, autocast=casting,
            cache=cache,
        )  # fmt: skip
        found["protocol"] |= {"source": source, "limit": limit, "date": now()}
        results["perplexity"][name] = found
    if chosen:
        if engine == "direct":
            scores = run_direct(
                model, tokenizer, [task for task in chosen if isinstance(task, TaskFile)], batch_size=batch_size,
                limit=limit, autocast=casting, cache=cache,
            )  # fmt: skip
        else:
            scores = run_harness(
                model, tokenizer, chosen, batch_size=batch_size, limit=limit, autocast=casting, seed=seed
            )
        for task in chosen:
            name = task.task if isinstance(task, TaskFile) else task
            how = {"engine": engine, "limit": limit, **numerics, "date": now()}
            results["tasks"][name] = task_entry(task, scores[name]) | how

    if measured:
        results["instruments"] = run_instruments(
            model, tokenizer, inspected[1], measured, source=inspected[0], length=window, sequences=sequences,
            recipe=run.recipe() if run is not None and run.exists else None, autocast=casting,
        )  # fmt: skip

    made = describe_machine(next(model.parameters()).device) | {"model": identity, **numerics}
    target = output_file(output, run)
    merged = plain_numbers({"schema": SCHEMA, "made": made, **merge(target, results, identity)})
    if target is not None:
        write_json(target, merged)
    return merged


def format_evaluation(path: Any, found: dict[str, Any]) -> str:
    """The content of evaluation.json as lines for a terminal."""
    lines = [str(path)]
    if found["perplexity"]:
        lines.append(f"  {'perplexity':16} {'token':>10} {'word':>10} {'byte':>10} {'bits/byte':>10} {'documents':>10}")
    for name, entry in found["perplexity"].items():
        numbers = " ".join(f"{_number(entry[key]):>10}" for key in ("token", "word", "byte", "bits_per_byte"))
        lines.append(f"  {name:16} {numbers} {entry['documents']:>10}")
    if found["tasks"]:
        lines.append(f"  {'task':16} {'metric':>10} {'value':>10} {'±':>10} {'items':>10}")
    for name, entry in found["tasks"].items():
        value, stderr = _number(entry["value"]), _number(entry["stderr"])
        lines.append(f"  {name:16} {entry['metric']:>10} {value:>10} {stderr:>10} {entry['n']:>10}")
    return "\n".join([*lines, *format_instruments(found["instruments"])])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def check_loaded_model(model: Any, dtype: torch.dtype | str | None) -> Any:
    """The model itself; raises if another dtype than its own is requested."""
    wanted = parse_dtype("dtype", dtype)
    if wanted not in (None, model.dtype):
        raise ValueError(
            f"dtype must be left out for a loaded model, whose weights are {model.dtype}, got {wanted}; load it in "
            "that dtype, or pass autocast"
        )
    return model


def default_length(model: Any, run: RunFolder | None) -> int:
    """The training length of the model if it is known, else 1024; at most the model's maximum length."""
    length: Any = None
    if run is not None and run.exists:
        length = run.recipe().sequence_length
    elif (mechanism := mechanism_of(model)) is not None:
        length = mechanism["bias_length"]
    return min(length if isinstance(length, int) else DEFAULT_LENGTH, max_length(model))


def task_entry(task: TaskFile | str, found: dict[str, Any]) -> dict[str, Any]:
    """The entry of a task in evaluation.json: the metric that tables report, and all metrics."""
    metrics = found["metrics"]
    if isinstance(task, TaskFile):
        metric = task.metric
        source = {"file": task.path.name, "split": task.split or None, "form": task.form, "sha256": task.sha256()}
    else:
        metric = TASKS[task].metric if task in TASKS else default_metric(metrics)
        source = {"file": None, "split": TASKS[task].split if task in TASKS else None, "form": "hub", "sha256": None}
    return {"metric": metric, **metrics[metric], "n": found["n"], "metrics": metrics, **source}


def merge(target: Path | None, results: dict[str, Any], identity: str) -> dict[str, Any]:
    """The new results merged into those of the file; a file of other weights is replaced, with a warning."""
    if target is None or not target.is_file():
        return results
    old = read_table(target)
    parts = {part: old.get(part) or {} for part in ("made", *results)}
    for part, found in parts.items():
        if not isinstance(found, dict):
            raise ValueError(f"{target}: {part} must be an object, got {kind(found)}; was it edited? Move it away")
    if parts["made"].get("model") != identity:
        warnings.warn(f"{target} holds results of other weights, which are replaced", stacklevel=3)
        return results
    return {part: parts[part] | results[part] for part in results}


def output_file(output: str | Path | None, run: RunFolder | None) -> Path | None:
    if output is None:
        return None if run is None else run.evaluation_file
    path = Path(output)
    return path if path.suffix == ".json" and not path.is_dir() else path / "evaluation.json"


def _chosen_tasks(
    tasks: Sequence[str] | None, task_data: str | Path | None, engine: str, has_texts: bool
) -> list[TaskFile] | list[str]:
    if isinstance(tasks, str):
        raise TypeError(f"tasks must be a list of names, got the string {tasks!r}")
    if tasks is not None:
        tasks = [name for given in tasks for name in (DEFAULT_TASKS if given == PAPER else (given,))]
        if not tasks:
            return []
    if tasks is None and task_data is None and has_texts:
        return []
    if engine == "harness":
        harness_folder()
    if task_data is not None:
        return choose_tasks(tasks, find_tasks(task_data))
    if engine == "direct":
        raise ValueError('engine="direct" needs task_data, a folder with ready-made contexts, got None')
    names = list(DEFAULT_TASKS if tasks is None else tasks)
    check_names(names)
    return names


def _named_texts(perplexity: Mapping[str, Any] | Sequence[str | Path]) -> dict[str, Any]:
    if isinstance(perplexity, str | Path):
        perplexity = [perplexity]
    if isinstance(perplexity, Mapping):
        return dict(perplexity)
    named: dict[str, Any] = {}
    for file in perplexity:
        name = Path(file).name.split(".")[0]
        if name in named:
            raise ValueError(f"two files of perplexity are called {name!r}; give them names: {{'a': ..., 'b': ...}}")
        named[name] = file
    return named


def _read(
    name: str, source: Any, run: RunFolder | None, limit: int | None, cache: dict[Any, Any]
) -> tuple[str, list[str]]:
    """(description of the source, documents) of a held-out set."""
    from ..data import heldout_documents, read_documents

    if source is None:
        if run is None or not run.exists:
            raise ValueError(f"perplexity[{name!r}] must name a file: None means held-out text, which only a run has")
        found = heldout_documents(run.recipe())
        if found is None:
            raise ValueError(f"perplexity[{name!r}] must name a file: the run has no held-out text (heldout = 0)")
        words, texts = found
    else:
        words = str(source) if isinstance(source, str | Path) else ", ".join(map(str, source))
        texts = read_documents(source)
    if ("text", words) not in cache:
        cache["text", words] = split_articles(list(texts))
    return words, cache["text", words][:limit]
