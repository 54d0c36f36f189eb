"""The settings of the distillation loss, and the rows of logits that it is computed for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

DIVERGENCES = ("forward_kl", "soft_cross_entropy")


@dataclass(frozen=True)
class Terms:
    """total = kd_weight · kd + ce_weight · ce; chunks.py has the formulas."""

    kd_weight: float = 1.0
    ce_weight: float = 0.0
    temperature: float = 1.0
    divergence: str = "forward_kl"

    def __post_init__(self) -> None:
        for name in ("kd_weight", "ce_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        if not self.kd_weight and not self.ce_weight:
            raise ValueError("kd_weight and ce_weight are both 0, so nothing would be learned; set one of them above 0")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0, got {self.temperature}")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}")


class LogitRows(NamedTuple):
    """A few rows of logits before the soft cap. kd and ce are written to `kd_C` and `ce_C`."""

    student_CV: Tensor
    teacher_CV: Tensor | None
    labels_C: Tensor
    terms: Terms
    softcap: float | None
    teacher_softcap: float | None
    kd_C: Tensor
    ce_C: Tensor
