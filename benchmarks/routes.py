"""Runs a call of the operator on a route that its plan would not choose, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from affine_attention.ops.call import AttentionCall
from affine_attention.ops.fused.plan import Plan, Route, inputs_of
from affine_attention.ops.validation import check_visibility

Choose = Callable[[AttentionCall, bool], Route]


def on_route(given: dict[str, Tensor], visible: dict[str, Any], choose: Choose) -> tuple[Callable[[], Tensor], str]:
    """The call on the route that `choose(call, needs_gradient)` returns, and the kernels of that route.

    Args:
        given: query, key and value, and those of alpha, beta, sink and gate that the call has.
        visible: is_causal, and those of window, mask and segment_ids that the call has.
        choose: the route for a call with and without gradients.
    """
    from affine_attention.ops.fused.op import run_plan

    visible = {"mask": None, "segment_ids": None, "window": None} | visible
    seen = check_visibility(given["query"], given["key"], **visible)
    scale = given["query"].shape[-1] ** -0.5
    call = AttentionCall.of(**given, visibility=seen, softmax_scale=scale, nonnegative_alpha=True)
    plans = {needs_gradient: Plan(call, choose(call, needs_gradient)) for needs_gradient in (False, True)}

    def run() -> Tensor:
        needs_gradient = torch.is_grad_enabled()
        return run_plan(plans[needs_gradient], inputs_of(call), needs_gradient)

    return run, ", ".join(plans[True].route.kernels)
