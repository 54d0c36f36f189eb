"""Launches by address give what Triton's own launches give; buffers are laid out as the driver reports."""

from __future__ import annotations

import struct
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from affine_attention.ops.fused.shared import launch as launching  # noqa: E402
from affine_attention.ops.fused.shared.launch import Descriptor, Launch, LaunchSet, Slot  # noqa: E402
from affine_attention.ops.fused.shared.workspace import Workspace  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def _add_kernel(x, y, strides, shift, length, absent, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * strides[0], mask=at < length, other=0.0) + shift, mask=at < length)


@triton.jit
def _tile_kernel(x_desc, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    tile = x_desc.load([0, 0, row, 0]).reshape(ROWS, COLUMNS)
    at = (row + tl.arange(0, ROWS))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y + at, tile * 2)


class _OnGpu(NamedTuple):
    """As much of a tensor as the key of a launch looks at."""

    device: int
    dtype: torch.dtype = torch.float32

    def get_device(self):
        return self.device

    def data_ptr(self):
        return 2**20


def test_launches_of_two_gpus_are_kept_apart(monkeypatch):
    launches = {}
    monkeypatch.setattr(launching, "_single_launches", launches)

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    kernel = Kernel()
    for device in (0, 1, 0):
        launching.launch_kernel(kernel, (1,), [_OnGpu(device)], (7,))
    assert len(launches) == 2

    from affine_attention.ops.fused.op import _kind

    x = torch.empty(2, 2)
    assert _kind(x) != _kind(x.to("meta")), "plans hold descriptors, and belong to one device"


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2, 16])
def test_later_launches_go_by_address(dtype, stride):
    run = LaunchSet({"add": [Launch(_add_kernel, (1,), (Slot(0), Slot(1), (stride, 7), 1.5, 100, None, 128))]})
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2000, device="cuda").to(dtype)
        y = torch.zeros(2000, device="cuda", dtype=dtype)
        values = run.values((x, y))
        assert isinstance(values[0], int) == (seed > 0)
        run.run("add", values, 0)
        assert torch.equal(y[:100], (x[: 100 * stride : stride].float() + 1.5).to(dtype))
        assert not y[100:].any()


@needs_gpu
def test_descriptors_follow_the_address():
    x = torch.randn(1, 1, 256, 64, device="cuda", dtype=torch.bfloat16)
    descriptor = Descriptor(tuple(x.shape), x.stride(), (1, 1, 64, 64))
    run = LaunchSet({"tile": [Launch(_tile_kernel, (4,), (Slot(0, descriptor), Slot(1), 64, 64), num_warps=4)]})
    kept = []
    for _ in range(5):
        x, y = torch.randn_like(x), torch.zeros(256, 64, device="cuda", dtype=torch.bfloat16)
        kept.append(x)  # so that the next one has another address
        run.run("tile", run.values((x, y)), 0)
        assert torch.equal(y, (x * 2)[0, 0])


@needs_gpu
def test_a_launch_that_fails_says_so():
    launch = Launch(_add_kernel, (1,), (Slot(0), Slot(1), (1, 7), 1.5, 100, None, 128))
    x = torch.zeros(128, device="cuda")
    run = LaunchSet({"add": [launch]})
    run.run("add", [x, x], 0)
    launch.bound = launch.bound._replace(shared=2**30)
    with pytest.raises(RuntimeError, match="launching _add_kernel failed: CUDA error"):
        run.run("add", run.values((x, x)), 0)


def test_a_launch_is_packed_once_for_each_list_of_addresses(monkeypatch):
    """With a driver that only records: equal addresses reuse the packed buffer, and the kept buffers are limited."""
    seen = []
    bound = launching._Bound(
        "kernel", lambda *given: seen.append(given) or 0, 77, 128, 0, 0, 0, struct.Struct("<QQi"),
        [(0, None, b""), (1, None, b""), (2, None, b"")],
    )  # fmt: skip
    launch = Launch(None, (3,), ())
    launch.bound = bound
    run = LaunchSet({"only": [launch]})
    run._is_bound = True
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(launching, "MAX_PACKED", 2)
    first, second, third = [16, 32, 1], [48, 32, 1], [64, 32, 1]
    for addresses in (first, first, first, second, second, third, third):
        run.run("only", addresses, 0)
    assert len(seen) == 7
    assert seen[1] == seen[2] != seen[0]  # from the second time on in a buffer of their own
    assert seen[0] == seen[3] == seen[5]  # the first time in a buffer that all share
    assert len(run._packed) == 1  # two, cleared for the third
    (packed,) = next(iter(run._packed.values()))
    assert struct.unpack("<QQi", bytes(packed.buffers[0])) == (64, 32, 1)
    assert launching._CONFIG.unpack(bytes(packed.buffers[1]))[:8] == (3, 1, 1, 128, 1, 1, 0, 5)


def test_the_buffer_is_laid_out_as_the_driver_says():
    field = launching._Field
    fields = [
        field(8, 0, None, b""),
        field(4, None, None, struct.pack("<i", 7)),
        field(8, None, None, struct.pack("<q", 9)),
        field(128, 1, lambda address: bytes([address]) * 128, b""),
        field(4, None, None, struct.pack("<f", 1.5)),
    ]
    layout, values = launching._packing([(0, 8), (8, 4), (16, 8), (64, 128), (192, 4)], fields)
    assert [slot for slot, _, _ in values] == [0, None, 1, None]  # 7 and 9 are one run
    packed = layout.pack(*[constant if slot is None else 5 if encode is None else encode(3)
                           for slot, encode, constant in values])  # fmt: skip
    assert len(packed) == 196
    assert struct.unpack_from("<Qi4xq", packed) == (5, 7, 9)
    assert packed[64:192] == bytes([3]) * 128
    assert struct.unpack_from("<f", packed, 192) == (1.5,)


def test_slots_inside_tuples_are_filled():
    x = torch.zeros(3)
    assert launching._filled((1, (Slot(1), None), Slot(0)), [None, x]) == (1, (x, None), None)


def test_arrays_of_a_workspace_do_not_overlap():
    arrays = {"a": ((3, 5), torch.float32), "b": ((7,), torch.int8), "c": ((2,), torch.int32)}
    workspace = Workspace(arrays, torch.device("cpu"))
    buffer = workspace.new()
    views = workspace.views(buffer)
    for number, view in enumerate(views):
        view.fill_(number + 1)
    for number, (view, (shape, dtype)) in enumerate(zip(views, arrays.values(), strict=True)):
        assert (view.shape, view.dtype) == (shape, dtype)
        assert (view == number + 1).all()
        assert view.data_ptr() == buffer.data_ptr() + workspace.offsets[number]
