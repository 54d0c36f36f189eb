"""A kernel that is launched again is the one that Triton would choose: on a GPU the real one, elsewhere by its key."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from affine_attention.ops.fused import relaunch as room  # noqa: E402
from affine_attention.ops.fused.relaunch import relaunch  # noqa: E402


class Kernel:
    """Counts how often it is asked to choose a variant, and what the variants are launched with."""

    def __init__(self):
        self.chosen, self.launched = 0, []

    def __getitem__(self, grid):
        def choose(*args, **options):
            self.chosen += 1
            return Variant(self)

        return choose


class Variant:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(room, "INTERPRETED", False)
    monkeypatch.setattr(room, "_known", {})
    return Kernel()


def test_the_second_launch_asks_nothing(kernel):
    x, y = torch.zeros(4, 4), torch.ones(4, 4)
    relaunch(kernel, (7,), (x, None), (4, 1, True), num_warps=2)
    relaunch(kernel, (9, 2), (y, None), (4, 1, True), num_warps=2)
    assert kernel.chosen == 1
    ((grid, args),) = kernel.launched
    assert grid == (9, 2, 1)
    assert args[0] is y
    assert args[1:] == (None, 4, 1, True)


def test_whatever_decides_the_variant_is_in_the_key(kernel):
    whole = torch.zeros(64, dtype=torch.bfloat16)
    described = TensorDescriptor(whole.view(4, 16), [4, 16], [16, 1], [2, 16])
    wider = TensorDescriptor(whole.view(4, 16), [4, 16], [16, 1], [4, 16])
    calls = [
        ((whole,), (16,), {"num_warps": 2}),
        ((whole[8:],), (16,), {"num_warps": 2}),  # the same kind: still a multiple of 16 bytes
        ((whole[1:],), (16,), {"num_warps": 2}),
        ((whole.half(),), (16,), {"num_warps": 2}),
        ((None,), (16,), {"num_warps": 2}),
        ((whole,), (17,), {"num_warps": 2}),
        ((whole,), (16,), {"num_warps": 4}),
        ((described,), (16,), {"num_warps": 2}),
        ((wider,), (16,), {"num_warps": 2}),
    ]
    for tensors, numbers, options in calls:
        relaunch(kernel, (1,), tensors, numbers, **options)
    assert kernel.chosen == len(calls) - 1
    relaunch(other := Kernel(), (1,), *calls[0][:2], **calls[0][2])
    assert other.chosen == 1


def test_it_forgets_rather_than_grow(kernel, monkeypatch):
    monkeypatch.setattr(room, "LIMIT", 3)
    for number in range(10):
        relaunch(kernel, (1,), (), (number,))
        assert len(room._known) <= 3


@triton.jit
def _add_kernel(x, y, stride, length, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at * stride, mask=at < length, other=0.0) + 1, mask=at < length)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 16])
def test_on_a_gpu(dtype, offset, stride):
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2000, device="cuda").to(dtype)[offset:]
        y = torch.zeros(2000, device="cuda", dtype=dtype)[offset:]
        relaunch(_add_kernel, (1,), (x, y), (stride, 100, 128))
        assert torch.equal(y[:100], x[: 100 * stride : stride] + 1)
        assert not y[100:].any()
