"""What a weight function is: a name, its source, and one function of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightFunction:
    """Turns scores into weights in place of the softmax."""

    name: str
    source: str
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor]


def sum_visible(x: Tensor, visible: Tensor) -> Tensor:
    """The sum of x over the visible keys of each row, [B, H, T, 1]."""
    return x.masked_fill(~visible, 0).sum(-1, keepdim=True)


def divide(x: Tensor, total: Tensor) -> Tensor:
    """x / total, and 0 where the total is 0."""
    return x / total.masked_fill(total == 0, 1)
