"""Attention whose alpha and beta come from hidden states, as one node: W_a, the activation, beta and the operator.

A training step on a small model is bound by the host, and an autograd node costs it as much as several launches. So the
causal training calls of a layer run W_a and the operator in one node, and a compiled graph holds one operator for the
forward and one for the backward. Other calls take projection.py and op.py one after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from ..call import AttentionCall, Rows, distinct
from ..visibility import Visibility
from . import INTERPRETED, capability, on_device
from .op import MAX_PLANS, check_call
from .plan import HALF, HOPPER, LARGE, Plan, aligned, choose_route, fits_hopper_forward
from .projection import ProjectionSpec
from .shared.workspace import length_of

_plans: dict[tuple[Any, ...], ProjectedPlan] = {}


@functools.lru_cache
def _has_kernels(dtype: torch.dtype, device_index: int) -> bool:
    from .hopper.backward import why_not_here

    if INTERPRETED and dtype is torch.bfloat16:  # the interpreter multiplies the bit patterns of bf16 tiles
        return False
    return dtype in HALF and capability(device_index) in HOPPER and why_not_here() is None


def has_kernels(dtype: torch.dtype, device_index: int) -> bool:
    """Whether the Hopper kernels run on a GPU and take a dtype. A compiled graph takes the answer as a constant."""
    return _has_kernels(dtype, device_index)


has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def can_project(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, weight: Tensor, sink: Tensor | None = None
) -> bool:
    """Whether `projected_attention` serves a causal call with these tensors.

    A compiled graph traces it: every global that is read here becomes a guard.
    """
    batch, heads, length, dim = query.shape
    dtype, hidden_shape, elements = query.dtype, hidden.shape, batch * heads * length * dim
    if not query.is_cuda or not hidden.dtype == dtype == key.dtype == value.dtype:
        return False
    if not (hidden_shape[0] == batch and hidden_shape[1] == length == key.shape[2] and weight.shape[0] == heads):
        return False
    if not (length > 1 and 40 <= dim <= 128 and dim % 8 == 0 and 0 < elements < LARGE):
        return False
    # The Hopper forward is the fastest for every number of elements up to this head dim.
    if dim > 64 and not fits_hopper_forward(dim, elements):
        return False
    if not (hidden.is_contiguous() and weight.is_contiguous()):
        return False
    if not (sink is None or (sink.dim() == 1 and sink.is_contiguous())):
        return False
    return has_kernels(dtype, query.device.index or 0) and not are_deterministic_algorithms_enabled()


def projected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    gate: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    running_alpha: Tensor | None,
    collected: Tensor | None,
    token_mask: Tensor | None,
    softmax_scale: float | None,
    divisor: int,
    sigmoid: bool,
) -> Tensor:
    """Causal attention with alpha = phi(W_a hidden) and beta = (running_alpha - alpha) / divisor, with gradients.

    Args:
        query, key, value, sink, gate, softmax_scale: as for `attention`; `can_project` must be true of them.
        hidden: [B, T, M]; weight: [H, M], W_a.
        running_alpha: [H] fp32; None means no beta.
        collected: [H + 1] fp64 leaf. Its gradient is the sum of alpha over real tokens, per head, then their number.
        token_mask: boolean [B, T], True for real tokens; only `collected` depends on it.
        divisor: N of Eq. 8.
        sigmoid: the activation is the sigmoid, else linear clipping.
    """
    run = in_graph if is_compiling() else in_eager_mode
    return run(
        query, key, value, sink, gate, hidden, weight, running_alpha, collected, token_mask, softmax_scale, divisor,
        sigmoid,
    )  # fmt: skip


def in_eager_mode(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """`projected_attention` outside of a graph, for a caller that knows it."""
    sink, gate, hidden, weight, running_alpha, collected, token_mask, softmax_scale, divisor, sigmoid = rest
    scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    inputs = (query, key, value, sink, gate, hidden, weight, running_alpha)
    plan = _plan_of(inputs, scale, divisor, sigmoid)
    return _apply(plan, *inputs, collected, token_mask)


def in_graph(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """`projected_attention` while a compiler traces it."""
    *inputs, collected, token_mask, softmax_scale, divisor, sigmoid = rest
    scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    return _GraphProjectedAttention.apply(
        *distinct((query, key, value, *inputs)), collected, token_mask, scale, divisor, sigmoid
    )


class ProjectedPlan(Plan):
    """The launches of one signature. `inputs` are query, key, value, sink, gate, hidden, weight, running_alpha."""

    def __init__(self, inputs: tuple[Tensor | None, ...], softmax_scale: float, divisor: int, sigmoid: bool):
        call = _call_of(inputs, softmax_scale)
        check_call(call)
        hidden: Any = inputs[5]
        self.projection = ProjectionSpec(
            tuple(hidden.shape), call.query.shape[1], hidden.dtype, call.rows.beta is not None, divisor, sigmoid
        )
        route = choose_route(call, True)
        assert route.forward == route.backward == "hopper", "can_project is true of Hopper's calls only"
        assert route.saves == "softmax output", "can_project is true of small calls only"
        super().__init__(call, route)

    def _forward(self) -> Any:
        from .hopper.forward import HopperForward

        return HopperForward(
            self.call, keeps_core=True, keeps_marks=False, shift=self.route.shift, projection=self.projection
        )

    def run(self, *inputs: Tensor | None) -> tuple[list[Tensor | None], Tensor, Tensor, Tensor]:
        """(the inputs as the kernels address them, output, O, state)."""
        prepared = self.prepared([*inputs[:3], None, None, *inputs[3:]])
        out, core, _, state = self.forward(*prepared[:7], projected=tuple(prepared[7:]))
        return prepared, out, core, state

    def gradients(
        self, grad_out: Tensor, core: Tensor, state: Tensor, inputs: list[Tensor | None], token_mask: Tensor | None,
        wants: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The gradients of the seven inputs of attention, of hidden, of W_a, and the sums of alpha.

        `inputs` are prepared ones, without running_alpha. `wants` are: of the sink, of hidden, of W_a, the sums.
        """
        if not wants[3]:
            token_mask = None
        elif token_mask is not None and not (token_mask.is_contiguous() and token_mask.data_ptr() & 15 == 0):
            token_mask = token_mask.clone(memory_format=torch.contiguous_format)
        kind = (grad_out.stride(), token_mask is None, wants)
        backward = self._backwards.get(kind)
        if backward is None or grad_out.data_ptr() & 15:
            grad_out = aligned(grad_out)
            kind = (grad_out.stride(), token_mask is None, wants)
            if kind not in self._backwards:
                self._backwards[kind] = self._backward(
                    grad_out, core, None, wants[0], projection=self.projection, wants=wants[1:]
                )
            backward = self._backwards[kind]
        return backward(
            grad_out, core, None, state, *inputs[:7], None, None, None, projected=(*inputs[7:9], token_mask)
        )


def _call_of(inputs: tuple[Any, ...], softmax_scale: float) -> AttentionCall:
    query, key, value, sink, gate, _, _, running_alpha = inputs
    alpha = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    rows = Rows(alpha, None if running_alpha is None else alpha, sink, gate)
    seen = Visibility(query.shape[0], query.shape[2], key.shape[2], query.device, True)
    return AttentionCall(query, key, value, rows, seen, softmax_scale, nonnegative_alpha=True)


def _plan_of(inputs: tuple[Any, ...], softmax_scale: float, divisor: int, sigmoid: bool) -> ProjectedPlan:
    query, key, value, sink, gate, hidden, _, running_alpha = inputs
    key_of = (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(), query.dtype, query.device,
        None if sink is None else (sink.shape, sink.dtype),
        None if gate is None else (gate.shape, gate.stride(), gate.dtype),
        hidden.shape, running_alpha is None, softmax_scale, divisor, sigmoid,
    )  # fmt: skip
    plan = _plans.get(key_of)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[key_of] = ProjectedPlan(inputs, softmax_scale, divisor, sigmoid)
    return plan


class _ProjectedAttention(torch.autograd.Function):
    """The forward and the backward of a plan."""

    @staticmethod
    def forward(ctx: Any, plan: ProjectedPlan, *inputs: Tensor | None) -> Tensor:
        prepared, out, core, state = on_device(plan.device, plan.run, *inputs[:8])
        ctx.plan = plan
        ctx.save_for_backward(*prepared[:9], inputs[9], core, state)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are enabled here only for a second derivative, which once_differentiable refuses.
        return (_second_derivative if torch.is_grad_enabled() else _gradients)(ctx, grad_out)


# Without the checks of Function.apply for functorch, which take 5 us.
_apply = super(torch.autograd.Function, _ProjectedAttention).apply


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, token_mask, core, state = ctx.saved_tensors
    _, query, key, value, sink, gate, hidden, weight, _, sums, _ = ctx.needs_input_grad
    plan, wants = ctx.plan, (sink, hidden, weight, sums)
    grads = on_device(plan.device, plan.gradients, grad_out, core, state, inputs, token_mask, wants)
    return (
        None, grads[0] if query else None, grads[1] if key else None, grads[2] if value else None, grads[5],
        grads[6] if gate else None, grads[7], grads[8], None, grads[9], None,
    )  # fmt: skip


_second_derivative = once_differentiable(_gradients)


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor? gate, Tensor hidden, Tensor weight"
_SETTINGS = "float softmax_scale, SymInt divisor, bool sigmoid"
_library = torch.library.Library("affine_attention", "FRAGMENT")
_library.define(f"projected_forward({_INPUTS}, Tensor? running_alpha, {_SETTINGS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"projected_backward(Tensor grad_out, Tensor core, Tensor state, {_INPUTS}, Tensor? running_alpha, "
    f"Tensor? token_mask, {_SETTINGS}, bool wants_sink, bool wants_hidden, bool wants_weight, bool wants_sums) "
    "-> Tensor[]"
)


# The operators as globals: a graph that looks them up in torch.ops has a guard for each step.
_projected_forward = torch.ops.affine_attention.projected_forward.default
_projected_backward = torch.ops.affine_attention.projected_backward.default


class _GraphProjectedAttention(torch.autograd.Function):
    """The two operators as one differentiable function, which a compiler traces; a graph then holds the operators."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, (_, token_mask), settings = arguments[:8], arguments[8:10], arguments[10:]
        out, core, state = _projected_forward(*inputs, *settings)
        ctx.save_for_backward(*inputs, token_mask, core, state)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, token_mask, core, state = ctx.saved_tensors
        query, key, value, sink, gate, hidden, weight, _, sums = ctx.needs_input_grad[:9]
        found = list(
            _projected_backward(grad_out, core, state, *inputs, token_mask, *ctx.settings, sink, hidden, weight, sums)
        )
        grads = [found.pop(0) for _ in range(3)]
        grad_sink, grad_gate, grad_hidden, grad_weight, grad_sums = (
            found.pop(0) if has else None for has in (sink, inputs[4] is not None, hidden, weight, sums)
        )
        grads = [grad if need else None for grad, need in zip(grads, (query, key, value), strict=True)]
        grad_gate = grad_gate if gate else None
        return *grads, grad_sink, grad_gate, grad_hidden, grad_weight, None, grad_sums, *(None,) * 4


def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan_of(arguments[:8], *arguments[8:])
    return on_device(plan.device, plan.run, *arguments[:8])[1:]


def _backward_op(grad_out: Tensor, core: Tensor, state: Tensor, *arguments: Any) -> list[Tensor]:
    inputs, token_mask, settings, wants = arguments[:8], arguments[8], arguments[9:12], arguments[12:]
    plan = _plan_of(inputs, *settings)
    prepared = plan.prepared([*inputs[:3], None, None, *inputs[3:7]])
    grads = on_device(plan.device, plan.gradients, grad_out, core, state, prepared, token_mask, wants)
    return [grad for grad in (*grads[:3], *grads[5:]) if grad is not None]


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .hopper.forward import state_arrays

    query, hidden, running_alpha = arguments[0], arguments[5], arguments[7]
    call: Any = _call_of(arguments[:8], arguments[8])
    projection = ProjectionSpec(
        hidden.shape, query.shape[1], hidden.dtype, running_alpha is not None, arguments[9], arguments[10]
    )
    length = length_of(state_arrays(call, True, False) | projection.row_arrays)
    return torch.empty_like(query), torch.empty_like(query), query.new_empty(length, dtype=torch.float32)


def _fake_backward(grad_out: Tensor, core: Tensor, state: Tensor, *arguments: Any) -> list[Tensor]:
    query, key, value, sink, gate, hidden, weight = arguments[:7]
    wants_sink, wants_hidden, wants_weight, wants_sums = arguments[12:]
    new = [torch.empty_like(x) for x in (query, key, value)]
    new += [torch.empty_like(sink)] if wants_sink else []
    new += [] if gate is None else [torch.empty_like(gate)]
    new += [torch.empty_like(hidden)] if wants_hidden else []
    new += [torch.empty_like(weight)] if wants_weight else []
    return new + ([query.new_empty(weight.shape[0] + 1, dtype=torch.float64)] if wants_sums else [])


for _name, _body, _fake in (
    ("projected_forward", _forward_op, _fake_forward),
    ("projected_backward", _backward_op, _fake_backward),
):
    _library.impl(_name, _body, "CUDA")
    _library.impl(_name, _body, "CPU")  # in Triton's interpreter
    torch.library.register_fake(f"affine_attention::{_name}", _fake, lib=_library)


def forget_plans() -> None:
    """Drops every plan."""
    _plans.clear()
    _has_kernels.cache_clear()
