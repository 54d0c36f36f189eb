"""Sigmoid weights by hand."""

from __future__ import annotations

import torch

from affine_attention.ops.weights.sigmoid import weigh_sigmoid


def test_scores_of_zero_give_one_over_n_plus_one():
    weights = weigh_sigmoid(torch.zeros(1, 1, 1, 3), torch.ones(1, 1, 1, 3, dtype=torch.bool), torch.tensor(3.0))
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))


def test_a_row_of_one_key_has_no_bias():
    scores = torch.tensor([[[[1.7]]]])
    weights = weigh_sigmoid(scores, torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.tensor(1.0))
    torch.testing.assert_close(weights, scores.sigmoid())
