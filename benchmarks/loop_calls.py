"""Sections `host`, `device` and `counts`: one call of attention beside F.scaled_dot_product_attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import PLAIN_BACKENDS, Bench, Shape
from .loop_models import PLAIN, Sizes
from .loop_timing import Case, Function, Measured, host_seconds, scaled, take_turns
from .measure import median_seconds

HOST_MECHANISMS = {"affine": "affine", "sink": "sink", "gated": "gated", "no mechanism": "softmax"}
DEVICE_MECHANISMS = ("affine", "sink")


def bench_of(size: tuple[int, int, int, int], sizes: Sizes, device: str) -> Bench:
    batch, heads, length, dim = size
    return Bench(Shape("call", batch, heads, heads, length, dim), device, sizes.dtype)


def describe(size: tuple[int, int, int, int]) -> str:
    return "B{} H{} T{} D{}".format(*size)


def with_backward(forward: Callable[[], Tensor], given: dict[str, Tensor], grad_out: Tensor) -> Function:
    leaves = list(given.values())
    return lambda: torch.autograd.grad(forward(), leaves, grad_out)


def without_gradients(forward: Callable[[], Tensor]) -> Function:
    def call() -> Tensor:
        with torch.no_grad():
            return forward()

    return call


def calls_of(bench: Bench) -> dict[str, tuple[Callable[[], Tensor], dict[str, Tensor]]]:
    """Forward and inputs of every variant. Plain attention chooses its backend itself."""
    inputs = bench.of("softmax")
    query, key, value = inputs.values()
    plain = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)  # noqa: E731
    ours = {name: (bench.ours(preset), bench.of(preset)) for name, preset in HOST_MECHANISMS.items()}
    return {PLAIN: (plain, inputs), **ours}


def host(run: Any) -> Iterator[Case]:
    size = run.sizes.call
    bench = bench_of(size, run.sizes, run.device)
    calls = calls_of(bench)
    print(f"plain runs {', '.join(kernel_names(calls[PLAIN][0], run.device)) or 'on the CPU'}", flush=True)
    forward = {name: call for name, (call, _) in calls.items()}
    both = {name: with_backward(call, given, bench.grad_out) for name, (call, given) in calls.items()}
    seconds, rounds = host_seconds(run.device, run.host_calls), run.host_rounds
    with torch.no_grad():  # once around all calls: entering it takes host time too
        measured = take_turns(dict(forward), rounds, seconds)
    yield Case(f"host, forward, no_grad, {describe(size)}", "µs", scaled(measured, 1e6))
    for what, functions in (("forward with gradients", dict(forward)), ("forward + backward", both)):
        measured = take_turns(functions, rounds, seconds)
        yield Case(f"host, {what}, {describe(size)}", "µs", scaled(measured, 1e6))


def device(run: Any) -> Iterator[Case]:
    for size in (run.sizes.small_call, run.sizes.call):
        bench = bench_of(size, run.sizes, run.device)
        backends = list(PLAIN_BACKENDS[run.device].values())
        calls = {PLAIN: (bench.plain(backends[0]), bench.of("softmax"))}
        calls |= {f"plain, {each.name.lower()}": (bench.plain(each), bench.of("softmax")) for each in backends[1:]}
        calls |= {name: (bench.ours(name), bench.of(name)) for name in DEVICE_MECHANISMS}
        forward = {name: without_gradients(call) for name, (call, _) in calls.items()}
        both = {name: with_backward(call, given, bench.grad_out) for name, (call, given) in calls.items()}
        for what, functions in (("forward", forward), ("forward + backward", both)):
            measured: Measured = dict(median_seconds(functions, run.host_rounds, run.device))
            yield Case(f"device, {what}, {describe(size)}", "µs", scaled(measured, 1e6))


def counts(run: Any) -> Iterator[Case]:
    bench = bench_of(run.sizes.call, run.sizes, run.device)
    forwards, backwards = {}, {}
    for name, (call, given) in calls_of(bench).items():
        out, leaves = call(), list(given.values())
        forwards[name] = call
        backwards[name] = lambda out=out, leaves=leaves: torch.autograd.grad(
            out, leaves, bench.grad_out, retain_graph=True
        )
    for what, functions in (("forward", forwards), ("backward", backwards), ("decode step", decode_steps(bench))):
        for function in functions.values():
            function()
        if run.device == "cuda":
            launches: Measured = {name: float(len(launched(function))) for name, function in functions.items()}
            yield Case(f"launches, {what}", "launches", launches)
        calls: Measured = {name: float(python_calls(function)) for name, function in functions.items()}
        yield Case(f"Python calls, {what}", "calls", calls)


def decode_steps(bench: Bench) -> dict[str, Function]:
    """One new query for each sequence over the keys of the call, without gradients."""
    from affine_attention import attention

    def last(preset: str) -> dict[str, Tensor]:
        rows = ("query", "alpha", "beta", "gate")
        return {name: (x[:, :, -1:] if name in rows else x).detach() for name, x in bench.of(preset).items()}

    query, key, value = last("softmax").values()
    steps: dict[str, Callable[[], Tensor]] = {PLAIN: lambda: F.scaled_dot_product_attention(query, key, value)}
    for name, preset in HOST_MECHANISMS.items():
        given = last(preset)
        steps[name] = lambda given=given: attention(**given, is_causal=True, nonnegative_alpha=True)
    return {name: without_gradients(step) for name, step in steps.items()}


def python_calls(function: Function) -> int:
    """Python functions that a call enters. The backward stays on this thread, where they can be counted."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(on_event)
        try:
            function()
        finally:
            sys.setprofile(None)
    return count


def launched(function: Function) -> list[str]:
    """Names of all kernels, memory sets and copies that a call puts on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]


def kernel_names(function: Function, device: str) -> list[str]:
    if device != "cuda":
        return []
    function()
    return [name[:80] for name in launched(function)]
