"""The loss of knowledge distillation, chunked so that no vocabulary materialises, and the teacher it learns from."""

from .loss import DistillLoss, LossParts
from .teacher import load_teacher

__all__ = ["DistillLoss", "LossParts", "load_teacher"]
