"""Decoding with lengths and pages equals attention over each sequence separately."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention, decode_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def make(device, queries=1, room=48, dtype=torch.float32, row_sinks=False):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    tensors = {"query": normal(3, 4, queries, 16), "key": normal(3, 2, room, 16), "value": normal(3, 2, room, 16)}
    rows = {
        "alpha": torch.rand((3, 4, queries), generator=generator).to(device),
        "beta": 0.01 * normal(3, 4, queries).float(),
        "sink": torch.linspace(-1, 3, 4).to(device),
        "gate": normal(3, 4, queries, 16).sigmoid(),
    }
    if row_sinks:
        rows["sink"] = rows["sink"][:, None] + normal(3, 4, queries).float()
    return tensors, rows, torch.tensor([48, 17, 5], device=device)


def separately(tensors, rows, lengths, **options):
    """Attention for each sequence separately, with its cache cropped to its length."""
    outs = []
    for b, length in enumerate(lengths.tolist()):
        part = {name: x[b : b + 1] for name, x in tensors.items()}
        part |= {name: part[name][:, :, :length] for name in ("key", "value")}
        own = {name: x if x.dim() == 1 else x[b : b + 1] for name, x in rows.items()}
        outs.append(attention(**part, **own, is_causal=True, impl="reference", **options))
    return torch.cat(outs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 4, 20])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("row_sinks", [False, True])
def test_lengths_crop_each_sequence(device, queries, window, row_sinks):
    tensors, rows, lengths = make(device, queries, row_sinks=row_sinks)
    lengths = lengths.clamp(min=queries)
    for name in ("key", "value"):  # slots beyond a length are stale memory
        for b, length in enumerate(lengths.tolist()):
            tensors[name][b, :, length:] = torch.nan
    out = decode_attention(**tensors, **rows, lengths=lengths, window=window)
    torch.testing.assert_close(out, separately(tensors, rows, lengths, window=window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 3])
def test_pages_in_any_order_equal_the_dense_cache(device, queries):
    tensors, rows, lengths = make(device, queries)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(1)).to(device)
    table = order.view(3, 6).int()
    paged = {"query": tensors["query"]}
    for name in ("key", "value"):
        pages = torch.empty(18, 8, 2, 16, device=device)
        pages[order] = tensors[name].transpose(1, 2).reshape(18, 8, 2, 16)
        paged[name] = pages
    table[2, 1:] = -1  # beyond the last length, where the table may hold anything
    out = decode_attention(**paged, **rows, lengths=lengths, block_table=table)
    torch.testing.assert_close(out, separately(tensors, rows, lengths), rtol=1e-4, atol=1e-5)


def test_without_lengths_it_is_causal_attention():
    tensors, rows, _ = make("cpu", 5)
    torch.testing.assert_close(
        decode_attention(**tensors, **rows), attention(**tensors, **rows, is_causal=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lengths": torch.tensor([1.0, 2, 3])}, TypeError, "lengths must be a tensor [B] of int32 or int64"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths must have shape [B] = [3], got [2]"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"block_table": torch.zeros(3)}, TypeError, "block_table must be a tensor [B, n]"),
        ({"block_table": torch.zeros(2, 4).int()}, ValueError, "block_table must have shape [B, n] with B = 3"),
        ({"block_table": torch.full((3, 4), 9).int()}, ValueError, "pages 0 to 2 within the lengths, got 9 to 9"),
        ({"alpha": torch.ones(3, 4, 2)}, ValueError, "alpha must have shape [B, H, T] = [3, 4, 1]"),
    ],
)
def test_invalid_arguments_raise_clear_errors(changes, error, words):
    tensors, rows, _ = make("cpu")
    with pytest.raises(error) as caught:
        decode_attention(**(tensors | rows | changes))
    assert words in str(caught.value)
