"""Runs a call through a given route, on a GPU or in Triton's interpreter.

The interpreter has neither cuDNN nor Gluon. There PyTorch's CPU kernel replaces cuDNN's, and tests/gluon_simulator runs
the Gluon kernels.
"""

from __future__ import annotations

import itertools

import torch

from affine_attention.ops.call import AttentionCall
from affine_attention.ops.fused import INTERPRETED
from affine_attention.ops.fused.op import run_plan
from affine_attention.ops.fused.plan import Plan, Route, inputs_of
from affine_attention.ops.reference import reference_attention
from affine_attention.ops.sdpa import CpuFlash

from ...gluon_simulator import simulate

CPU_FLASH = CpuFlash("cpu_flash")


def make_route(
    forward: str, backward: str, call: AttentionCall, *, large: bool = False, ordered: bool = False
) -> Route:
    """The route that `choose_route` would return for these kernels. `large` calls do not save O."""
    alpha, beta, _, gate = call.rows
    if not call.needs_gradient:
        return Route(forward, None, "nothing", "chosen by a test")
    has_rows = alpha is not None or beta is not None or gate is not None
    drops_core = large and backward == "hopper" and gate is None
    saves = "softmax output" if has_rows and not drops_core else "output"
    shift = alpha is not None and gate is None and call.nonnegative_alpha and forward != "flash"
    shift = shift and saves == "softmax output"
    return Route(forward, backward, saves, "chosen by a test", shift=shift, ordered=ordered)


def by_route(forward: str, backward: str, *, large: bool = False, ordered: bool = False):
    """A function of the operator's tensors that runs these kernels."""

    def run(**given):
        call = AttentionCall.of(**given)
        route = make_route(forward, backward, call, large=large, ordered=ordered)
        kind = (route, call.softmax_scale, call.nonnegative_alpha, call.visibility.is_causal, call.visibility.window,
                *((None if x is None else (x.shape, x.stride(), x.dtype)) for x in inputs_of(call)))  # fmt: skip
        if kind not in plans:
            plans[kind] = Plan(call, route)
        return run_plan(plans[kind], inputs_of(call), call.needs_gradient)

    plans: dict[object, Plan] = {}
    return run


def draw_rows(batch, heads, queries, keys, dim, dtype, seed):
    """A function that draws normal numbers, and alpha, beta, sink and gate of a call, drawn by it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    rows = {
        "alpha": normal(batch, heads, queries),
        "beta": normal(batch, heads, queries) / keys,
        "sink": 3 * normal(heads),
        "gate": torch.sigmoid(normal(batch, heads, queries, dim)).to(dtype),
    }
    return normal, rows


def reference(**given):
    """The fp64 truth with the arguments of `by_route`."""
    given.pop("nonnegative_alpha", None)
    return reference_attention(AttentionCall.of(**given))


def attend_on_cpu(query, key, value, is_causal, softmax_scale):
    return CPU_FLASH.forward(query, key, value, None, is_causal, softmax_scale)[:2]


def attend_backward_on_cpu(grad, query, key, value, core, lse, is_causal, softmax_scale):
    lse = lse.reshape(lse.shape[:3])
    return CPU_FLASH.backward(grad, query, key, value, core, lse, None, None, is_causal, softmax_scale)


def simulate_gluon(self, *arguments, grid, warmup, **options):
    """A launch of a Gluon kernel. Every launch has another order of its asynchronous operations."""
    simulate(self, grid[0], *arguments, seed=next(SEEDS), **options)


SEEDS = itertools.count()


def use_cpu_kernels(monkeypatch) -> None:
    """In the interpreter, replaces cuDNN's kernels and simulates those in Gluon."""
    if not INTERPRETED:
        return
    from triton.experimental.gluon._runtime import GluonJITFunction

    monkeypatch.setattr(GluonJITFunction, "run", simulate_gluon)
    monkeypatch.setattr("affine_attention.ops.fused.cudnn.forward.attend", attend_on_cpu)
    monkeypatch.setattr("affine_attention.ops.fused.cudnn.backward.attend_backward", attend_backward_on_cpu)
