"""Records the inputs of every attention layer and computes the statistics behind the paper's figures."""

from ..gradient_norms import format_statistics, gradient_statistics
from .inspect import format_inspection, inspect

__all__ = ["format_inspection", "format_statistics", "gradient_statistics", "inspect"]
