"""Softplus weights by hand."""

from __future__ import annotations

import torch

from affine_attention.ops.weights.softplus import weigh_softplus

SEEN = torch.ones(1, 1, 1, 4, dtype=torch.bool)


def test_weights_sum_to_one_and_keys_below_the_mean_get_none():
    weights = weigh_softplus(torch.tensor([[[[1.0, 0.9, -1.0, -2.0]]]]), SEEN, torch.tensor(4.0))[0, 0, 0]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    assert weights[0] > weights[1] > 0
    assert not weights[2:].any()


def test_up_to_three_keys_all_have_weight():
    scores = torch.tensor([[[[0.1, 0.0, -0.1, 0.0]]]])
    seen = torch.tensor([[[[True, True, True, False]]]])
    weights = weigh_softplus(scores, seen, torch.tensor(3.0))[0, 0, 0]
    assert (weights[:3] > 0).all()


def test_equal_scores_give_no_weight():
    weights = weigh_softplus(torch.zeros(1, 1, 1, 4), SEEN, torch.tensor(4.0))
    assert not weights.any()


def test_small_differences_do_not_vanish_in_the_power():
    """(1e-4)^15 is below the range of fp32."""
    scores = torch.tensor([[[[2e-4, 1e-4, -1e-4, -2e-4]]]])
    torch.testing.assert_close(weigh_softplus(scores, SEEN, torch.tensor(4.0)).sum(), torch.tensor(1.0))
