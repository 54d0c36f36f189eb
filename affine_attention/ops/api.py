"""The operator: finds the plan of a call and runs it. The only dispatch in the project.

What serves a call depends on shapes, strides, dtypes, devices, flags and on whether a gradient is needed, not on
values. So a call is validated and routed when its signature is first seen; later calls find the runner by their
signature. `explain` describes the same route.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention

from ..messages import check_flag
from .call import AttentionCall, Rows
from .composed import composed_attention
from .finish import NORM_EPS, Finish, finish, own_values, row_marks, uses_kernels
from .fused import INTERPRETED, runs_on
from .fused.plan import (
    HALF,
    MAX_DECODED_QUERIES,
    MAX_HEAD_DIM,
    SERVED,
    Route,
    choose_route,
    why_not_decode,
    why_not_fused,
    why_not_plain,
)
from .onnx_export import is_exporting_to_onnx, onnx_attention
from .reference import reference_attention, reference_finish, reference_weights
from .sdpa import choose_kernel
from .tiles import plan as plan_tiles
from .transforms import transformed_attention
from .validation import (
    check_finish,
    check_one_of,
    check_query_key,
    check_rows,
    check_softmax_scale,
    check_value,
    check_visibility,
    check_weights,
)
from .visibility import Visibility
from .weights import SOFTMAX
from .weights.sigmoid import SIGMOID

IMPLEMENTATIONS = ("auto", "reference", "composed", "fused")


@dataclass(frozen=True)
class Choice:
    """Which implementation a call takes, and why. `str(choice)` is the sentence."""

    impl: str
    reason: str
    kernels: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kernels = f" on {', '.join(self.kernels)}" if self.kernels else ""
        refused = "".join(f"; not {name}: {reason}" for name, reason in self.refused.items())
        return f"{self.impl}{kernels}: {self.reason}{refused}"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    exclusion: Tensor | float | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = NORM_EPS,
    weights: str = SOFTMAX,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    nonnegative_alpha: bool = False,
    impl: str = "auto",
) -> Tensor:
    """gate * N(X(alpha * softmax_with_sink(query key^T * softmax_scale) value + beta * sum of visible values)).

    X subtracts the part along the token's own value (`exclusion`), N is a norm per head (`norm_weight`); each is the
    identity by default.

    >>> q = torch.randn(2, 8, 128, 64); k = torch.randn(2, 2, 128, 64); v = torch.randn(2, 2, 128, 64)
    >>> alpha = torch.rand(2, 8, 128); beta = (0.5 - alpha) / 2048
    >>> attention(q, k, v, alpha=alpha, beta=beta, is_causal=True).shape
    torch.Size([2, 8, 128, 64])

    Args:
        query: [B, H, T, D].
        key, value: [B, G, S, D]; H must be a multiple of G (grouped heads).
        alpha, beta: [B, H, T], scale and shift of a query's weights; None means 1 and 0.
        sink: [H], or [B, H, T] for a sink of each row: a logit that takes part in the softmax and has no value. It is
            not multiplied by softmax_scale.
        gate: [B, H, T, D], multiplies the output.
        exclusion: gamma, [B, H, T] or a number: y becomes y - gamma (y . d) d, with d the direction of the value at the
            query's own position (key i + S - T). 1.0 is exclusive self attention. y is unchanged where that key is
            invisible or its value is zero.
        norm_weight: [D] or [H, D]: y becomes y / sqrt(mean(y^2) + norm_eps) * norm_weight, after the exclusion and
            before the gate.
        norm_eps: at least 2^-126; used with norm_weight only.
        weights: "softmax", or another function of the scores (ops/weights): "signed", "sigmoid", "softplus" or
            "normalized". alpha, beta and gate apply to it; a sink is a term of the softmax only.
        mask: boolean, True where a key may be seen: [B, S] (padding) or [B, 1|H, T, S].
        is_causal: bottom-right aligned: the last query sees the last key.
        window: a query sees keys closer than this many positions (with is_causal: the last `window` keys).
        segment_ids: integers [B, T], or a pair ([B, T], [B, S]): documents that do not see each other.
        softmax_scale: 1/sqrt(D) when None.
        nonnegative_alpha: a promise that alpha >= 0 (a sigmoid or linear clipping keeps it), with which the backward
            on a GPU saves time and a tensor. A negative alpha then gives NaN gradients.
        impl: "auto", "fused", "composed" or "reference". A named implementation runs or raises; it never falls back.

    Returns:
        [B, H, T, D] in the dtype of query. A query that sees no key gets zeros, and zero gradients.
    """
    compiling = torch.compiler.is_compiling()
    if (
        alpha is None and beta is None and sink is None and gate is None and exclusion is None and norm_weight is None
        and mask is None and window is None and segment_ids is None and impl == "auto" and weights == SOFTMAX
        and not compiling and type(nonnegative_alpha) is bool
    ):  # fmt: skip
        out = plain_attention(query, key, value, is_causal, softmax_scale, compiling=False)
        if out is not None:
            return out
    # Asked of C++ here: a Python function would cost every call of a layer.
    if not compiling and torch._C._are_functorch_transforms_active():
        return transformed_attention(
            query=query, key=key, value=value, alpha=alpha, beta=beta, sink=sink, gate=gate, exclusion=exclusion,
            norm_weight=norm_weight, norm_eps=norm_eps, weights=weights, mask=mask, is_causal=is_causal, window=window,
            segment_ids=segment_ids, softmax_scale=softmax_scale, nonnegative_alpha=nonnegative_alpha, impl=impl,
        )  # fmt: skip
    if exclusion is not None or norm_weight is not None:
        query, key, value, gate = _follow_autocast(query, key, value, gate)
        parts = Finish(exclusion, norm_weight, norm_eps, gate)
        given = (query, key, value, alpha, beta, sink, gate, mask)
        return _finished(given, segment_ids, is_causal, window, softmax_scale, nonnegative_alpha, parts, weights, impl)
    query, key, value, gate = _follow_autocast(query, key, value, gate)
    if compiling and segment_ids is None and window is None and impl == "auto" and weights == SOFTMAX:
        out = _run_plain_in_graph(query, key, value, alpha, beta, sink, gate, mask, is_causal, softmax_scale,
                                  nonnegative_alpha)  # fmt: skip
        if out is not None:
            return out
    tensors = (query, key, value, alpha, beta, sink, gate, mask)
    settings = (is_causal, window, softmax_scale, nonnegative_alpha, impl, weights)
    try:
        signature = None if compiling else _signature(tensors, segment_ids, settings)
        runner = None if signature is None else _runners.get(signature)
    except (RuntimeError, TypeError):  # a nested tensor has no shape, a list no hash: the checks below name them
        signature = runner = None
    if runner is not None:
        return runner(tensors, segment_ids)
    _check_impl(impl)
    call = _checked_call(*tensors, segment_ids, is_causal, window, softmax_scale, nonnegative_alpha, weights)
    if signature is None:
        return _run_in_graph(call, impl)
    if len(_runners) >= MAX_SIGNATURES:
        _runners.clear()
    runner = _runners[signature] = _runner_of(call, impl)
    return runner(tensors, segment_ids)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    softmax_scale: float | None,
    compiling: bool | None = None,
) -> Tensor | None:
    """PyTorch's own attention where that is what `attention` runs without a mechanism and a mask; None elsewhere.

    A call whose signature is known costs the host one look-up. Strides are not part of it, because PyTorch's attention
    takes all of them. A caller that knows whether it is traced says so.
    """
    if is_compiling() if compiling is None else compiling:
        return _plain_in_graph(query, key, value, is_causal, softmax_scale)
    try:
        if not query.is_cuda:
            return None
        shape, key_shape = query.shape, key.shape
        if len(shape) != 4 or shape[2] < key_shape[2]:  # cached keys: decoding has kernels of its own
            return None
        signature = (
            type(query), type(key), type(value), shape, key_shape, value.shape, query.dtype, key.dtype, value.dtype,
            query.device, key.device, value.device, query.layout, key.layout, value.layout, type(is_causal), is_causal,
            type(softmax_scale), softmax_scale, torch._C._get_deterministic_algorithms(),
        )  # fmt: skip
        found = _plain_calls.get(signature, _UNKNOWN)
    except (AttributeError, RuntimeError, TypeError, IndexError):  # `attention` names what is wrong
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    if found is _UNKNOWN:
        found = _plain_settings(query, key, value, is_causal, softmax_scale)
        if len(_plain_calls) >= MAX_SIGNATURES:
            _plain_calls.clear()
        _plain_calls[signature] = found
    if found is None:
        return None
    scale, enable_gqa = found
    return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def _plain_settings(query: Any, key: Any, value: Any, is_causal: Any, softmax_scale: Any) -> tuple[float, bool] | None:
    """(softmax_scale, whether heads are grouped) of a valid call that PyTorch's own attention serves, else None."""
    kinds = {type(query), type(key), type(value)}
    if not kinds <= set(_TENSOR_TYPES) or type(is_causal) is not bool or type(softmax_scale) not in _NUMBER:
        return None
    given = (query, key, value, None, None, None, None, None, None, is_causal, None, softmax_scale, False, SOFTMAX)
    try:
        call = _checked_call(*given)
    except (TypeError, ValueError):
        return None
    _, route = _choose(call, "auto")
    if route is None or route.forward != "sdpa":
        return None
    return call.softmax_scale, query.shape[1] != key.shape[1]


def _plain_in_graph(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, softmax_scale: float | None
) -> Tensor | None:
    """`plain_attention` while a compiler traces it: every global that is read here becomes a guard."""
    dtype, (_, heads, num_queries, dim) = query.dtype, query.shape
    if not query.is_cuda or num_queries != key.shape[2] or num_queries < 2 or dim % 8 or dim > 256:
        return None
    if key.dtype != dtype or value.dtype != dtype or not _is_served_in_graph(dtype, query.device.index or 0):
        return None
    if are_deterministic_algorithms_enabled():
        return None
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    if scale <= 0:
        return None
    return scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale, enable_gqa=heads != key.shape[1]
    )


def _is_served_in_graph(dtype: torch.dtype, device_index: int) -> bool:
    """Whether compiled graphs run plain attention of a dtype on PyTorch's own: a constant for the graph."""
    return dtype in HALF and runs_on(device_index)


_is_served_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    weights: str = SOFTMAX,
) -> Tensor:
    """The weights alpha * softmax_with_sink + beta of `attention`, [B, H, T, S]: for diagnostics, T x S memory.

    They are 0 where a key is invisible, may be negative where beta is, and sum to alpha * (1 - sink's share) + n * beta
    over the n visible keys. fp64 for fp64 inputs, fp32 otherwise.
    """
    check_query_key(query, key)
    check_rows(query, alpha, beta, sink, None)
    check_weights(weights, sink)
    visibility = check_visibility(query, key, mask=mask, is_causal=is_causal, window=window, segment_ids=segment_ids)
    scale = check_softmax_scale(softmax_scale, query.shape[-1])
    with torch.autocast(_autocast_device(query), enabled=False):
        call = AttentionCall(query, key, key, Rows(alpha, beta, sink), visibility, scale, weights=weights)
        return reference_weights(call)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    sink: Tensor | None = None,
    gate: Tensor | None = None,
    exclusion: Tensor | float | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = NORM_EPS,
    weights: str = SOFTMAX,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    nonnegative_alpha: bool = False,
    impl: str = "auto",
) -> Choice:
    """Which implementation `attention` would take with the same arguments, and why. Nothing is computed."""
    _check_impl(impl)
    query, key, value, gate = _follow_autocast(query, key, value, gate)
    call = _checked_call(query, key, value, alpha, beta, sink, gate, mask, segment_ids, is_causal, window,
                         softmax_scale, nonnegative_alpha, weights)  # fmt: skip
    finishes = exclusion is not None or norm_weight is not None
    if finishes:
        check_finish(query, exclusion, norm_weight, norm_eps)
        call = call._replace(rows=call.rows._replace(gate=None))
    choice, _ = _choose(call, impl)
    if choice.impl == "composed" and weights == SOFTMAX:
        choice = replace(choice, kernels=_kernels_of(query, key, call.visibility))
    if finishes:
        parts, kernels = Finish(exclusion, norm_weight, norm_eps, gate).parts, uses_kernels(query, impl)
        reason = f"{choice.reason}; then {parts} in one pass {'of a kernel' if kernels else 'with PyTorch'}"
        choice = replace(choice, kernels=(*choice.kernels, *(("finish",) if kernels else ())), reason=reason)
    return choice


def count_visible_keys(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """n, the number of keys that each query of a call sees: int64, broadcastable to [B, H, T]."""
    check_query_key(query, key)
    return check_visibility(query, key, mask=mask, is_causal=is_causal, window=window, segment_ids=segment_ids).count()


def _finished(
    tensors: tuple[Any, ...], segment_ids: Any, is_causal: Any, window: Any, softmax_scale: Any, nonnegative_alpha: Any,
    parts: Finish, weights: str, impl: str,
) -> Tensor:  # fmt: skip
    """A call with an exclusion or a norm: attention without the gate, then X, N and the gate in one pass."""
    _check_impl(impl)
    query, key, value, alpha, beta, sink, gate, mask = tensors
    call = _checked_call(query, key, value, alpha, beta, sink, gate, mask, segment_ids, is_causal, window,
                         softmax_scale, nonnegative_alpha, weights)  # fmt: skip
    check_finish(query, *parts[:3])
    y = attention(
        query, key, value, alpha=alpha, beta=beta, sink=sink, mask=mask, is_causal=is_causal, window=window,
        segment_ids=segment_ids, softmax_scale=softmax_scale, nonnegative_alpha=nonnegative_alpha, weights=weights,
        impl=impl,
    )  # fmt: skip
    with torch.autocast(_autocast_device(query), enabled=False):
        if impl == "reference":
            return reference_finish(y, value, call.visibility, parts)
        own = None if parts.exclusion is None else own_values(value, call.visibility)
        return finish(y, own, row_marks(call.visibility), parts, kernels=uses_kernels(y, impl))


Runner = Callable[[tuple[Any, ...], Any], Tensor]
_runners: dict[tuple[Any, ...], Runner] = {}
# By signature: softmax_scale and whether heads are grouped, None where PyTorch's attention does not serve the call.
_plain_calls: dict[tuple[Any, ...], tuple[float, bool] | None] = {}
_UNKNOWN: Any = object()
_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


def _signature(tensors: tuple[Any, ...], segment_ids: Any, settings: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What decides how a call is served; None where a call is checked every time.

    That is so for subclasses of Tensor, and for arguments of a wrong type: True equals 1 in a key.
    """
    is_causal, window, softmax_scale = settings[:3]
    if type(is_causal) is not bool or type(window) not in _INTEGER or type(softmax_scale) not in _NUMBER:
        return None
    if segment_ids is not None:
        tensors = (*tensors, *segment_ids) if type(segment_ids) is tuple else (*tensors, segment_ids)
    kinds: list[Any] = []
    needs_gradient = False
    for x in tensors:
        if x is None:
            kinds.append(None)
        elif type(x) in _TENSOR_TYPES and x.layout is torch.strided:
            kinds.append((x.shape, x.stride(), x.dtype, x.device))
            needs_gradient = needs_gradient or x.requires_grad
        else:
            return None
    return (
        *kinds, *settings, needs_gradient and torch.is_grad_enabled(), torch._C._get_deterministic_algorithms(),
        torch._C._get_cudnn_sdp_enabled(),
    )  # fmt: skip


def forget_plans() -> None:
    """Drops every plan: for tests and benchmarks that change what a plan is made from."""
    _runners.clear()
    _plain_calls.clear()
    if "affine_attention.ops.fused.op" in sys.modules:
        from .fused import op

        op.forget_plans()
    if "affine_attention.ops.fused.projected" in sys.modules:
        from .fused import projected

        projected.forget_plans()


_INTEGER, _NUMBER = (int, type(None)), (float, int, type(None))
MAX_SIGNATURES = 4096  # evaluation has many lengths


def _choose(call: AttentionCall, impl: str) -> tuple[Choice, Route | None]:
    """The implementation of a call, and for "fused" its route."""
    if impl == "reference":
        return Choice("reference", 'asked for by name; holds the T x S weights, "composed" does not'), None
    if impl == "composed":
        return Choice("composed", "asked for by name"), None
    refusal = why_not_fused(call)
    if refusal is None:
        route = choose_route(call, call.needs_gradient)
        return Choice("fused", route.reason, route.kernels), route
    if impl == "fused":
        raise ValueError(_refusal(refusal))
    reason = f"the fastest implementation that serves this call on {call.query.device.type}"
    return Choice("composed", reason, (), {"fused": refusal}), None


def _refusal(reason: str) -> str:
    return f'impl="fused" {reason}; use impl="composed", or "auto" to choose by the call'


def _runner_of(call: AttentionCall, impl: str) -> Runner:
    """A function that serves all calls with the signature of this one, given their tensors and segment ids."""
    choice, route = _choose(call, impl)
    if route is None:
        compute = reference_attention if choice.impl == "reference" else composed_attention

        settings, device = _forget(call), _autocast_device(call.query)

        def run(tensors: tuple[Any, ...], segment_ids: Any) -> Tensor:
            # The inputs already have autocast's dtype: it must not lower the operations inside again.
            with torch.autocast(device, enabled=False):
                return compute(_same_call(settings, tensors, segment_ids))

        return run
    return _fused_runner(_forget(call), call, route)


def _fused_runner(settings: AttentionCall, call: AttentionCall, route: Route) -> Runner:
    """The runner of a fused route; Triton is imported here."""
    if route.forward == "sdpa":
        is_causal, scale = call.visibility.is_causal, call.softmax_scale
        return lambda tensors, _: _plain_attention(tensors[0], tensors[1], tensors[2], is_causal, scale)
    if route.forward == "decode":
        from .fused.decode.op import decode

        return lambda tensors, segment_ids: decode(_same_call(settings, tensors, segment_ids))
    from .fused.op import plan_of, run_plan, with_kernel_rows
    from .fused.plan import inputs_of

    needs_gradient = call.needs_gradient
    if call.weights == SIGMOID.name or (route.forward == "flash" and not call.has_positive_scale):

        def run(tensors: tuple[Any, ...], segment_ids: Any) -> Tensor:
            same = with_kernel_rows(_same_call(settings, tensors, segment_ids))
            return run_plan(plan_of(same, needs_gradient), inputs_of(same), needs_gradient)

        return run
    plan = plan_of(call, needs_gradient)
    if call.visibility.has_ranges_only and (
        call.rows.sink is None or call.rows.has_row_sinks or call.rows.sink.is_contiguous()
    ):
        nothing = (None, None, None)
        return lambda tensors, _: run_plan(plan, [*tensors[:7], *nothing], needs_gradient)
    return lambda tensors, segment_ids: run_plan(
        plan, inputs_of(_same_call(settings, tensors, segment_ids)), needs_gradient
    )


def _run_plain_in_graph(
    query, key, value, alpha, beta, sink, gate, mask, is_causal, softmax_scale, nonnegative_alpha
) -> Tensor | None:
    """A call without window and segments, on a GPU, while a compiler traces it; None where the general path must serve.

    Every function and attribute that is traced becomes a guard, which is checked at each call of the compiled code. So
    this traces as little as possible: the operators check their arguments themselves.
    """
    on_gpu = isinstance(query, Tensor) and (query.is_cuda or INTERPRETED)
    if not on_gpu or query.dim() != 4 or query.dtype not in SERVED:
        return None
    if mask is not None and mask.dim() != 2:
        return None
    num_queries, num_keys, dim = query.shape[2], key.shape[2], query.shape[3]
    if dim > MAX_HEAD_DIM or num_queries == 0 or not runs_on(query.device.index or 0):
        return None
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    rows = (alpha, beta, sink, gate)
    tensors = (query, key, value, *rows)
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if query.is_cuda and num_queries < num_keys and num_queries <= MAX_DECODED_QUERIES and not needs_gradient:
        from .fused.decode import op as _  # noqa: F401 - registers the operator

        return torch.ops.affine_attention.decode(*tensors, mask, None, None, is_causal, None, num_keys, scale, SOFTMAX)
    if scale <= 0 or torch.are_deterministic_algorithms_enabled():
        return None
    is_plain = query.is_cuda and mask is None and all(x is None for x in rows)
    if is_plain and num_queries == num_keys > 1 and dim % 8 == 0 and query.dtype in HALF:
        return _plain_attention(query, key, value, is_causal, scale)
    from .fused.op import in_graph

    return in_graph(*tensors, None, None, mask, is_causal, None, scale, nonnegative_alpha, SOFTMAX, needs_gradient)


def _run_in_graph(call: AttentionCall, impl: str) -> Tensor:
    """Serves a call while a compiler traces it: decides between implementations, and leaves the route to the operator.

    The operator chooses its route at run time, when the properties of the GPU are known.
    """
    if impl != "fused" and is_exporting_to_onnx():
        return onnx_attention(call)
    refusal = "asked for by name" if impl in ("reference", "composed") else why_not_fused(call)
    if refusal is not None:
        if impl == "fused":
            raise ValueError(_refusal(refusal))
        compute = reference_attention if impl == "reference" else composed_attention
        with torch.autocast(_autocast_device(call.query), enabled=False):
            return compute(call)
    seen, needs_gradient = call.visibility, call.needs_gradient
    if seen.num_queries < seen.num_keys and why_not_decode(call, needs_gradient) is None:
        from .fused.decode.op import decode

        return decode(call)
    if call.rows.is_plain and why_not_plain(call) is None:
        return _plain_attention(call.query, call.key, call.value, seen.is_causal, call.softmax_scale)
    from .fused.op import traced_attention

    return traced_attention(call, needs_gradient)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, softmax_scale: float) -> Tensor:
    return scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _forget(call: AttentionCall) -> AttentionCall:
    """The settings of a call without its tensors, which a runner must not keep alive."""
    seen = replace(call.visibility, query_segments=None, key_segments=None, key_mask=None, pair_mask=None)
    nothing: Any = None
    return call._replace(query=nothing, key=nothing, value=nothing, rows=Rows(), visibility=seen)


def _same_call(settings: AttentionCall, tensors: tuple[Any, ...], segment_ids: Any) -> AttentionCall:
    """The call with these tensors, whose signature has been checked before."""
    query, key, value, alpha, beta, sink, gate, mask = tensors
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    seen = settings.visibility
    if mask is not None or segment_ids is not None:
        masks = {"key_mask": mask} if mask is not None and mask.dim() == 2 else {"pair_mask": mask}
        seen = replace(seen, query_segments=pair[0], key_segments=pair[1], **masks)
    return settings._replace(
        query=query, key=key, value=value, rows=Rows(alpha, beta, sink, gate), visibility=seen
    )  # fmt: skip


def _kernels_of(query: Tensor, key: Tensor, visibility: Visibility) -> tuple[str, ...]:
    """The PyTorch kernels that the tiles of `composed` would run on, each once."""
    names = []
    for tiles in plan_tiles(visibility, query.device.type):
        for tile in tiles:
            kernel, _ = choose_kernel(query, key, tile.mask != "none", tile.is_causal)
            names.append(kernel.name)
    return tuple(dict.fromkeys(names))


def _checked_call(
    query, key, value, alpha, beta, sink, gate, mask, segment_ids, is_causal, window, softmax_scale, nonnegative_alpha,
    weights,
) -> AttentionCall:  # fmt: skip
    check_query_key(query, key)
    check_value(value, query, key)
    check_rows(query, alpha, beta, sink, gate)
    check_weights(weights, sink)
    visibility = check_visibility(query, key, mask=mask, is_causal=is_causal, window=window, segment_ids=segment_ids)
    scale = check_softmax_scale(softmax_scale, query.shape[-1])
    check_flag("nonnegative_alpha", nonnegative_alpha)
    rows = Rows(alpha, beta, sink, gate)
    return AttentionCall(query, key, value, rows, visibility, scale, nonnegative_alpha, softmax_scale is None, weights)


def _check_impl(impl: Any) -> None:
    check_one_of("impl", impl, IMPLEMENTATIONS)


def _autocast_device(query: Tensor) -> str:
    """The device type whose autocast is switched off for a call; meta tensors have none."""
    return "cpu" if query.device.type == "meta" else query.device.type


def _follow_autocast(query: Any, key: Any, value: Any, gate: Any) -> tuple[Any, ...]:
    """Lowers fp32 tensors to autocast's dtype, as PyTorch does for its own attention.

    A gate stays fp32 if autocast does not cast the query because it has the other half precision.
    """
    tensors = (query, key, value, gate)
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors have no autocast
        return tensors
    dtype = torch.get_autocast_dtype(device)
    if isinstance(query, Tensor) and query.dtype not in (torch.float32, dtype):
        return *(_lowered(x, dtype) for x in (query, key, value)), gate
    return tuple(_lowered(x, dtype) for x in tensors)


def _lowered(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x
