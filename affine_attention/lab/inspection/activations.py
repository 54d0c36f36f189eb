"""Measures the activations between the layers of a model: the largest and the median magnitude after each layer.

A few activations that are thousands of times larger than the median ("massive activations", Sun et al., arXiv
2402.17762) belong to the tokens that are attention sinks, and they dominate the scale of quantised activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import AttentionMechanism
from .metrics import finite_or_none


class ActivationTally:
    """The magnitudes of one layer's output over all calls; one tensor of an output is in memory at a time."""

    def __init__(self) -> None:
        self.largest, self.position, self.channel = 0.0, -1, -1
        self.medians: list[float] = []

    def add(self, hidden_BTM: Tensor) -> None:
        size_BTM = hidden_BTM.detach().abs()
        largest, place = size_BTM.flatten().max(0)
        if not math.isnan(self.largest) and not float(largest) <= self.largest:  # a NaN replaces any number, and stays
            self.largest = float(largest)
            row = int(place) % (size_BTM.shape[1] * size_BTM.shape[2])
            self.position, self.channel = divmod(row, size_BTM.shape[2])
        self.medians.append(float(size_BTM.float().median()))


@contextmanager
def watch_layers(model: nn.Module, observer: Callable[[int, Tensor], None]) -> Iterator[int]:
    """Calls `observer(layer, hidden [B, T, M])` with the output of each layer; yields the number of layers found.

    A layer is the module around the attention module of a mechanism. The number is 0 for a model that has no such
    modules, for example a single attention layer.
    """
    layers = find_layers(model)
    hooks = [layer.register_forward_hook(_hook(index, observer)) for index, layer in enumerate(layers)]
    try:
        yield len(layers)
    finally:
        for hook in hooks:
            hook.remove()


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The modules around the attention modules, in order; empty unless each attention module has its own."""
    names = [name.split(".")[:-2] for name, module in model.named_modules() if isinstance(module, AttentionMechanism)]
    if not all(names) or len({".".join(parts) for parts in names}) != len(names):
        return []
    return [model.get_submodule(".".join(parts)) for parts in names]


def summarise_activations(tallies: list[ActivationTally]) -> dict[str, Any] | None:
    """The entry `activations` of inspection.json, by layer; None if nothing was measured.

    `largest` is over all sequences, with the position and the channel where it is; `median` is the mean over sequences
    of the median over tokens and channels.
    """
    if not tallies or not all(tally.medians for tally in tallies):
        return None
    return {
        "largest": finite_or_none([tally.largest for tally in tallies]),
        "median": finite_or_none([sum(tally.medians) / len(tally.medians) for tally in tallies]),
        "position": [tally.position for tally in tallies],
        "channel": [tally.channel for tally in tallies],
    }


def _hook(index: int, observer: Callable[[int, Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        with torch.no_grad():
            observer(index, hidden)

    return hook
