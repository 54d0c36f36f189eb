"""Simulates low-precision linear layers: their inputs and weights are rounded to a few integers times a scale.

Symmetric absmax quantisation: with q = 2^(bits - 1) - 1 and scale = max|x| / q, a number x becomes
round(x / scale) · scale. The scale of an input is that of a whole tensor (one sequence, all tokens and channels) or of
one token, computed at run time; the scale of a weight is that of one output channel. Everything else (the products
themselves, norms, attention, residuals, embeddings) stays in the precision of the model.

Quantised are the linear layers of the decoder: query, key, value and output projections, feed-forward layers, and the
gate W_g of a mechanism. Not quantised are the LM head, W_a and the other coefficients of a mechanism (one number per
head), and experts that are not linear layers of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...nn import AttentionMechanism


@dataclass(frozen=True)
class Quantisation:
    """Bits of the inputs and of the weights of linear layers; None leaves them as they are."""

    inputs: int | None = None
    weights: int | None = None
    scale: Literal["tensor", "token"] = "tensor"  # of the inputs

    def of_inputs(self, x: Tensor) -> Tensor:
        if self.inputs is None:
            return x
        return quantise(x, self.inputs, None if self.scale == "tensor" else -1)

    def of_weight(self, weight: Tensor, channel: int) -> Tensor:
        """The weight with one scale per output channel; `channel` is its dimension."""
        return weight if self.weights is None else quantise(weight, self.weights, 1 - channel)

    def __str__(self) -> str:
        parts = [f"weights int{self.weights} per channel"] if self.weights else []
        parts += [f"inputs int{self.inputs} per {self.scale}"] if self.inputs else []
        return ", ".join(parts)


VARIANTS = {
    "a8_tensor": Quantisation(inputs=8),
    "a8_token": Quantisation(inputs=8, scale="token"),
    "a4_token": Quantisation(inputs=4, scale="token"),
    "w8": Quantisation(weights=8),
    "w4": Quantisation(weights=4),
    "w8a8_tensor": Quantisation(inputs=8, weights=8),
    "w8a8_token": Quantisation(inputs=8, weights=8, scale="token"),
    "w4a4_token": Quantisation(inputs=4, weights=4, scale="token"),
}


def quantise(x: Tensor, bits: int, dim: int | None) -> Tensor:
    """Rounds to integers times a scale, one scale for the whole tensor or for each slice along `dim`."""
    largest = 2 ** (bits - 1) - 1
    exact = x if x.dtype == torch.float64 else x.float()
    size = exact.abs()
    scale = (size.amax() if dim is None else size.amax(dim, keepdim=True)) / largest
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)  # of a tensor of zeros
    return ((exact / scale).round().clamp(-largest, largest) * scale).to(x.dtype)


@contextmanager
def quantised(model: Any, how: Quantisation) -> Iterator[int]:
    """Inside the block, the linear layers of the model compute with quantised inputs and weights; yields their number.

    No weight is changed: each layer gets another forward, which is removed at the end.
    """
    layers = linear_layers(model)
    for layer in layers:
        layer.forward = _forward(layer, how)
    try:
        yield len(layers)
    finally:
        for layer in layers:
            del layer.forward


def linear_layers(model: Any) -> list[Any]:
    """The linear layers of the decoder, see the top of this file."""
    head = model.get_output_embeddings()
    left = {id(head)}
    for mechanism in model.modules():
        if isinstance(mechanism, AttentionMechanism):
            left |= {id(part) for part in mechanism.modules() if part is not mechanism.gate_proj}
    return [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and id(m) not in left]


def _forward(layer: Any, how: Quantisation) -> Any:
    transposed = isinstance(layer, Conv1D)  # its weight is [in, out]

    def forward(x: Tensor) -> Tensor:
        weight = how.of_weight(layer.weight, 1 if transposed else 0)
        x = how.of_inputs(x)
        if not transposed:
            return nn.functional.linear(x, weight, layer.bias)
        return torch.addmm(layer.bias, x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[1])

    return forward
