"""Looks inside a model while it reads: what each attention layer gets, and the numbers behind the paper's figures."""

from .gradients import format_statistics, gradient_statistics
from .inspect import format_inspection, inspect

__all__ = ["format_inspection", "format_statistics", "gradient_statistics", "inspect"]
