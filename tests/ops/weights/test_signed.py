"""Signed weights by hand."""

from __future__ import annotations

import torch

from affine_attention.ops.weights.signed import weigh_signed


def test_absolute_weights_sum_to_one_and_keep_the_sign():
    scores, seen = torch.tensor([[[[2.0, -2.0, 0.0, 9.0]]]]), torch.tensor([[[[True, True, True, False]]]])
    weights = weigh_signed(scores.masked_fill(~seen, 0), seen, torch.tensor(3.0))[0, 0, 0]
    large = torch.tensor(2.0).exp()
    share = large / (2 * large + 1)
    torch.testing.assert_close(weights[:3], torch.stack([share, -share, torch.tensor(0.0)]))


def test_large_scores_do_not_overflow():
    scores = torch.tensor([[[[500.0, -500.0, 3.0]]]])
    seen = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    torch.testing.assert_close(weigh_signed(scores, seen, torch.tensor(3.0))[0, 0, 0], torch.tensor([0.5, -0.5, 0.0]))
