"""Updates the running averages of a model during training with transformers' Trainer, and warns if nothing does."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from ..nn import commit_running_alpha, discard_running_alpha
from ..nn.commit import affine_scales
from .parallel import data_parallel_group


class CommitNotice(UserWarning):
    """A model was trained and its running averages were never updated."""


class RunningAlphaCallback(TrainerCallback):
    """Updates `running_alpha` after every optimizer step: `Trainer(..., callbacks=[RunningAlphaCallback()])`.

    There is one update per step for all micro-batches and ranks, before a checkpoint is written. A step that a gradient
    scaler skips does not count: its alpha is dropped with its gradients.

    Args:
        group: the ranks that hold different data. None: all ranks, or under tensor parallelism those of
            `data_parallel_group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        if model is not None and self.group is None:
            self.group = data_parallel_group(model)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, optimizer: Any = None, **_: Any
    ) -> None:
        if model is None:
            return
        # Transformers calls this before it looks whether the step was skipped.
        if getattr(optimizer, "step_was_skipped", False):
            discard_running_alpha(model)
        else:
            commit_running_alpha(model, self.group)


def warn_if_never_committed(model: nn.Module) -> bool:
    """Warns where a model has collected alpha and its running averages are still those it started with."""
    for scale in affine_scales(model):
        if scale.collected.grad is None:
            continue
        starts = (scale.mechanism.running_alpha_start, scale.mechanism.initial_alpha)
        start = next((start for start in starts if bool((scale.running_alpha == start).all())), None)
        if start is not None:
            warnings.warn(
                f"the model was trained, but running_alpha is still {start} in every head: beta does not follow alpha; "
                "call commit_running_alpha(model) after every optimizer.step(), or pass "
                "callbacks=[affine_attention.hf.RunningAlphaCallback()] to the Trainer",
                CommitNotice,
                stacklevel=3,
            )
            return True
    return False
