"""The forward in one kernel before cuDNN's backward, in the interpreter and on a GPU, as test_cudnn.py has it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from affine_attention.ops.reference import reference_attention
from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused import alone, cudnn

from .test_cudnn import AFFINE, ALL, DEVICE, DTYPES, INTERPRETED, assert_right, make, needs_triton, outside


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


def test_which_calls_it_serves(monkeypatch):
    class Query(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(alone, "capability_of", lambda x: 90)
    query = torch.zeros(1, 2, 4, 64).as_subclass(Query)

    def served(query=query, is_causal=True, softmax_scale=0.1):
        return alone.forwards_alone(query, query, is_causal, softmax_scale)

    assert served()
    assert not served(is_causal=False)
    assert not served(softmax_scale=-0.1)
    assert not served(query=torch.zeros(1, 2, 4, 72).as_subclass(Query))
    monkeypatch.setattr(alone, "capability_of", lambda x: 100)
    assert not served()


@outside
def test_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
