"""The paper's experiment in one command: teacher, students per mechanism and seed, evaluation, inspection, report."""

from .plan import Job, Plan, parse_variant
from .stages import run_study
from .sweep import parse_settings

__all__ = ["Job", "Plan", "parse_settings", "parse_variant", "run_study"]
