"""Weights other than softmax: test_metrics.py compares every statistic with the dense weights; here are the parts."""

from __future__ import annotations

import math

import torch

from affine_attention import attention_weights
from affine_attention.lab.inspection.other_weights import minus_next, of_signed, weigh
from affine_attention.ops.weights import FUNCTIONS


def test_the_weights_of_a_block_are_those_of_the_operator():
    query, key = torch.randn(2, 1, 3, 9, 8, dtype=torch.float64)
    seen = torch.ones(9, 9).tril().bool().expand(3, -1, -1)
    for name in FUNCTIONS:
        mine = weigh(name, query[0] @ key[0].mT / 8**0.5, seen, seen.sum(-1))
        torch.testing.assert_close(mine, attention_weights(query, key, weights=name, is_causal=True)[0])


def test_sums_shares_and_entropies_of_signed_weights():
    row_sum, absolute, negative, entropy = of_signed(torch.tensor([[[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]]))
    torch.testing.assert_close(row_sum, torch.zeros(1, 2))
    torch.testing.assert_close(absolute, torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(negative, torch.tensor([[0.5, 0.0]]))
    torch.testing.assert_close(entropy, torch.tensor([[math.log(2), torch.nan]]), equal_nan=True)


def test_the_last_head_subtracts_the_first():
    heads = torch.tensor([[1.0], [2.0], [4.0]])
    assert minus_next(heads, torch.full((3, 1), 0.5)).flatten().tolist() == [0.0, 0.0, 3.5]
