"""Sigmoid attention: w_ij = sigmoid(s_ij - log n_i), without a normalisation over the keys.

The paper's bias is -log n for sequences of n tokens. Here n_i is the number of keys that the query sees, so that an
output depends neither on later tokens nor on padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .functions import WeightFunction


def weigh_sigmoid(scores: Tensor, visible: Tensor, counts: Tensor) -> Tensor:
    """With scores of 0 a row sums to n / (n + 1)."""
    return torch.sigmoid(scores - torch.log(counts))


SIGMOID = WeightFunction("sigmoid", "arXiv 2409.04431", weigh_sigmoid)
