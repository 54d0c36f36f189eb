"""Runs a call through a given route, on a GPU or in Triton's interpreter.

The interpreter has neither cuDNN nor Gluon. There PyTorch's CPU kernel replaces cuDNN's, and a plain PyTorch version of
the formulas in the docstring of hopper/backward_kernels.py replaces that kernel.
"""

from __future__ import annotations

import torch

from affine_attention.ops.call import AttentionCall
from affine_attention.ops.fused import INTERPRETED
from affine_attention.ops.fused.hopper import backward as hopper_backward
from affine_attention.ops.fused.op import run_plan
from affine_attention.ops.fused.plan import Plan, Route, inputs_of
from affine_attention.ops.fused.shared.value_sums import is_scanned
from affine_attention.ops.reference import reference_attention
from affine_attention.ops.sdpa import CpuFlash

CPU_FLASH = CpuFlash("cpu_flash")


def make_route(forward: str, backward: str, call: AttentionCall, *, large: bool = False) -> Route:
    """The route that `choose_route` would return for these kernels. `large` calls do not save O."""
    alpha, beta, _, gate = call.rows
    if not call.needs_gradient:
        return Route(forward, None, "nothing", "chosen by a test")
    has_rows = alpha is not None or beta is not None or gate is not None
    drops_core = large and backward == "hopper" and gate is None
    saves = "softmax output" if has_rows and not drops_core else "output"
    promised = alpha is not None and gate is None and call.nonnegative_alpha
    return Route(forward, backward, saves, "chosen by a test", shift=promised and saves == "softmax output")


def by_route(forward: str, backward: str, *, large: bool = False):
    """A function of the operator's tensors that runs these kernels."""

    def run(**given):
        call = AttentionCall.of(**given)
        route = make_route(forward, backward, call, large=large)
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


class BackwardOnCpu(hopper_backward.HopperBackward):
    """The Hopper backward with its Gluon kernel replaced by the kernel's formulas in fp64."""

    def _gradients(self, grad_out, core, slots):
        return []

    def _run_gradients(self, values, buffer, e, query, key, value, grad_query, grad_key, grad_value):
        arrays = dict(zip(self.workspace.arrays, self.workspace.views(buffer), strict=True))
        assert not arrays["dq_sums"].any(), "the prologue sets the sums of dQ to 0"
        found = formulas(
            e, query, key, value, arrays["row_numbers"], arrays.get("later"), self.call.softmax_scale, self.block
        )
        for target, gradient in zip((grad_query, grad_key, grad_value), found, strict=True):
            target.copy_(gradient)


def formulas(e, query, key, value, row_numbers, later, softmax_scale, sum_block, block_n=128):
    """dQ, dK and dV from the row numbers written by the prologue and the block sums of beta E."""
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    k, v = (x.double().repeat_interleave(heads // groups, 1) for x in (key, value))
    q, e = query.double(), e.double()
    start, delta, beta = row_numbers.double()[..., :length].unbind(2)[:3]
    positions = torch.arange(length, device=query.device)
    visible = positions[:, None] >= positions[None, :]
    p = torch.where(visible, torch.exp((q @ k.mT + start[..., None]) * softmax_scale), 0.0)
    ds = p * (e @ v.mT + delta[..., None])
    weights = p
    if later is not None:
        same_block = positions[:, None] // block_n == positions[None, :] // block_n
        weights = p + torch.where(visible & same_block, beta[..., None], 0.0)

    def of_group(x):
        return x.view(batch, groups, heads // groups, length, dim).sum(2)

    grad_value = of_group(weights.mT @ e)
    if later is not None:
        blocks = later.shape[2] - 1
        num_later = (blocks - (positions // block_n + 1) * (block_n // sum_block)).clamp(min=0)
        prefix = later if is_scanned(blocks + 1, query.numel()) else later.cumsum(2)
        grad_value = grad_value + prefix[:, :, num_later]
    return ds @ k * softmax_scale, of_group(ds.mT @ q) * softmax_scale, grad_value


def use_cpu_kernels(monkeypatch) -> None:
    """In the interpreter, replaces the kernels that need a GPU."""
    if not INTERPRETED:
        return
    monkeypatch.setattr("affine_attention.ops.fused.cudnn.forward.attend", attend_on_cpu)
    monkeypatch.setattr("affine_attention.ops.fused.cudnn.backward.attend_backward", attend_backward_on_cpu)
    monkeypatch.setattr(hopper_backward, "HopperBackward", BackwardOnCpu)
