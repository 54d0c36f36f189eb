"""Runs a plan: as an autograd function in eager mode, and as two operators of torch.library in compiled graphs.

In eager mode the context keeps the plan, and the backward looks nothing up. A compiled graph holds the operators, whose
bodies look the plan up by its key and run it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call import AttentionCall, Rows, distinct
from ..validation import check_query_key, check_rows, check_softmax_scale, check_value, check_visibility
from ..visibility import Visibility
from ..weights.sigmoid import SIGMOID
from . import on_device
from .plan import Plan, Route, choose_route, inputs_of

MAX_PLANS = 4096  # signatures to keep: evaluation has many lengths

_plans: dict[tuple[Any, ...], Plan] = {}


def plan_of(call: AttentionCall, needs_gradient: bool) -> Plan:
    """The plan of a call, made at the first call of its kind."""
    key = (*map(_kind, inputs_of(call)), call.visibility.is_causal, call.visibility.window, call.softmax_scale,
           call.nonnegative_alpha, call.weights, needs_gradient, torch._C._get_deterministic_algorithms(),
           torch._C._get_cudnn_sdp_enabled())  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(call, choose_route(call, needs_gradient))
    return plan


def _kind(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def run_plan(plan: Plan, inputs: list[Tensor | None], needs_gradient: bool) -> Tensor:
    """The output of a call. `inputs` are those of `inputs_of`."""
    if not needs_gradient:
        return on_device(plan.device, plan.run_forward, plan.prepared(inputs))[0]
    if torch._C._are_functorch_transforms_active():
        return _Attention.apply(plan, *inputs)
    return _apply(plan, *inputs)


class _Attention(torch.autograd.Function):
    """The forward and the backward of a plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: Tensor | None) -> Tensor:
        prepared = plan.prepared(list(inputs))
        out, core, lse, state = on_device(plan.device, plan.run_forward, prepared)
        ctx.plan = plan
        ctx.save_for_backward(*prepared, out if core is None else core, lse, state)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are enabled here only for a second derivative, which once_differentiable refuses; its work costs
        # the host as much as a launch.
        return (_second_derivative if torch.is_grad_enabled() else _gradients)(ctx, grad_out)


# Without the checks of Function.apply for functorch, which take 5 us.
_apply = super(torch.autograd.Function, _Attention).apply


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    *inputs, core, lse, state = ctx.saved_tensors
    plan = ctx.plan
    grads = on_device(plan.device, plan.run_backward, grad_out, core, lse, state, inputs, needs[6])
    wanted = [grad if need else None for grad, need in zip(grads, needs[1:8], strict=True)]
    return None, *wanted, None, None, None


_second_derivative = once_differentiable(_gradients)


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? alpha, Tensor? beta, Tensor? sink, Tensor? gate, "
    "Tensor? query_segments, Tensor? key_segments, Tensor? key_mask"
)
_SETTINGS = "bool is_causal, int? window, float softmax_scale, bool nonnegative_alpha, str weights"
_NUM_INPUTS, _FLAG = 10, 15  # the settings are the arguments between the inputs and a last flag
_library = torch.library.Library("affine_attention", "FRAGMENT")
_library.define(f"forward({_INPUTS}, {_SETTINGS}, bool needs_gradient) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"backward(Tensor grad_out, Tensor core, Tensor lse, Tensor state, {_INPUTS}, {_SETTINGS}, bool wants_sink) "
    "-> Tensor[]"
)


def with_kernel_rows(call: AttentionCall) -> AttentionCall:
    """The call as the flash kernels take it: a positive scale, and log n_i of sigmoid weights in place of a sink."""
    if call.weights == SIGMOID.name:
        counts = call.visibility.count().clamp(min=1).to(torch.float32)
        call = call._replace(rows=call.rows._replace(sink=torch.log(counts).expand(call.query.shape[:3])))
    return call.with_positive_scale()


def traced_attention(call: AttentionCall, needs_gradient: bool) -> Tensor:
    """The output of a call in a graph."""
    call = with_kernel_rows(call)
    seen = call.visibility
    return in_graph(
        *call.tensors, seen.query_segments, seen.key_segments, seen.key_mask, seen.is_causal, seen.window,
        call.softmax_scale, call.nonnegative_alpha, call.weights, needs_gradient,
    )  # fmt: skip


def in_graph(*arguments: Any) -> Tensor:
    """The output of the operator `forward`, whose arguments these are, with its gradient."""
    if arguments[_FLAG]:
        return _GraphAttention.apply(*distinct(arguments[:_NUM_INPUTS]), *arguments[_NUM_INPUTS:_FLAG])
    return torch.ops.affine_attention.forward(*arguments)[0]


class _GraphAttention(torch.autograd.Function):
    """The two operators as one differentiable function, which a compiler traces; a graph then holds the operators only.

    A gradient that is registered with the operator costs two more Python calls at each run of the graph.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out, core, lse, state = torch.ops.affine_attention.forward(*arguments, True)
        ctx.save_for_backward(*arguments[:_NUM_INPUTS], core if core.numel() else out, lse, state)
        ctx.settings = arguments[_NUM_INPUTS:_FLAG]
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, core, lse, state = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wants_sink = needs[5]
        grads = torch.ops.affine_attention.backward(grad_out, core, lse, state, *inputs, *ctx.settings, wants_sink)
        given = [x is not None and (n != 5 or wants_sink) for n, x in enumerate(inputs[:7])]
        indices = [sum(given[:n]) for n in range(7)]
        wanted = [grads[at] if has and need else None for at, has, need in zip(indices, given, needs[:7], strict=True)]
        return *wanted, *(None,) * (_FLAG - 7)


def _call(
    inputs: tuple[Tensor | None, ...], is_causal, window, softmax_scale, nonnegative_alpha, weights
) -> AttentionCall:
    query, key, value, alpha, beta, sink, gate, query_segments, key_segments, key_mask = inputs
    assert query is not None
    assert key is not None
    assert value is not None
    seen = Visibility(
        query.shape[0], query.shape[2], key.shape[2], query.device, is_causal, window, query_segments, key_segments,
        key_mask,
    )  # fmt: skip
    rows = Rows(alpha, beta, sink, gate)
    return AttentionCall(query, key, value, rows, seen, softmax_scale, nonnegative_alpha, weights=weights)


def _plan_of_operator(arguments: tuple[Any, ...], needs_gradient: bool) -> tuple[Plan, list[Tensor | None]]:
    """The plan of an operator's call, and its inputs as the kernels address them."""
    key = (*map(_kind, arguments[:_NUM_INPUTS]), *arguments[_NUM_INPUTS:_FLAG], needs_gradient,
           torch._C._get_deterministic_algorithms(), torch._C._get_cudnn_sdp_enabled())  # fmt: skip
    plan = _operator_plans.get(key)
    if plan is not None and arguments[5] is None and arguments[7] is None and arguments[9] is None:
        return plan, plan.prepared(list(arguments[:_NUM_INPUTS]))
    call = _call(arguments[:_NUM_INPUTS], *arguments[_NUM_INPUTS:_FLAG])
    if plan is None:
        check_call(call)
        if len(_operator_plans) >= MAX_PLANS:
            _operator_plans.clear()
        plan = _operator_plans[key] = plan_of(call, needs_gradient)
    return plan, plan.prepared(inputs_of(call))


_operator_plans: dict[tuple[Any, ...], Plan] = {}


def _forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    needs_gradient = arguments[_FLAG]
    plan, inputs = _plan_of_operator(arguments, needs_gradient)
    results = on_device(plan.device, plan.run_forward, inputs)
    if not needs_gradient:
        results = (results[0], None, None, None)
    # An operator returns tensors: an empty one stands for None.
    return tuple(results[0].new_empty(0) if x is None else x for x in results)


def _backward_op(grad_out: Tensor, core: Tensor, lse: Tensor, state: Tensor, *arguments: Any) -> list[Tensor]:
    wants_sink = arguments[_FLAG]
    plan, inputs = _plan_of_operator(arguments, True)
    lse_or_none = lse if lse.numel() else None
    grads = on_device(plan.device, plan.run_backward, grad_out, core, lse_or_none, state, inputs, wants_sink)
    return [grad for n, grad in enumerate(grads) if grad is not None and (n != 5 or wants_sink)]


def check_call(call: AttentionCall) -> None:
    """The checks of `attention` that a graph leaves to the operator."""
    check_query_key(call.query, call.key)
    check_value(call.value, call.query, call.key)
    check_rows(call.query, *call.rows)
    check_softmax_scale(call.softmax_scale, call.query.shape[-1])
    seen = call.visibility
    segments = None if seen.query_segments is None else (seen.query_segments, seen.key_segments)
    check_visibility(
        call.query, call.key, mask=seen.key_mask, is_causal=seen.is_causal, window=seen.window, segment_ids=segments
    )


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *settings, needs_gradient = arguments[_NUM_INPUTS:]
    call = _call(arguments[:_NUM_INPUTS], *settings)
    check_call(call)
    query = call.query
    if not needs_gradient:
        return torch.empty_like(query), query.new_empty(0), query.new_empty(0), query.new_empty(0)
    route = choose_route(call, True)
    if route.forward == "cudnn":
        out, lse = _fake_cudnn(call)
    else:
        out, lse = torch.empty_like(query), query.new_empty(0)
    core = torch.empty_like(out) if route.saves == "softmax output" else query.new_empty(0)
    return out, core, lse, query.new_empty(_state_length(call, route), dtype=torch.float32)


def _fake_cudnn(call: AttentionCall) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, None, True, 0.0, call.visibility.is_causal, False, scale=call.softmax_scale
    )[:2]


def _state_length(call: Any, route: Route) -> int:
    """The length of the state that the forward of a route returns."""
    from .flash.forward import flash_state
    from .hopper.forward import state_arrays
    from .shared.limits import limit_arrays
    from .shared.workspace import length_of

    if route.forward == "empty":
        return 0
    if route.forward == "flash":
        return length_of(flash_state(call, None))
    has_rows = call.rows.alpha is not None or call.rows.beta is not None
    arrays = state_arrays(call, route.forward in ("hopper", "gluon"), route.saves == "output" and has_rows)
    return length_of(arrays | (limit_arrays(call.visibility) if route.forward == "gluon" else {}))


def _fake_backward(grad_out: Tensor, core: Tensor, lse: Tensor, state: Tensor, *arguments: Any) -> list[Tensor]:
    wants_sink = arguments[-1]
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if n in (3, 4, 5) else torch.empty_like(x)
        for n, x in enumerate(arguments[:7])
        if x is not None and (n != 5 or wants_sink)
    ]


for _name, _body, _fake in (
    ("forward", _forward_op, _fake_forward),
    ("backward", _backward_op, _fake_backward),
):
    _library.impl(_name, _body, "CUDA")
    _library.impl(_name, _body, "CPU")  # in Triton's interpreter
    torch.library.register_fake(f"affine_attention::{_name}", _fake, lib=_library)


def forget_plans() -> None:
    """Drops every plan."""
    _plans.clear()
    _operator_plans.clear()
