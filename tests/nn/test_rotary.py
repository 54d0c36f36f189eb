import torch

from affine_attention.nn.rotary import rotate


def test_scores_depend_on_distance_only_and_lengths_are_kept():
    query, key = torch.randn(1, 2, 1, 8, dtype=torch.float64), torch.randn(1, 2, 1, 8, dtype=torch.float64)

    def score(i, j):
        at = [torch.tensor([[p]]) for p in (i, j)]
        return (rotate(query, at[0], 10000.0) * rotate(key, at[1], 10000.0)).sum(-1)

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert not torch.allclose(score(7, 3), score(8, 3))
    turned = rotate(query, torch.tensor([[11]]), 10000.0)
    torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1))
    torch.testing.assert_close(rotate(query, torch.tensor([[0]]), 10000.0), query)


def test_half_precision_is_turned_in_fp32():
    x = torch.randn(1, 1, 1, 8)
    at = torch.tensor([[100_003]])
    exact = rotate(x.bfloat16().double(), at, 10000.0)
    torch.testing.assert_close(rotate(x.bfloat16(), at, 10000.0).double(), exact, rtol=0.01, atol=0.02)
