"""The own keys of queries in a preallocated cache; test_generation.py compares all caches for every mechanism."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention
from affine_attention.hf.own_values import finish_with, own_keys
from affine_attention.ops.finish import NORM_EPS, Finish


def test_the_operator_finds_the_last_keys_itself():
    assert own_keys({}, 3, 9) is None
    assert own_keys({"mask": torch.ones(2, 9).bool(), "is_causal": True}, 3, 9) is None
    assert own_keys({"mask": torch.ones(2, 1, 9, 9).bool()}, 9, 9) is None


def test_one_query_of_a_preallocated_cache_is_the_last_key_it_sees():
    mask = torch.tensor([[False, True, True, False], [True, False, False, False], [False] * 4])
    index, sees, is_unknown = own_keys({"mask": mask}, 1, 4)
    assert is_unknown is None
    assert index[:2].flatten().tolist() == [2, 0]
    assert sees.flatten().tolist() == [True, True, False]


def test_a_mask_that_sees_ahead_is_refused_and_padding_is_not():
    causal = torch.ones(5, 9).tril(1).bool()
    left = causal & (torch.arange(9) >= 3)
    right = causal & (torch.arange(9) < 4)
    for mask in (causal, left, right):
        own_keys({"mask": mask[None, None]}, 5, 9)
    for first, stop in ((0, 3), (1, 4), (3, 5)):
        ahead = causal.clone()
        ahead[first:stop, : stop + 1] = True
        with pytest.raises(ValueError, match="which a mask that sees ahead"):
            own_keys({"mask": ahead[None, None]}, 5, 9)


def test_a_compiled_graph_returns_nan_where_the_mask_sees_ahead():
    """It cannot read the mask, and the value of another token in the place of the own one would be silently wrong."""
    torch.manual_seed(0)
    y, value = torch.randn(3, 2, 5, 8), torch.randn(3, 1, 9, 8)
    causal = torch.ones(5, 9).tril(1).bool()
    mask = torch.stack([causal, causal, causal & (torch.arange(9) >= 2)])[:, None]
    mask[1, :, 1:4, :5] = True

    def call(mask):
        own = own_keys({"mask": mask}, 5, 9)
        return finish_with(y, value, own, Finish(1.0, None, NORM_EPS, None), "auto")

    torch._dynamo.reset()
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(mask)
    assert found[1].isnan().all()
    mask[1] = causal
    expected = call(mask)
    for row in (0, 2):
        torch.testing.assert_close(found[row], expected[row])


def test_a_preallocated_cache_equals_a_growing_one():
    torch.manual_seed(0)
    query = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64)
    gate, weight = torch.rand(2, 4, 3, 8, dtype=torch.float64), torch.rand(4, 8, dtype=torch.float64)
    expected = attention(query, key, value, exclusion=1.0, norm_weight=weight, gate=gate, is_causal=True)
    free = torch.full((2, 2, 4, 8), 7.0, dtype=torch.float64)
    mask = torch.zeros(2, 1, 3, 9, dtype=torch.bool)
    mask[..., :5] = torch.ones(3, 5).tril(2).bool()
    longer = torch.cat([key, free], 2), torch.cat([value, free], 2)
    y = attention(query, *longer, mask=mask)
    own, parts = own_keys({"mask": mask}, 3, 9), Finish(1.0, weight, NORM_EPS, gate)
    torch.testing.assert_close(finish_with(y, longer[1], own, parts, "auto"), expected)
