"""Knowledge distillation: a chunked loss that never holds the logits of all tokens, and the teacher model."""

from .loss import DistillLoss, LossParts
from .teacher import load_teacher

__all__ = ["DistillLoss", "LossParts", "load_teacher"]
