"""Turns a recipe into a run folder on Hugging Face's Trainer; nothing is lost when it stops."""

from .nonfinite import NotFiniteError
from .signals import Stopped
from .train import train

__all__ = ["NotFiniteError", "Stopped", "train"]
