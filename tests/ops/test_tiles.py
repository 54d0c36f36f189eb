"""Tiles cover exactly the visible pairs, and merge into one softmax."""

from __future__ import annotations

import itertools

import pytest
import torch

from affine_attention.ops.tiles import plan, softmax_backward, softmax_forward

from .test_visibility import make


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_cover_every_visible_pair_once(device):
    for queries, keys, is_causal, window, padding in itertools.product(
        (0, 1, 5, 300, 520), (0, 1, 5, 300), [False, True], [None, 3], [False, True]
    ):
        seen = make(queries, keys, is_causal=is_causal, window=window, padding=padding)
        covered = torch.zeros(2, queries, keys, dtype=torch.long)
        for tiles in plan(seen, device):
            rows = tiles[0].queries
            for tile in tiles:
                assert tile.queries == rows
                part = torch.ones(2, rows.stop - rows.start, tile.keys.stop - tile.keys.start, dtype=torch.long)
                if tile.is_causal:
                    assert part.shape[1] == part.shape[2]
                    part = part.tril()
                if tile.mask == "keys":
                    part = part * seen.key_mask[:, None, tile.keys]
                if tile.mask == "pairs":
                    mask = seen.block(tile.queries, tile.keys)
                    part = part * (1 if mask is None else mask[:, 0])
                covered[:, rows, tile.keys] += part
        assert torch.equal(covered, seen.dense().expand(2, 1, queries, keys)[:, 0].long())


def test_only_windows_and_segments_are_split_into_blocks_of_rows():
    assert [len(tiles) for tiles in plan(make(600, 600, is_causal=True, padding=True), "cpu")] == [1]
    assert len(plan(make(600, 600, is_causal=True, window=9), "cpu")) == 3


@pytest.mark.parametrize("kinds", [{"is_causal": True}, {"is_causal": True, "padding": True}, {"window": 20}])
def test_lse_of_merged_tiles_is_that_of_all_visible_scores(kinds):
    seen = make(30, 70, **kinds)
    query, key = torch.randn(2, 4, 30, 8, dtype=torch.float64), torch.randn(2, 2, 70, 8, dtype=torch.float64)
    sink = torch.tensor([-3.0, 0.0, 2.0, 9.0], dtype=torch.float64)
    out, lse, _, aux = softmax_forward(query, key, key, sink, seen, 0.5)
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.5).masked_fill(~seen.dense(), -torch.inf)
    expected = torch.logaddexp(scores.logsumexp(-1), sink[:, None])
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(out, torch.exp(scores - expected[..., None]) @ key.repeat_interleave(2, 1))
    grads = softmax_backward(torch.ones_like(out), query, key, key, out, lse, seen, 0.5, aux)
    assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]
