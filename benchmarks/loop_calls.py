"""Sections `host`, `device` and `counts`: one call of attention against F.scaled_dot_product_attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_attention import attention

from .attention import PLAIN_BACKENDS, Bench, Shape
from .loop_options import CallSize, Run
from .loop_timing import PLAIN, Case, Function, Measured, host_seconds, scaled, take_turns
from .measure import median_seconds

PRESETS = {"affine": "affine", "sink": "sink", "gated": "gated", "no mechanism": "softmax"}
DEVICE_PRESETS = ("affine", "sink")
Forward = Callable[[], Tensor]
Inputs = dict[str, Tensor]


def make_bench(run: Run, size: CallSize) -> Bench:
    batch, heads, length, dim = size
    return Bench(Shape("call", batch, heads, heads, length, dim), run.device, run.sizes.dtype)


def shape_text(size: CallSize) -> str:
    return "B{} H{} T{} D{}".format(*size)


def calls_of(bench: Bench) -> dict[str, tuple[Forward, Inputs]]:
    """Forward and inputs of every variant. Plain attention chooses its backend itself."""
    inputs = bench.of("softmax")
    query, key, value = inputs.values()

    def plain() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return {PLAIN: (plain, inputs), **{name: (bench.ours(each), bench.of(each)) for name, each in PRESETS.items()}}


def with_backward(forward: Forward, inputs: Inputs, grad_out: Tensor) -> Function:
    leaves = list(inputs.values())
    return lambda: torch.autograd.grad(forward(), leaves, grad_out)


def without_gradients(forward: Forward) -> Function:
    def call() -> Tensor:
        with torch.no_grad():
            return forward()

    return call


def host(run: Run) -> Iterator[Case]:
    shape, bench = shape_text(run.sizes.call), make_bench(run, run.sizes.call)
    calls = calls_of(bench)
    yield Case("kernel of the plain forward", "", {PLAIN: kernel_names(calls[PLAIN][0], run.device)})
    forward: dict[str, Function] = {name: call for name, (call, _) in calls.items()}
    both = {name: with_backward(call, inputs, bench.grad_out) for name, (call, inputs) in calls.items()}
    seconds = host_seconds(run.device, run.host_calls)
    with torch.no_grad():  # around all calls, because entering it takes host time too
        measured = take_turns(forward, run.call_rounds, seconds)
    yield Case(f"host time, forward under no_grad, {shape}", "µs", scaled(measured, 1e6))
    for what, functions in (("forward with gradients", forward), ("forward + backward", both)):
        measured = take_turns(functions, run.call_rounds, seconds)
        yield Case(f"host time, {what}, {shape}", "µs", scaled(measured, 1e6))


def device(run: Run) -> Iterator[Case]:
    """The host runs ahead here. Plain attention is pinned to its fastest backend, which is cuDNN on a GPU."""
    for size in (run.sizes.small_call, run.sizes.call):
        bench = make_bench(run, size)
        first, *others = PLAIN_BACKENDS[run.device].items()
        calls = {PLAIN: (bench.plain(first[1]), bench.of("softmax"))}
        calls |= {f"plain, {name}": (bench.plain(backend), bench.of("softmax")) for name, backend in others}
        calls |= {name: (bench.ours(name), bench.of(name)) for name in DEVICE_PRESETS}
        forward = {name: without_gradients(call) for name, (call, _) in calls.items()}
        both = {name: with_backward(call, inputs, bench.grad_out) for name, (call, inputs) in calls.items()}
        for what, functions in (("forward", forward), ("forward + backward", both)):
            measured: Measured = dict(median_seconds(functions, run.call_rounds, run.device))
            yield Case(f"device time, {what}, {shape_text(size)}", "µs", scaled(measured, 1e6))


def counts(run: Run) -> Iterator[Case]:
    bench = make_bench(run, run.sizes.call)
    calls = calls_of(bench)
    forward: dict[str, Function] = {name: call for name, (call, _) in calls.items()}
    backward = {name: backward_alone(call, inputs, bench.grad_out) for name, (call, inputs) in calls.items()}
    yield from count_all(run, "forward", forward)
    yield from count_all(run, "backward", backward)
    with torch.no_grad():
        decode = list(count_all(run, "decode step", decode_steps(bench)))
    yield from decode


def backward_alone(forward: Forward, inputs: Inputs, grad_out: Tensor) -> Function:
    out, leaves = forward(), list(inputs.values())
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def decode_steps(bench: Bench) -> dict[str, Function]:
    """One new query for each sequence, over the keys of the call."""

    def last_query(preset: str) -> dict[str, Any]:
        by_query = ("query", "alpha", "beta", "gate")
        return {name: (x[:, :, -1:] if name in by_query else x).detach() for name, x in bench.of(preset).items()}

    def ours(inputs: dict[str, Any]) -> Function:
        return lambda: attention(**inputs, is_causal=True, nonnegative_alpha=True)

    query, key, value = last_query("softmax").values()
    steps = {name: ours(last_query(preset)) for name, preset in PRESETS.items()}
    return {PLAIN: lambda: F.scaled_dot_product_attention(query, key, value), **steps}


def count_all(run: Run, what: str, functions: dict[str, Function]) -> Iterator[Case]:
    for function in functions.values():
        function()  # what the first call plans and compiles does not count
    if run.device == "cuda":
        launches: Measured = {name: float(len(launched(function))) for name, function in functions.items()}
        yield Case(f"launches, {what}", "launches", launches)
    calls: Measured = {name: float(python_calls(function)) for name, function in functions.items()}
    yield Case(f"Python calls, {what}", "calls", calls)


def python_calls(function: Function) -> int:
    """Number of Python functions that `function`, itself not counted, calls.

    The backward runs on this thread: the threads of the autograd engine have no profile function.
    """
    count = -1

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
    """Names of all kernels, memory sets and copies that a call launches on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]


def kernel_names(function: Function, device: str) -> str:
    if device != "cuda":
        return "runs on the CPU"
    function()
    return ", ".join(f"`{name[:80]}`" for name in launched(function))
