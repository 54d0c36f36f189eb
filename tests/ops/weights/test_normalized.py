"""Normalised weights by hand."""

from __future__ import annotations

import torch

from affine_attention.ops.weights.normalized import weigh_normalized


def test_mean_zero_and_deviation_one_over_visible_keys():
    scores = torch.tensor([[[[100.0, 300.0, -200.0, 7.0]]]])
    seen = torch.tensor([[[[True, True, True, False]]]])
    weights = weigh_normalized(scores.masked_fill(~seen, 0), seen, torch.tensor(3.0))[0, 0, 0, :3]
    torch.testing.assert_close(weights.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights.std(unbiased=False), torch.tensor(1.0), atol=1e-5, rtol=0)


def test_one_key_has_weight_zero_and_a_finite_gradient():
    scores = torch.full((1, 1, 1, 1), 3.0, requires_grad=True)
    weights = weigh_normalized(scores, torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.tensor(1.0))
    assert not weights.any()
    assert torch.autograd.grad(weights.sum(), scores)[0].isfinite().all()
