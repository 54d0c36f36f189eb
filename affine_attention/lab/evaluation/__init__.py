"""Perplexity on held-out text in its three forms, and zero-shot tasks with lm-evaluation-harness or our own scorer."""

from .evaluate import evaluate, format_evaluation
from .tasks import DEFAULT_TASKS, write_tasks

__all__ = ["DEFAULT_TASKS", "evaluate", "format_evaluation", "write_tasks"]
