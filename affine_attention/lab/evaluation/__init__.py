"""Perplexity per token, word and byte on held-out text, and zero-shot tasks with lm-evaluation-harness or `direct`."""

from .evaluate import evaluate, format_evaluation
from .tasks import DEFAULT_TASKS, write_tasks

__all__ = ["DEFAULT_TASKS", "evaluate", "format_evaluation", "write_tasks"]
