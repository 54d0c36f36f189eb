"""The helpers of weight functions."""

from __future__ import annotations

import torch

from affine_attention.ops.weights.functions import divide, sum_visible


def test_sums_ignore_invisible_keys_and_nothing_is_divided_by_zero():
    x, seen = torch.tensor([[1.0, torch.nan]]), torch.tensor([[True, False]])
    assert sum_visible(x, seen).item() == 1.0
    assert divide(torch.zeros(2), torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.0]
