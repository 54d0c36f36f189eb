"""The weight functions of `attention`: what takes the place of the softmax in F2.

A weight function turns scores into weights: `weigh(scores, visible, counts)`, with scores [B, H, T, S] that are 0 on
invisible keys, the mask of visible keys, and the number of visible keys of each row [1|B, 1|H, T, 1], at least 1. It is
differentiable PyTorch code; its result on invisible keys is ignored. alpha, beta and the gate apply as with softmax.
To add one: a file with a `WeightFunction`, its line below, and a test of its formula.
"""

from __future__ import annotations

from .functions import WeightFunction
from .normalized import NORMALIZED
from .sigmoid import SIGMOID
from .signed import SIGNED
from .softplus import SOFTPLUS

SOFTMAX = "softmax"
FUNCTIONS: dict[str, WeightFunction] = {each.name: each for each in (SIGNED, SIGMOID, SOFTPLUS, NORMALIZED)}
NAMES = (SOFTMAX, *FUNCTIONS)
