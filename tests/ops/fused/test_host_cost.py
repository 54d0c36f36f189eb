"""The host's work for a call stays within a written budget: Python calls and launches, counted without a GPU.

The plans are the real ones, with launches that do nothing. The budgets are what the code needs today; docs/kernels.md
says what a Python call and a launch cost on the host of an H200.
"""

from __future__ import annotations

import sys

import pytest
import torch

from affine_attention import attention
from affine_attention.ops import api
from affine_attention.ops.call import AttentionCall, CallSpec

pytest.importorskip("triton")
from affine_attention.ops.fused import op, projected
from affine_attention.ops.fused import plan as planning
from affine_attention.ops.fused.decode.attention import Decode
from affine_attention.ops.fused.plan import Plan, Route
from affine_attention.ops.fused.shared.launch import LaunchSet
from affine_attention.ops.visibility import Visibility

PYTHON_CALLS = {"forward without a gradient": 21, "forward": 15, "backward": 15}


def small_call(length=1024, heads=16, dim=64, batch=2, **rows):
    def draw(*shape):
        return torch.zeros(shape, requires_grad=True)

    query, key, value = (draw(batch, heads, length, dim) for _ in range(3))
    rows = rows or {"alpha": draw(batch, heads, length), "beta": draw(batch, heads, length)}
    return {"query": query, "key": key, "value": value, **rows}


@pytest.fixture
def without_launches(monkeypatch):
    """Plans of the Hopper route on the CPU, with launches that do nothing."""
    route = Route("hopper", "hopper", "softmax output", "named by a test", shift=True)
    monkeypatch.setattr(api, "why_not_fused", lambda call: None)
    monkeypatch.setattr(api, "choose_route", lambda call, needs_gradient: route)
    monkeypatch.setattr(op, "choose_route", lambda call, needs_gradient: route)
    monkeypatch.setattr(LaunchSet, "run", lambda *_: None)
    monkeypatch.setattr(LaunchSet, "values", lambda self, tensors, *buffers: [])
    api.forget_plans()
    yield
    api.forget_plans()


def python_calls(function) -> int:
    """Python functions that a call of the function enters, itself not counted."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event == "call"

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(see)
        try:
            function()
        finally:
            sys.setprofile(None)
    return count - 1


def test_python_calls_stay_within_the_budget(without_launches):
    given = small_call()

    def forward():
        return attention(**given, is_causal=True, nonnegative_alpha=True)

    def forward_without_a_gradient():
        with torch.no_grad():
            forward()

    out, leaves = forward(), list(given.values())
    grad = torch.zeros_like(out)

    def backward(out=out):
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    for name, function in (
        ("forward without a gradient", forward_without_a_gradient), ("forward", forward), ("backward", backward)
    ):  # fmt: skip
        function()
        function()
        own = 0
        if name == "backward":  # autograd.grad enters some functions of its own
            xs = [torch.zeros(3, requires_grad=True) for _ in leaves]
            y = sum(xs)
            ones = torch.ones_like(y)
            own = python_calls(lambda y=y, xs=xs, ones=ones: torch.autograd.grad(y, xs, ones, retain_graph=True))
        counted = python_calls(function) - own
        assert counted <= PYTHON_CALLS[name], f"{name}: {counted} Python calls"


def test_a_call_without_a_mechanism_is_one_look_up(monkeypatch):
    """Beyond PyTorch's attention, whatever the strides; other signatures are validated and find their own route."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(api, "why_not_fused", lambda call: None)
    monkeypatch.setattr(api, "choose_route", lambda call, needs: Route("sdpa", "sdpa", "output", "named by a test"))
    api.forget_plans()
    query, key = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
    try:
        for strided in (key, key.transpose(1, 2).contiguous().transpose(1, 2)):
            attention(query, key, strided, is_causal=True)
        assert python_calls(lambda: attention(query, key, key, is_causal=True)) <= 4
        assert len(api._plain_calls) == 1
        for wrong, words in (
            ({"is_causal": 1}, "is_causal"), ({"softmax_scale": True}, "softmax_scale"),
            ({"value": key[:, :, 1:]}, "value"), ({"value": key.double()}, "value"),
            ({"nonnegative_alpha": 1}, "nonnegative_alpha"), ({"key": key.to_sparse()}, "key"),
        ):  # fmt: skip
            for _ in range(2):
                with pytest.raises((TypeError, ValueError), match=words):
                    attention(**{"query": query, "key": key, "value": key, "is_causal": True} | wrong)
    finally:
        api.forget_plans()


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({"length": 512, "heads": 8}, 1, 3),
        ({"length": 1024}, 2, 3),
        ({"length": 2048, "heads": 9, "batch": 8}, 2, 3),
        ({"length": 4096}, 3, 4),
    ],
)
def test_a_small_call_takes_few_launches(monkeypatch, settings, forward, backward):
    given = {name: x.detach()[:, :, :1].expand(x.shape) if x.ndim == 4 else x.detach() for name, x in
             small_call(**settings | {"dim": 64}).items()}  # fmt: skip
    call = AttentionCall.of(
        **given, visibility=Visibility(given["query"].shape[0], *given["query"].shape[2:3] * 2, "cpu", is_causal=True),
        softmax_scale=0.1, nonnegative_alpha=True,
    )  # fmt: skip
    monkeypatch.setattr(planning, "_is_addressable", lambda x: True)
    plan = Plan(call, Route("hopper", "hopper", "softmax output", "named by a test", shift=True))
    assert len(plan.forward.launches.groups["forward"]) == forward
    found = plan._backward(given["query"], given["query"], None, False)
    assert sum(map(len, found.launches.groups.values())) == backward


def test_a_layer_takes_one_node_with_the_projection_among_its_launches(without_launches, monkeypatch):
    """The training call of SmolLM2-135M's layers: 3 forward launches, 5 backward launches, few Python calls."""
    monkeypatch.setattr(projected, "choose_route", lambda call, needs_gradient: Route(
        "hopper", "hopper", "softmax output", "named by a test", shift=True))  # fmt: skip
    batch, length, heads, groups, model_dim = 2, 2048, 9, 3, 576

    def draw(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    query, key, value = (draw(batch, each, length, 64) for each in (heads, groups, groups))
    hidden, weight, collected = (
        draw(batch, length, model_dim),
        draw(heads, model_dim),
        draw(heads + 1, dtype=torch.float64),
    )

    def forward():
        return projected.projected_attention(
            query, key, value, None, None, hidden, weight, torch.zeros(heads), collected, None, 0.125, 2048, False
        )

    leaves = (query, key, value, hidden, weight, collected)
    out = forward()
    grad = torch.zeros_like(out)

    def backward():
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    backward()
    (plan,) = projected._plans.values()
    assert len(plan.forward.launches.groups["forward"]) == 3
    (found,) = plan._backwards.values()
    assert sum(map(len, found.launches.groups.values())) == 5
    assert python_calls(forward) <= 13
    xs = [torch.zeros(3, requires_grad=True) for _ in leaves]
    y = sum(xs)
    own = python_calls(lambda: torch.autograd.grad(y, xs, torch.ones_like(y), retain_graph=True))
    assert python_calls(backward) - own <= 16


@pytest.mark.parametrize(("keys", "launches"), [(144, 1), (512, 1), (640, 2)])
def test_a_decode_step_takes_one_launch_where_the_cache_is_short(keys, launches):
    query, key = torch.zeros(1, 9, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 3, keys, 64, dtype=torch.bfloat16)
    row = torch.zeros(1, 9, 1)
    visibility = Visibility(1, 1, keys, query.device, is_causal=True)
    call = AttentionCall.of(query, key, key, alpha=row, beta=row, visibility=visibility, softmax_scale=0.1)
    assert len(Decode(CallSpec.of(call)).launches.groups["decode"]) == launches
