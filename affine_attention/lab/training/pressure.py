"""Decides in which steps keys are hidden from the student, and hides them.

A converted model keeps the attention sinks of its original unless training makes them useless. Under sink pressure,
in a share of the steps, the student loses the first key after a few tokens, or sees only a window of keys; the teacher
always sees everything. The choice of a step is a function of the data seed and of the number of the step, so a resumed
run, every rank, every micro-batch and every mechanism with the same seed make the same choice, and nothing needs to be
stored.
"""

from __future__ import annotations

import random
from typing import Any

from ...hf.eviction import check_can_evict, eviction_mask
from ..distill.lm_head import STUDENT_MASK
from ..recipe import Recipe


class SinkPressure:
    """The sink pressure of a recipe; never applies if the recipe has none."""

    def __init__(self, recipe: Recipe) -> None:
        self.kind, self.share, self.seed = recipe.sink_pressure, recipe.pressure_share, recipe.data_seed
        self.hidden: dict[str, Any] = (
            {"first_key_after": recipe.pressure_after}
            if self.kind == "first_key"
            else {"window": recipe.pressure_window}
        )

    def applies(self, step: int) -> bool:
        """True if keys are hidden in this step, counted from 1."""
        return self.kind is not None and random.Random(f"sink pressure {self.seed} {step}").random() < self.share

    def hide(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a step with the mask of the student."""
        mask = eviction_mask(inputs["input_ids"], inputs.get("position_ids"), **self.hidden)
        return {**inputs, STUDENT_MASK: mask}

    def log(self, step: int) -> dict[str, bool]:
        """The entry of a step in the log; empty for a run without sink pressure."""
        return {} if self.kind is None else {"pressure": self.applies(step)}


def check_pressure(recipe: Recipe, student: Any) -> None:
    """Raises ValueError if keys cannot be hidden from this student."""
    if recipe.sink_pressure is not None:
        try:
            check_can_evict(student.config.get_text_config(), recipe.sequence_length)
        except ValueError as error:
            raise ValueError(f"sink_pressure={recipe.sink_pressure!r}: {error}") from error
