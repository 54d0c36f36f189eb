"""Scores a model on tasks with lm-evaluation-harness (0.4.10 or newer), with data from files or from the hub."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...messages import did_you_mean
from .scoring import divides_by_keys, evaluating
from .tasks import LOCAL, TASKS, TaskFile, check_items, harness_folder, write_definition

BATCH_SIZE = {"cpu": 16, "cuda": 64}
BOOTSTRAPS = 1000  # for standard errors of metrics that are not means; the default of 100,000 takes minutes


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[TaskFile | str],
    *,
    batch_size: int | str | None = None,
    limit: int | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """{task: {"n", "metrics": {name: {"value", "stderr"}}, "version"}}.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer.
        tasks: task files of `find_tasks`, or names of the harness's tasks, whose data it downloads.
        batch_size: of the harness, a number or "auto".
        limit: use only the first `limit` items of each task.
        autocast: dtype of the forward.
        seed: of the harness's samplers; zero-shot scores do not depend on it.
    """
    harness_folder()
    for task in tasks:
        if isinstance(task, TaskFile) and task.form != "records":
            check_items(task)  # the harness would score an item whose gold index is out of range
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    if divides_by_keys(model):
        raise ValueError(
            'lm-evaluation-harness pads batches and passes no mask; with bias_length="keys" padding changes scores, so '
            'they would depend on the batch; use engine="direct", which batches sequences of equal length'
        )
    names = [task for task in tasks if isinstance(task, str)]
    harness_only = [task for task in names if is_harness_only(task)]
    with tempfile.TemporaryDirectory(prefix="affine_tasks_") as folder, evaluating(model):
        asked = [write_definition(task, Path(folder)) for task in tasks if not is_harness_only(task)] + harness_only
        # Loading the thousands of default task definitions takes ten seconds.
        manager = TaskManager(include_path=folder, include_defaults=bool(harness_only))
        lm = HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # the harness adds a padding token
            batch_size=batch_size or BATCH_SIZE["cpu" if model.device.type == "cpu" else "cuda"],
            softmax_dtype="float32",
            mixed_precision_dtype=None if autocast is None else str(autocast).removeprefix("torch."),
        )
        try:
            found = simple_evaluate(
                model=lm, tasks=asked, task_manager=manager, limit=limit, log_samples=False, num_fewshot=None,
                bootstrap_iters=BOOTSTRAPS, random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
                fewshot_random_seed=seed,
            )  # fmt: skip
        except Exception as error:
            if names and is_offline(error):
                raise OSError(
                    f"the data of {', '.join(names)} is downloaded from the hub, which cannot be reached; pass "
                    "task_data=DIR with their files, named like piqa.jsonl or arc_easy_test.jsonl"
                ) from error
            raise
    return {name.removesuffix(LOCAL): read_result(found, name) for name in asked}


def is_harness_only(task: TaskFile | str) -> bool:
    """True for a task that this package does not define."""
    return isinstance(task, str) and task not in TASKS


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a task that does not exist."""
    harness_only = [name for name in names if is_harness_only(name)]
    if harness_only:
        harness_folder()
        from lm_eval.tasks import TaskManager

        known = TaskManager().all_tasks
        for name in harness_only:
            if name not in known:
                raise ValueError(f"task {name!r} is not a task of lm-evaluation-harness{did_you_mean(name, known)}")


def read_result(found: Any, name: str) -> dict[str, Any]:
    """One task of the harness's results: its keys are "acc,none" and "acc_stderr,none"."""
    entry = found["results"][name]
    metrics = {}
    for key, value in entry.items():
        metric, comma, _ = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = entry.get(key.replace(metric, f"{metric}_stderr", 1))
            metrics[metric] = {"value": value, "stderr": stderr if isinstance(stderr, float | int) else None}
    n = found.get("n-samples", {}).get(name, {}).get("effective")
    return {"n": n, "metrics": metrics, "version": found.get("versions", {}).get(name)}


def is_offline(error: BaseException | None) -> bool:
    """True if the error, or one that it wraps, is a failed connection to the hub."""
    words = (
        "offline",
        "connection",
        "resolve",
        "couldn't reach",
        "not reach",
        "max retries",
        "timed out",
        "localentry",
    )
    while error is not None:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, ConnectionError | TimeoutError) or any(word in text for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def default_metric(metrics: dict[str, Any]) -> str:
    """The metric that tables report for a task that this package does not define."""
    for name in ("acc_norm", "acc", "exact_match", "f1"):
        if name in metrics:
            return name
    return next(iter(metrics))
