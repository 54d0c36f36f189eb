"""The Hopper forward with cuDNN's and the Hopper backward, in the interpreter and on a GPU (routes.py)."""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.call import AttentionCall
from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused import plan as planning
from affine_attention.ops.fused.hopper import backward as hopper_backward

from ....interpreter import run_in_the_interpreter
from ..cudnn.test_cudnn import (
    AFFINE,
    ALL,
    DEVICE,
    DTYPES,
    INTERPRETED,
    assert_right,
    make,
    needs_triton,
    on_this_device,  # noqa: F401
    outside,
)
from ..routes import by_route, reference

needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")


by_hopper = by_route("hopper", "cudnn")


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 2, 2, 200, 200, 64), AFFINE),  # all kinds of tiles
        ((1, 2, 2, 100, 100, 64), ("sink",)),
        ((2, 4, 2, 130, 130, 32), ALL),
        ((1, 4, 2, 33, 33, 24), ("beta", "sink")),
        ((1, 2, 1, 2, 2, 16), ("alpha", "gate")),
        ((1, 2, 1, 129, 129, 40), ("beta",)),
        ((1, 2, 1, 130, 130, 128), ALL),
    ],
)
@pytest.mark.parametrize("nonnegative_alpha", [True, False])
def test_its_state_gives_correct_gradients(shape, names, dtype, nonnegative_alpha):
    if nonnegative_alpha and "alpha" not in names:
        pytest.skip("nonnegative_alpha without alpha")
    inputs, grad = make(*shape, names, dtype, nonnegative_alpha)
    visibility = Visibility(shape[0], shape[3], shape[4], grad.device, is_causal=True)
    seeds = range(1, 3 if INTERPRETED else 8)
    others = [make(*shape, names, dtype, nonnegative_alpha, seed=n) for n in seeds]
    assert_right(inputs, grad, visibility, others, by_hopper, nonnegative_alpha=nonnegative_alpha)


@needs_triton
@pytest.mark.parametrize("names", [ALL, AFFINE, ("alpha", "sink", "gate"), ("gate",)])
def test_without_a_gradient(names):
    inputs, _ = make(1, 4, 2, 200, 200, 32, names, DTYPES[0])
    visibility = Visibility(1, 200, 200, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs}
    out = by_hopper(**given, visibility=visibility, softmax_scale=0.3)
    kept = by_hopper(
        **{**given, "query": inputs["query"].requires_grad_()}, visibility=visibility, softmax_scale=0.3
    ).detach()
    given = {name: None if x is None else x.detach().double() for name, x in given.items()}
    right = reference(**given, visibility=visibility, softmax_scale=0.3)
    # With gradients the kernel uses different MMAs, so the last bit may differ.
    assert (out - kept).norm() <= 4 * torch.finfo(out.dtype).eps * right.norm()
    assert (out.double() - right).norm() <= torch.finfo(out.dtype).eps * right.norm() * (8 if INTERPRETED else 1)


@needs_gpu
def test_the_kernel_waits_for_the_sums_of_values():
    """The kernel starts before the sums are written. If it did not wait, it would read the old content, NaN."""
    inputs, _ = make(8, 16, 16, 1000, 1000, 64, AFFINE, DTYPES[0])
    visibility = Visibility(8, 1000, 1000, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}
    first = by_hopper(**given)
    for _ in range(1000):
        torch.full((8, 16, 64, 64), float("nan"), device=DEVICE)  # the table reuses this memory
        assert torch.equal(by_hopper(**given), first)


@needs_gpu
def test_in_a_cuda_graph():
    inputs, grad = make(2, 4, 2, 300, 300, 64, AFFINE, DTYPES[0])
    visibility = Visibility(2, 300, 300, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **{name: x.requires_grad_() for name, x in inputs.items()}}

    def step():
        out = by_hopper(**given, visibility=visibility, softmax_scale=0.125)
        return out, *torch.autograd.grad(out, list(inputs.values()), grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        right = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        for x in captured:
            x.data.fill_(float("nan"))
        graph.replay()
        for x, expected in zip(captured, right, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-2)


@needs_gpu
def test_offsets_beyond_32_bits():
    """Two sequences that are more than 2^31 elements apart in memory."""
    heads, length, dim = 2, 200, 64
    apart = 2**31 + 4096
    memory = torch.empty(apart + 4 * heads * length * dim, dtype=DTYPES[0], device=DEVICE)
    inputs, _ = make(2, heads, heads, length, length, dim, AFFINE, DTYPES[0])
    visibility = Visibility(2, length, length, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}
    right = by_hopper(**given)
    for place, name in enumerate(("query", "key", "value")):
        strides, offset = (apart, length * dim, dim, 1), place * heads * length * dim
        given[name] = memory.as_strided((2, heads, length, dim), strides, offset).copy_(inputs[name])
    assert torch.equal(by_hopper(**given), right)


class OnGpu(torch.Tensor):
    """A tensor without memory whose device is reported as a GPU."""

    device = torch.device("cuda", 0)
    is_cuda = True


def call_like(heads=16, length=1024, dim=64, *, batch=2, causal=True, scale=0.1, names=AFFINE, nonnegative=True):
    like = torch.zeros(1, dtype=torch.bfloat16).as_subclass(OnGpu)
    query = like.expand(batch, heads, length, dim)
    rows = {name: like.expand(batch, heads, length) for name in names}
    visibility = Visibility(batch, length, length, query.device, is_causal=causal)
    return AttentionCall.of(
        query, query, query, visibility=visibility, softmax_scale=scale, nonnegative_alpha=nonnegative, **rows
    )


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(planning, "capability_of", lambda x: 90)
    monkeypatch.setattr(planning, "why_not_cudnn", lambda call: None)
    monkeypatch.setattr(hopper_backward, "why_not_here", lambda: None)


@pytest.mark.parametrize(
    ("changes", "forward", "backward", "saves"),
    [
        ({}, "hopper", "hopper", "softmax output"),
        ({"length": 100}, "hopper", "hopper", "softmax output"),
        ({"heads": 256}, "hopper", "hopper", "output"),
        ({"dim": 128}, "hopper", "hopper", "softmax output"),
        ({"dim": 128, "heads": 128}, "cudnn", "hopper", "output"),
        ({"dim": 32}, "hopper", "cudnn", "softmax output"),
        ({"dim": 136}, "cudnn", "cudnn", "softmax output"),
        ({"causal": False}, "cudnn", "cudnn", "softmax output"),
        ({"scale": -0.1}, "cudnn", "cudnn", "softmax output"),
        ({"names": ()}, "sdpa", "sdpa", "output"),
        ({"dim": 20}, "flash", "flash", "softmax output"),
    ],
)
def test_which_kernels_a_call_uses(on_hopper, changes, forward, backward, saves):
    route = planning.choose_route(call_like(**changes), needs_gradient=True)
    assert (route.forward, route.backward, route.saves) == (forward, backward, saves)
    without = planning.choose_route(call_like(**changes), needs_gradient=False)
    assert (without.forward, without.backward) == (forward, None)


def test_large_calls_keep_o_where_the_user_asks_for_it(on_hopper, monkeypatch):
    large = call_like(heads=256)
    assert "AFFINE_KEEP_O=1" in planning.choose_route(large, needs_gradient=True).reason
    monkeypatch.setattr(planning, "KEEPS_O", True)
    route = planning.choose_route(large, needs_gradient=True)
    assert route.saves == "softmax output"
    assert "AFFINE_KEEP_O" not in route.reason


def test_the_route_gives_the_reason_against_the_hopper_backward(on_hopper, monkeypatch):
    monkeypatch.setattr(hopper_backward, "why_not_here", lambda: "needs Triton 3.6, got 4.0")
    route = planning.choose_route(call_like(), needs_gradient=True)
    assert route.backward == "cudnn"
    assert "needs Triton 3.6, got 4.0" in route.reason
    assert route.kernels == ("hopper forward", "cudnn backward")
    monkeypatch.setattr(planning, "capability_of", lambda x: 100)
    assert planning.choose_route(call_like(), needs_gradient=True).kernels == ("cudnn",)
    monkeypatch.setattr(planning, "capability_of", lambda x: 80)
    assert planning.choose_route(call_like(), needs_gradient=True).kernels == ("flash",)


def test_deterministic_calls_add_dq_in_a_fixed_order(on_hopper):
    torch.use_deterministic_algorithms(True)
    try:
        route = planning.choose_route(call_like(), needs_gradient=True)
        others = [
            planning.choose_route(call_like(**each), True) for each in ({"dim": 32}, {"causal": False}, {"names": ()})
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert route.kernels == ("hopper",)
    assert route.ordered
    assert "fixed order" in route.reason
    assert all(each.kernels == ("flash",) for each in others)
    assert all("deterministic" in each.reason for each in others)
    assert not planning.choose_route(call_like(), needs_gradient=True).ordered


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
