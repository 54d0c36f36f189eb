"""The table of sums of v against fp64, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from affine_attention.ops.fused import sum_table

from ...interpreter import run_in_the_interpreter
from .test_cudnn import DEVICE, DTYPES, needs_triton, outside


@needs_triton
@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE == "cpu", reason="CUDA"))])
@pytest.mark.parametrize("shape", [(2, 3, 1000, 40), (1, 2, 64, 64), (1, 1, 5, 16), (1, 1, 33, 128)])
def test_rows_are_sums_of_the_blocks_before(shape, early):
    # Keys lie between the heads in memory, as a model's projection leaves them.
    value = torch.randn(shape, dtype=DTYPES[0], device=DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    table = sum_table.new_table(value).fill_(float("nan"))
    sum_table.fill(table, value, early)
    blocks = value.double().split(sum_table.block_of(shape[-1]), dim=2)
    right = torch.stack([block.sum(2) for block in blocks], 2).cumsum(2)
    assert not table[:, :, 0].any()
    assert (table[:, :, 1:] - right).abs().max() < 1e-4


def test_blocks_divide_the_tiles_of_the_forward():
    for dim in range(1, 65):
        assert 64 % sum_table.block_of(dim) == 0
        assert dim <= sum_table.padded(dim) < 2 * max(dim, 16)


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
