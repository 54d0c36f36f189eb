"""Counts, sums and blocks of a visibility against its dense mask."""

from __future__ import annotations

import itertools

import pytest
import torch

from affine_attention.ops.visibility import FEW_QUERIES, Visibility

LENGTHS = (0, 1, 7, FEW_QUERIES, FEW_QUERIES + 1, 65)


def make(queries, keys, *, is_causal=False, window=None, segments=False, padding=False, pairs=0, seed=0) -> Visibility:
    generator = torch.Generator().manual_seed(seed)

    def ids(length):  # far apart, negative, not contiguous, some only for queries or only for keys
        return torch.randint(-2, 4, (2, length), generator=generator) * 10**17

    return Visibility(
        2,
        queries,
        keys,
        torch.device("cpu"),
        is_causal,
        window,
        ids(queries) if segments else None,
        ids(keys) if segments else None,
        torch.rand((2, keys), generator=generator) < 0.6 if padding else None,
        torch.rand((2, pairs, queries, keys), generator=generator) < 0.6 if pairs else None,
    )


@pytest.mark.parametrize("pairs", [0, 1, 3])
@pytest.mark.parametrize(("is_causal", "window"), list(itertools.product([False, True], [None, 1, 5, 100])))
def test_counts_and_sums_equal_products_with_the_dense_mask(is_causal, window, pairs):
    for queries, keys, segments, padding in itertools.product(LENGTHS, LENGTHS, [False, True], [False, True]):
        seen = make(queries, keys, is_causal=is_causal, window=window, segments=segments, padding=padding, pairs=pairs)
        dense = seen.dense().expand(2, max(pairs, 1), queries, keys)
        assert torch.equal(seen.count().expand(2, max(pairs, 1), queries), dense.sum(-1))
        indices = (
            torch.arange(n).view([-1 if at == dim else 1 for at in range(4)]) for dim, n in enumerate(dense.shape)
        )
        assert torch.equal(seen.sees(*indices).expand(dense.shape), dense)
        x = torch.randn(2, 3, keys, 4, dtype=torch.float64)
        y = torch.randn(2, 3, queries, 4, dtype=torch.float64)
        torch.testing.assert_close(seen.sum_keys(x), dense.double() @ x)
        torch.testing.assert_close(seen.sum_queries(y), dense.double().mT @ y)


def test_counts_need_no_product_of_integers():
    """CUDA has none: counting the keys of a few queries with padding and a window would fail there."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoIntegerProducts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            is_product = function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm)
            assert not is_product or args[0].is_floating_point()
            return function(*args, **(kwargs or {}))

    for queries, keys in itertools.product((1, 5), (7, 40)):
        seen = make(queries, keys, is_causal=True, window=4, segments=True, padding=True)
        with NoIntegerProducts():
            counts = seen.count()
        assert counts.dtype == torch.int64
        assert torch.equal(counts, seen.dense().sum(-1))


def test_dense_mask_equals_the_definition():
    seen = make(5, 9, is_causal=True, window=3, segments=True, padding=True)
    dense = seen.dense()
    for b, i, j in itertools.product(range(2), range(5), range(9)):
        position = i + 4
        expected = (
            j <= position
            and position - j < 3
            and bool(seen.query_segments[b, i] == seen.key_segments[b, j])
            and bool(seen.key_mask[b, j])
        )
        assert bool(dense[b, 0, i, j]) == expected


def test_key_bounds_are_tight_for_causal_and_window():
    for queries, keys in itertools.product((1, 5, 20), repeat=2):
        for is_causal, window in itertools.product([False, True], [None, 1, 4]):
            seen = make(queries, keys, is_causal=is_causal, window=window)
            dense = seen.dense()[0, 0]
            for first in range(queries):
                columns = dense[first : first + 3].any(0).nonzero().flatten().tolist()
                start, stop = seen.key_bounds(first, min(first + 2, queries - 1))
                assert (start, stop) == ((columns[0], columns[-1] + 1) if columns else (start, start))


def test_values_outside_a_range_do_not_affect_its_sum():
    """A difference of prefix sums would mix a huge or NaN value of another document into the sum."""
    seen = make(40, 40, is_causal=True, window=6)
    x = torch.randn(2, 1, 40, 2)
    clean = seen.sum_keys(x)
    for intruder in (1e30, torch.nan, torch.inf):
        dirty = x.clone()
        dirty[:, :, 10] = intruder
        summed = seen.sum_keys(dirty)
        outside = [i for i in range(40) if not 10 <= i < 16]
        assert torch.equal(summed[:, :, outside], clean[:, :, outside])


def test_slice_of_a_batch():
    seen = make(6, 6, is_causal=True, segments=True, padding=True, pairs=1)
    part = seen.for_batch(slice(1, 2))
    assert part.batch == 1
    assert torch.equal(part.dense(), seen.dense()[1:2])
