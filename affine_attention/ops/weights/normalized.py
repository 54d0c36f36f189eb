"""Normalised attention: w_ij = (s_ij - mean_i) / (std_i + 0.001), mean and deviation over the visible keys.

The gain and the bias of a head in the paper are alpha and beta of the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .functions import WeightFunction, sum_visible

EPSILON = 0.001  # that of the authors' code


def weigh_normalized(scores: Tensor, visible: Tensor, counts: Tensor) -> Tensor:
    """The weights of a row sum to 0. Population deviation, as in the authors' code."""
    centred = scores - sum_visible(scores, visible) / counts
    variance = sum_visible(centred.square(), visible) / counts
    # The derivative of a square root is infinite at 0, where a row has one key or equal scores.
    is_zero = variance == 0
    deviation = torch.sqrt(variance.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)
    return centred / (deviation + EPSILON)


NORMALIZED = WeightFunction(
    "normalized", "arXiv 2005.09561 and its code (OliverRichter/normalized-attention, models.py)", weigh_normalized
)
