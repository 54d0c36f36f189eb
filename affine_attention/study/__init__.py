"""The paper in one command: a teacher, a student for each mechanism and seed, evaluation, inspection, one report."""

from .plan import Job, Plan, parse_variant
from .stages import run_study

__all__ = ["Job", "Plan", "parse_variant", "run_study"]
