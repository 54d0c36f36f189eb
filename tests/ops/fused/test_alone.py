"""The forward in one kernel before cuDNN's backward, in the interpreter and on a GPU, as test_cudnn.py has it."""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.reference import reference_attention
from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused import alone, alone_backward, choose, cudnn, sum_table

from ...interpreter import run_in_the_interpreter
from .test_cudnn import AFFINE, ALL, DEVICE, DTYPES, INTERPRETED, assert_right, make, needs_triton, outside

needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def always(monkeypatch):
    """Every call that can be served is, on the CPU too."""
    monkeypatch.setattr(cudnn, "forwards_alone", lambda *args: True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 2, 2, 200, 200, 64), AFFINE),  # tiles of every kind
        ((1, 2, 2, 100, 100, 64), ("sink",)),
        ((2, 4, 2, 130, 130, 32), ALL),
        ((1, 4, 2, 33, 33, 24), ("beta", "sink")),
        ((1, 2, 1, 2, 2, 16), ("alpha", "gate")),
        ((1, 2, 1, 129, 129, 40), ("beta",)),
    ],
)
@pytest.mark.parametrize("nonnegative_alpha", [True, False])
def test_serves_the_backward(always, shape, names, dtype, nonnegative_alpha):
    if nonnegative_alpha and "alpha" not in names:
        pytest.skip("a promise about alpha, without alpha")
    inputs, grad = make(*shape, names, dtype, nonnegative_alpha)
    visibility = Visibility(shape[0], shape[3], shape[4], grad.device, is_causal=True)
    seeds = range(1, 3 if INTERPRETED else 8)
    others = [make(*shape, names, dtype, nonnegative_alpha, seed=n) for n in seeds]
    assert_right(inputs, grad, visibility, others, nonnegative_alpha=nonnegative_alpha)


@needs_triton
@pytest.mark.parametrize("names", [ALL, AFFINE, ("alpha", "sink", "gate"), ("gate",)])
def test_without_a_gradient(always, names):
    inputs, _ = make(1, 4, 2, 200, 200, 32, names, DTYPES[0])
    visibility = Visibility(1, 200, 200, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs}
    out = cudnn.cudnn_attention(**given, visibility=visibility, softmax_scale=0.3)
    kept = cudnn.cudnn_attention(
        **{**given, "query": inputs["query"].requires_grad_()}, visibility=visibility, softmax_scale=0.3
    ).detach()
    given = {name: None if x is None else x.detach().double() for name, x in given.items()}
    right = reference_attention(**given, visibility=visibility, softmax_scale=0.3)
    # What is kept for a backward has other products, so the last bit may differ.
    assert (out - kept).norm() <= 4 * torch.finfo(out.dtype).eps * right.norm()
    assert (out.double() - right).norm() <= torch.finfo(out.dtype).eps * right.norm() * (8 if INTERPRETED else 1)


@needs_triton
@pytest.mark.parametrize("names", [("sink",), ALL])
@pytest.mark.skipif(INTERPRETED, reason="the stand-in for cuDNN lays its log-sum-exp out otherwise")
def test_is_registered(always, names):
    inputs, _ = make(1, 4, 2, 70, 70, 16, names, DTYPES[0])
    given = {**dict.fromkeys(("query", "key", "value", *ALL)), **{n: x.requires_grad_() for n, x in inputs.items()}}
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    for keeps in (True, False):
        args = (*given.values(), True, 0.25, False, keeps)
        torch.library.opcheck(torch.ops.affine_attention.cudnn_forward.default, args, test_utils=utils)


@needs_gpu
def test_it_waits_for_the_sums_of_the_values(always):
    """The kernel begins before the sums are there; were it not to wait, it would read what the memory held: NaN."""
    inputs, _ = make(8, 16, 16, 1000, 1000, 64, AFFINE, DTYPES[0])
    visibility = Visibility(8, 1000, 1000, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}
    first = cudnn.cudnn_attention(**given)
    shape = sum_table.table_shape(inputs["value"])
    for _ in range(1000):
        torch.full(shape, float("nan"), device=DEVICE)  # the table is made where this was
        assert torch.equal(cudnn.cudnn_attention(**given), first)


@needs_gpu
def test_in_a_cuda_graph(always):
    inputs, grad = make(2, 4, 2, 300, 300, 64, AFFINE, DTYPES[0])
    visibility = Visibility(2, 300, 300, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **{name: x.requires_grad_() for name, x in inputs.items()}}

    def step():
        out = cudnn.cudnn_attention(**given, visibility=visibility, softmax_scale=0.125)
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
def test_offsets_beyond_32_bits(always):
    """Two sequences that lie more than 2^31 elements apart."""
    heads, length, dim = 2, 200, 64
    apart = 2**31 + 4096
    memory = torch.empty(apart + 4 * heads * length * dim, dtype=DTYPES[0], device=DEVICE)
    inputs, _ = make(2, heads, heads, length, length, dim, AFFINE, DTYPES[0])
    visibility = Visibility(2, length, length, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}
    right = cudnn.cudnn_attention(**given)
    for place, name in enumerate(("query", "key", "value")):
        strides, offset = (apart, length * dim, dim, 1), place * heads * length * dim
        given[name] = memory.as_strided((2, heads, length, dim), strides, offset).copy_(inputs[name])
    assert torch.equal(cudnn.cudnn_attention(**given), right)


def test_which_calls_it_serves(monkeypatch):
    class Query(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(alone, "capability_of", lambda x: 90)
    monkeypatch.setattr(alone_backward, "capability_of", lambda x: 100)
    query = torch.zeros(1).as_subclass(Query).expand(1, 128, 1024, 64)

    def served(query=query, is_causal=True, softmax_scale=0.1):
        return alone.forwards_alone(query, query, is_causal, softmax_scale)

    assert served()
    assert not served(is_causal=False)
    assert not served(softmax_scale=-0.1)
    assert not served(query=query[..., :1].expand(1, 128, 1024, 72))
    assert not served(query=query[:, :127])
    causal = Visibility(1, 1024, 1024, "cpu", is_causal=True)
    assert "one kernel forward, cuDNN backward" in choose._why_cudnn(query, query, causal, True)
    assert "between fused passes" in choose._why_cudnn(query[:, :127], query, causal, True)
    assert "between fused passes" in choose._why_cudnn(query, query, causal, False)
    monkeypatch.setattr(alone, "capability_of", lambda x: 100)
    assert not served()


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
