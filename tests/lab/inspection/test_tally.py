"""The tally of a layer: shares and spreads from parts equal those of the whole."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention_weights
from affine_attention.lab.inspection.capture import AttentionCall
from affine_attention.lab.inspection.tally import LayerTally

HEADS, LENGTH = 4, 20


def calls(count=3):
    make = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    for _ in range(count):
        query, key = draw(1, HEADS, LENGTH, 8), draw(1, 2, LENGTH, 8)
        alpha = draw(1, HEADS, LENGTH).sigmoid() * torch.tensor([0.1, 0.5, 0.9, 1.0])[:, None]
        yield AttentionCall(0, query, key, draw(1, 2, LENGTH, 8), 8**-0.5, alpha=alpha, beta=(0.4 - alpha) / 30,
                            is_causal=True)  # fmt: skip


def test_shares_and_spreads_equal_those_of_the_dense_weights():
    tally = LayerTally(HEADS)
    first, alphas = [], []
    for call in calls():
        tally.add(call)
        softmax = attention_weights(call.query, call.key, is_causal=True, softmax_scale=call.softmax_scale)
        first.append(call.alpha * softmax[..., 0])
        alphas.append(call.alpha)
    alpha_HN = torch.cat(alphas, -1)[0]
    share_H = torch.cat(first, -1)[0].sum(-1) / alpha_HN.sum(-1)
    torch.testing.assert_close(tally.share_of_softmax(), share_H)
    within, between = tally.alpha_spread()
    assert within == pytest.approx(alpha_HN.var(-1, correction=0).mean().sqrt().item())
    assert between == pytest.approx(alpha_HN.mean(-1).std(correction=0).item())
    assert within**2 + between**2 == pytest.approx(alpha_HN.var(correction=0).item())


def test_a_layer_without_calls_has_no_spread():
    assert LayerTally(2).alpha_spread() == (None, None)
