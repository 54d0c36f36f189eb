"""Length-scaled softplus attention with re-weighting (LSSAR).

a_ij = softplus(s_ij log n_i) / sum_k softplus(s_ik log n_i)
r_ij = max(n_i a_ij - 1, 0)^15,   w_ij = r_ij / sum_k r_ik

with n_i the number of visible keys; rows with up to three keys do not subtract 1. The paper normalises the lengths of
query and key and takes log(D) as softmax_scale: s_ij = log(D) cos(q_i, k_j).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .functions import WeightFunction, divide, sum_visible

POWER = 15  # the paper's choice for lengths beyond the training length
FEW_KEYS = 3


def weigh_softplus(scores: Tensor, visible: Tensor, counts: Tensor) -> Tensor:
    """The weights of a row sum to 1, or are all 0 where all scores are equal."""
    # Above the threshold PyTorch returns x itself; e^-40 is below the rounding of fp64.
    positive = softplus(scores * torch.log(counts), threshold=40)
    mean = divide(positive, sum_visible(positive, visible)) * counts
    above = torch.relu(mean - (counts > FEW_KEYS).to(mean.dtype)).masked_fill(~visible, 0)
    # The weights do not depend on the scale of a row, and a power of numbers above 1 might overflow.
    largest = above.detach().amax(-1, keepdim=True) if above.shape[-1] else above.sum(-1, keepdim=True)
    sharp = divide(above, largest) ** POWER
    return divide(sharp, sum_visible(sharp, visible))


SOFTPLUS = WeightFunction("softplus", "arXiv 2501.13428", weigh_softplus)
