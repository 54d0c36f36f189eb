"""Signed weights of Cog Attention: w_ij = sign(s_ij) e^{|s_ij|} / sum_k e^{|s_ik|}."""

from __future__ import annotations

import torch
from torch import Tensor

from .functions import WeightFunction, divide, sum_visible


def weigh_signed(scores: Tensor, visible: Tensor, counts: Tensor) -> Tensor:
    """The absolute weights of a row sum to 1; a score of 0 has weight 0."""
    size = scores.abs()
    largest = size.detach().amax(-1, keepdim=True) if size.shape[-1] else 0.0
    exp = torch.exp(size - largest)
    return torch.sign(scores) * divide(exp, sum_visible(exp, visible))


SIGNED = WeightFunction(
    "signed", "arXiv 2411.07176 and its code (trestad/CogAttn, Cogformer/attention.py)", weigh_signed
)
