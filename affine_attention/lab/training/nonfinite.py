"""Finds the parameter, loss or gradient that is not finite, for the error that stops a training run."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NotFiniteError(FloatingPointError):
    """The loss or a gradient is not finite. The optimizer was not called and the running averages are unchanged."""


def find_not_finite(model: nn.Module, loss: float) -> str:
    """Names what is not finite: a parameter (which makes everything else non-finite), else the loss, else a gradient.

    Every rank must call this. Under FSDP2 each rank checks its own shard, and all ranks return the same name.
    """
    named = list(model.named_parameters())
    if not named:
        return "the loss"
    values = _first_nonfinite([parameter for _, parameter in named])
    if values is not None:
        return f"parameter {named[values][0]}"
    if not torch.isfinite(torch.tensor(loss)):
        return "the loss"
    learned = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
    gradient = _first_nonfinite([grad for _, grad in learned])
    if gradient is not None:
        return f"the gradient of {learned[gradient][0]}"
    return "the total gradient norm (every single gradient is finite)"


def _first_nonfinite(tensors: list[Tensor]) -> int | None:
    """The index of the first tensor that has a non-finite value on any rank."""
    if not tensors:
        return None
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    bad = torch.stack([(~torch.isfinite(tensor).all()).int() for tensor in local])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    found = bad.nonzero()
    return int(found[0]) if len(found) else None
