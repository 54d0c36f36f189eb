"""Scores ready-made task contexts without lm-evaluation-harness: one pass over all tasks, sorted by length.

Same tokens, metrics and tie-breaking (the first of equal choices) as the harness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .scoring import Request, Score, encode_pairs, fingerprint_tokenizer, max_length, score
from .tasks import TaskFile, read_items


def run_direct(
    model: Any,
    tokenizer: Any,
    files: Sequence[TaskFile],
    *,
    batch_size: int | None = None,
    limit: int | None = None,
    autocast: torch.dtype | None = None,
    cache: dict[Any, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """{task: {"n", "metrics": {name: {"value", "stderr"}}}} for tasks with ready-made contexts.

    Args:
        model: a transformers causal LM.
        tokenizer: its tokenizer.
        files: task files of `find_tasks`.
        batch_size: maximum number of sequences per forward.
        limit: use only the first `limit` items of each task.
        autocast: dtype of the forward.
        cache: a dict that keeps items and tokens for further models with the same tokenizer.
    """
    cache = {} if cache is None else cache
    words = fingerprint_tokenizer(tokenizer)
    longest = max_length(model)
    tasks: list[tuple[TaskFile, list[dict[str, Any]], int]] = []
    requests: list[Request] = []
    for file in files:
        if file.form == "records":
            raise ValueError(
                f'engine="direct" reads ready-made contexts (ctx, choices, gold), {file.path} holds original records '
                f'of {file.task}; use engine="harness"'
            )
        key = ("task", words, longest, file.path, file.path.stat().st_mtime_ns, limit)
        if key not in cache:
            cache[key] = read_task(file, tokenizer, longest, limit)
        items, encoded = cache[key]
        tasks.append((file, items, len(requests)))
        requests += encoded
    scores = score(model, requests, batch_size=batch_size, autocast=autocast)
    results = {}
    for file, items, start in tasks:
        samples: dict[str, list[float]] = {metric: [] for metric in file.metrics}
        for item in items:
            number = len(choices_of(item, file.form))
            for metric, value in measure(item, file.form, scores[start : start + number]).items():
                if metric in samples:
                    samples[metric].append(value)
            start += number
        results[file.task] = {
            "n": len(items),
            "metrics": {metric: aggregate(metric, values) for metric, values in samples.items()},
        }
    return results


def read_task(
    file: TaskFile, tokenizer: Any, longest: int, limit: int | None
) -> tuple[list[dict[str, Any]], list[Request]]:
    items: list[dict[str, Any]] = []
    for item in read_items(file):
        if limit is not None and len(items) == limit:
            break
        items.append(item)
    if not items:
        raise ValueError(f"{file.path} must hold at least one item, got none (limit={limit})")
    return items, encode_pairs(tokenizer, [pair for item in items for pair in pairs_of(item, file.form)], longest)


def pairs_of(item: dict[str, Any], form: str) -> list[tuple[str, str]]:
    """(context, continuation) of each choice."""
    if form == "target":
        return [(item["ctx"], item["target"])]
    if form == "contexts":
        return [(context, f" {item['continuation']}") for context in item["ctxs"]]
    return [(item["ctx"], f" {choice}") for choice in item["choices"]]


def choices_of(item: dict[str, Any], form: str) -> list[str]:
    return {"target": [""], "contexts": item.get("ctxs"), "choices": item.get("choices")}[form]  # type: ignore[return-value]


def measure(item: dict[str, Any], form: str, scores: Sequence[Score]) -> dict[str, float]:
    """The value of each metric for one item."""
    if form == "target":
        return {"perplexity": scores[0].logprob, "acc": float(scores[0].greedy)}
    logprobs = np.array([entry.logprob for entry in scores])
    lengths = np.array([float(len(choice)) for choice in choices_of(item, form)])
    return {
        "acc": float(np.argmax(logprobs) == item["gold"]),
        "acc_norm": float(np.argmax(logprobs / lengths) == item["gold"]),
    }


def aggregate(metric: str, values: Sequence[float]) -> dict[str, float | None]:
    """The mean, or the perplexity of a mean log-likelihood, with its standard error (None for a single item)."""
    n = len(values)
    mean = math.fsum(values) / n
    stderr = None
    if n > 1:
        stderr = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    if metric != "perplexity":
        return {"value": mean, "stderr": stderr}
    value = math.exp(-mean) if mean > -700 else math.inf
    return {"value": value, "stderr": None if stderr is None else value * stderr}  # first order
