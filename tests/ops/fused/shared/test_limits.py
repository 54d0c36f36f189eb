"""The limits of queries and the tile ranges against the dense mask, in the interpreter or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
import triton
import triton.language as tl

from affine_attention.ops.fused.shared.launch import Launch, LaunchSet, Slot
from affine_attention.ops.fused.shared.limits import key_ranges, limit_arrays, limit_launches
from affine_attention.ops.fused.shared.rule import (
    can_have_empty_rows,
    depends_on_data,
    is_causal_only,
    make_rule,
    sums_are_prefixes,
)
from affine_attention.ops.fused.shared.tile_functions import query_span
from affine_attention.ops.fused.shared.tile_sizes import Config
from affine_attention.ops.fused.shared.workspace import Workspace

from ....interpreter import run_in_the_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
BLOCK_M, BLOCK_N = 32, 16


def ids_of(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


# name: (T, S, options, whether the sequence is irregular)
CASES = {
    "documents": (150, 150, {"is_causal": True, "ids": ids_of(1, 63, 64, 22)}, False),
    "documents, negative ids": (150, 150, {"is_causal": True, "ids": ids_of(100, 50) - 7}, False),
    "documents, large ids": (100, 100, {"ids": ids_of(40, 60) * 2**40}, False),
    "documents, chunk": (40, 150, {"is_causal": True, "ids": ids_of(30, 90, 30)}, False),
    "an id without keys": (4, 3, {"query_ids": torch.tensor([[0, 1, 2, 5]]), "ids": torch.tensor([[0, 2, 2]])}, False),
    "documents and window": (150, 150, {"is_causal": True, "window": 20, "ids": ids_of(70, 80)}, False),
    "window in both directions": (90, 100, {"window": 20, "ids": ids_of(50, 50)}, False),
    "descending ids": (100, 100, {"is_causal": True, "ids": -ids_of(40, 60)}, True),
    "an id that returns": (90, 90, {"ids": torch.tensor([[0] * 30 + [1] * 30 + [0] * 30])}, True),
    "left padding": (100, 100, {"is_causal": True, "mask": slice(30, 100)}, False),
    "right padding": (100, 100, {"is_causal": True, "mask": slice(0, 30)}, False),
    "both ends": (100, 100, {"mask": slice(20, 80)}, False),
    "nothing but padding": (100, 100, {"is_causal": True, "mask": slice(0, 0)}, False),
    "holes": (100, 100, {"is_causal": True, "mask": slice(0, 100, 2)}, True),
    "documents and padding": (100, 100, {"is_causal": True, "ids": ids_of(30, 70), "mask": slice(10, 90)}, False),
    "more than a chunk of keys": (20, 2100, {"is_causal": True, "ids": ids_of(1000, 1095, 5)}, False),
    "a long document": (20, 2100, {"is_causal": True, "ids": ids_of(1000, 1100)}, False),
    "more than a chunk of padding": (20, 2100, {"mask": slice(1030, 2099)}, False),
}


def visibility_of(case: str) -> Visibility:
    queries, keys, options, _ = CASES[case]
    options = dict(options)
    ids, own = options.pop("ids", None), options.pop("query_ids", None)
    if ids is not None:
        own = ids[:, keys - queries :] if own is None else own
        options |= {"query_segments": own.contiguous().to(DEVICE), "key_segments": ids.contiguous().to(DEVICE)}
    if "mask" in options:
        mask = torch.zeros(1, keys, dtype=torch.bool)
        mask[:, options.pop("mask")] = True
        options["key_mask"] = mask.to(DEVICE)
    return Visibility(1, queries, keys, DEVICE, **options)


@triton.jit
def query_spans_kernel(rule, spans, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program owns BLOCK_M queries; writes start, full_start, full_stop, stop, in tiles of keys."""
    block = tl.program_id(0)
    span = query_span(block, block * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1), rule, BLOCK_M, BLOCK_N)
    for n in tl.static_range(4):
        tl.store(spans + block * 4 + n, span[n])


def run(visibility: Visibility) -> dict[str, torch.Tensor]:
    """The limits, and the ranges of blocks of queries and of keys."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    state = Workspace(limit_arrays(visibility), device)
    rule = make_rule(visibility, (Slot(0), Slot(1), Slot(2)), lambda name: Slot(3 + state.index(name)))
    blocks = -(-visibility.num_queries // BLOCK_M)
    of_queries = {"query spans": ((1, blocks + 1, 4), torch.int32)}
    launches = [Launch(query_spans_kernel, (blocks + 1, 1), (rule, Slot(5), BLOCK_M, BLOCK_N))]
    of_keys, slot, more = key_ranges(rule, 1, Config(BLOCK_M, BLOCK_N, 4, 1), 6)
    assert slot == Slot(6)
    workspace = Workspace(of_queries | of_keys, device)
    mask = None if visibility.key_mask is None else visibility.key_mask.view(torch.int8)
    tensors = (visibility.query_segments, visibility.key_segments, mask)
    launches = LaunchSet({"all": [*limit_launches(rule, 1), *launches, *more]}, state, workspace)
    buffers = state.new().fill_(float("nan")), workspace.new().fill_(float("nan"))
    launches.run("all", launches.values(tensors, *buffers), -1 if DEVICE == "cpu" else 0)
    names = ("limits", "irregular", "query ranges", "key ranges")
    return dict(zip(names, (*state.views(buffers[0]), *workspace.views(buffers[1])), strict=True))


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_limits_are_those_of_the_dense_mask(case):
    queries, keys, _, irregular = CASES[case]
    visibility = visibility_of(case)
    found = run(visibility)
    assert bool(found["irregular"][0]) == irregular
    seen = visibility.dense()[0, 0].to("cpu").expand(queries, keys)
    for row, low, high in zip(seen, *found["limits"][0].tolist(), strict=True):
        visible = row.nonzero()
        assert (low, high) == ((int(visible[0]), int(visible[-1])) if len(visible) else (keys, -1))


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_ranges_cover_all_visible_pairs_and_skip_masks_only_where_all_are_visible(case):
    queries, keys, _, irregular = CASES[case]
    visibility = visibility_of(case)
    seen = visibility.dense()[0, 0].to("cpu").expand(queries, keys)
    found = run(visibility)
    blocks = -(-queries // BLOCK_M)
    of_queries, of_keys = found["query ranges"][0].tolist(), found["key ranges"][0].tolist()
    start, full_start, full_stop, stop = of_queries[blocks]
    assert start == full_start == full_stop == stop, "a block beyond the last query visits no tile"
    tiles = [
        [seen[m : m + BLOCK_M, n : n + BLOCK_N] for n in range(0, keys, BLOCK_N)] for m in range(0, queries, BLOCK_M)
    ]
    for m, (start, full_start, full_stop, stop) in enumerate(of_queries[:blocks]):
        assert start <= full_start <= full_stop <= stop
        for n, tile in enumerate(tiles[m]):
            assert start <= n < stop or not tile.any()
            assert not full_start <= n < full_stop or (tile.all() and tile.shape[1] == BLOCK_N)
    for n, (start, full_start, full_stop, stop) in enumerate(of_keys):
        assert start <= full_start <= full_stop <= stop
        for m in range(blocks):
            assert start <= m < stop or not tiles[m][n].any()
            assert not full_start <= m < full_stop or tiles[m][n].all()
    if irregular:
        assert all(each[1] == each[2] for each in (*of_queries, *of_keys)), "every tile of an irregular one is masked"


@needs_triton
def test_unmasked_tiles_are_found():
    """A long document has tiles without a mask, in both directions."""
    found = run(visibility_of("a long document"))
    assert found["query ranges"][0, 0].tolist() == [62, 63, 130, 132]
    assert found["key ranges"][0, 62].tolist() == [0, 0, 0, 1]
    assert found["key ranges"][0, 63].tolist() == [0, 0, 1, 1]
    found = run(visibility_of("both ends"))
    assert found["query ranges"][0, 0].tolist() == [1, 2, 5, 5]
    assert found["key ranges"][0, 3].tolist() == [0, 0, 4, 4]


def rule_of(visibility):
    return make_rule(visibility, (Slot(0), Slot(1), Slot(2)), lambda name: Slot({"limits": 3, "irregular": 4}[name]))


def test_a_rule_has_no_limits_that_no_pair_can_exceed():
    def rule(queries, keys, **options):
        return rule_of(Visibility(1, queries, keys, "cpu", **options))

    plain = rule(8, 8, is_causal=True)
    assert plain.ahead == 0
    assert plain.back is None
    assert is_causal_only(plain)
    assert rule(8, 8, is_causal=True, window=8).back is None
    assert rule(8, 8, is_causal=True, window=3).back == 2
    assert sums_are_prefixes(rule(8, 8))
    assert not is_causal_only(rule(8, 8))
    padded = rule(8, 8, key_mask=torch.ones(1, 8, dtype=torch.bool))
    assert (padded.key_mask, padded.limits, padded.irregular) == (Slot(2), Slot(3), Slot(4))
    assert not sums_are_prefixes(padded)
    assert not depends_on_data(Visibility(1, 8, 8, "cpu", is_causal=True, window=3))


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (9, 9, {"is_causal": True}), (5, 9, {"is_causal": True}), (9, 5, {"is_causal": True}), (9, 5, {}),
        (9, 5, {"window": 4}), (9, 5, {"window": 5}), (9, 5, {"window": 2}), (9, 5, {"is_causal": True, "window": 20}),
    ],
)  # fmt: skip
def test_a_rule_knows_whether_a_row_can_see_no_key(queries, keys, options):
    seen = Visibility(1, queries, keys, "cpu", **options)
    assert can_have_empty_rows(rule_of(seen)) == bool((seen.count() == 0).any())
    padded = Visibility(1, queries, keys, "cpu", key_mask=torch.ones(1, keys, dtype=torch.bool), **options)
    assert can_have_empty_rows(rule_of(padded))


@pytest.mark.skipif(INTERPRETED, reason="starts its own process")
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
