"""Trains a recipe with Hugging Face's Trainer in a run folder; an interrupted run resumes from its last checkpoint."""

from .nonfinite import NotFiniteError
from .signals import Stopped
from .train import train

__all__ = ["NotFiniteError", "Stopped", "train"]
