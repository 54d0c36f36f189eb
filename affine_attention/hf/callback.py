"""Updates the running averages of a model during training with transformers' Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..nn import commit_running_alpha


class RunningAlphaCallback(TrainerCallback):
    """Updates `running_alpha` after every optimizer step: `Trainer(..., callbacks=[RunningAlphaCallback()])`.

    There is one update per step for all micro-batches and ranks, before a checkpoint is written.
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        if model is not None:
            commit_running_alpha(model)
