"""The table of sums of v against fp64, in the interpreter and on a GPU."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from affine_attention.ops.fused.shared import value_sums
from affine_attention.ops.fused.shared.launch import LaunchSet, Slot

from ....interpreter import run_in_the_interpreter
from ..cudnn.test_cudnn import DEVICE, DTYPES, needs_triton, outside


@needs_triton
@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE == "cpu", reason="CUDA"))])
@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 1000, 40), (1, 2, 64, 64), (1, 1, 5, 16), (1, 1, 33, 128)])
def test_rows_are_sums_of_the_blocks_before(shape, early, scans):
    # The keys of a head are not contiguous in memory, as after a model's projection.
    value = torch.randn(shape, dtype=DTYPES[0], device=DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
    blocks = value.double().split(value_sums.block_of(shape[-1]), dim=2)
    right = torch.stack([block.sum(2) for block in blocks], 2)
    right = right.cumsum(2) if scans else right
    launches = value_sums.sum_launches(shape, value.stride(), Slot(0), Slot(1), scans=scans, early=early)
    assert len(launches) == 1 + scans
    run = LaunchSet({"sums": launches})
    for _ in range(2):  # the second launch is by address, on a GPU
        table = torch.full(value_sums.table_shape(shape), float("nan"), device=DEVICE)
        run.run("sums", run.values((value, table)), value.get_device())
        assert not table[:, :, 0].any()
        assert (table[:, :, 1:] - right).abs().max() < 1e-4


def test_blocks_divide_the_tiles_of_the_forward():
    for dim in range(1, 129):
        assert 64 % value_sums.block_of(dim) == 0
        assert dim <= value_sums.padded(dim) < 2 * max(dim, 16)


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


def test_a_scan_in_place_reads_its_tile_before_it_writes():
    """Without the barrier one thread can overwrite what another has not read: `make sanitize` shows it on a GPU."""
    kernels = [path.read_text() for path in Path(value_sums.__file__).parents[1].rglob("*.py")]
    scans = [found for text in kernels for found in re.findall(r"tl\.store\(.*tl\.cumsum\(.* \+ carry", text)]
    assert len(scans) == 1, "one copy of the scan"
    source = inspect.getsource(value_sums.scan_kernel.fn)
    assert source.index("tl.load(ptrs") < source.index("tl.debug_barrier()") < source.index("tl.store(ptrs")
