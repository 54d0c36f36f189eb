"""The sums of v of every row against a product with the dense mask, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.call import TensorSpec
from affine_attention.ops.fused.shared import row_sums, value_sums
from affine_attention.ops.fused.shared.launch import LaunchSet, Slot
from affine_attention.ops.fused.shared.limits import limit_arrays, limit_launches
from affine_attention.ops.fused.shared.rule import make_rule
from affine_attention.ops.fused.shared.workspace import Workspace

from ....interpreter import run_in_the_interpreter
from ..cudnn.test_cudnn import DEVICE, needs_triton, outside


def ids(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE)


CASES = {
    "more keys": (50, 170, {"is_causal": True}),
    "more queries": (170, 50, {"is_causal": True}),
    "window": (200, 200, {"is_causal": True, "window": 90}),
    "both ways": (150, 200, {"window": 40}),
    "documents": (200, 200, {"is_causal": True, "documents": (20, 100, 80)}),
    "out of order": (200, 200, {"is_causal": True, "documents": (20, 100, 80), "swap": True}),
    "padding": (200, 200, {"is_causal": True, "hidden": 70}),
}


@needs_triton
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_sums_of_their_visible_values(case, dim, block):
    queries, keys, options = CASES[case]
    options = dict(options)
    if "documents" in options:
        found = ids(*options.pop("documents"))
        options["query_segments"] = options["key_segments"] = 2 - found if options.pop("swap", False) else found
    if "hidden" in options:
        options["key_mask"] = torch.arange(keys, device=DEVICE)[None] >= options.pop("hidden")
    visibility = Visibility(1, queries, keys, DEVICE, **options)
    # The keys of a head are not contiguous in memory, as after a model's projection.
    value = torch.randn(1, keys, 3, dim, dtype=torch.float32, device=DEVICE).transpose(1, 2)
    dense = visibility.dense().expand(1, 1, queries, keys).double()
    right = dense @ value.double()
    unseen = dense.sum((0, 1, 2)) == 0
    value[:, :, unseen] = float("nan")

    state = Workspace(limit_arrays(visibility), torch.device(DEVICE))
    segments = [None if x is None else x.contiguous() for x in (visibility.query_segments, visibility.key_segments)]
    mask = None if visibility.key_mask is None else visibility.key_mask.contiguous().view(torch.int8)
    rule = make_rule(visibility, (Slot(1), Slot(2), Slot(3)), lambda name: Slot(6 + state.index(name)))
    launches = limit_launches(rule, 1)
    launches += row_sums.row_sum_launches(TensorSpec.of(value), Slot(0), Slot(4), Slot(5), rule, block)
    run = LaunchSet({"sums": launches}, state)
    for _ in range(2):  # the second launch is by address, on a GPU
        table = torch.full(value_sums.table_shape(value.shape, block), float("nan"), device=DEVICE)
        sums = torch.full(row_sums.row_sums_shape((1, 6, queries, dim), value.shape), float("nan"), device=DEVICE)
        values = run.values((value, *segments, mask, table, sums), state.new())
        run.run("sums", values, value.get_device())
        assert (sums - right).abs().max() < 1e-4


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
