"""Decides once per signature how a call runs on a GPU: the route, and its prepared launches.

Rules, in this order (docs/kernels.md has the measurements):
- decode: up to 16 queries and no gradient, against more keys than queries;
- plain causal or full attention in bf16 and fp16 on compute capability 9.0 and newer: PyTorch's own attention where the
  call has no mechanism; on Hopper, causal calls take one kernel of ours each for the forward and the backward;
  otherwise cuDNN between a prologue and an epilogue. cuDNN's backward is not deterministic; the Hopper backward adds dQ
  in a fixed order under torch.use_deterministic_algorithms;
- flash: every other call that the Triton kernels take (windows, segments, padding, T != S, fp32, older GPUs). On
  Hopper, such calls in bf16 and fp16 take the Hopper backward, and causal ones with T != S and a head dim above 64 its
  Gluon forward.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall, CallSpec, TensorSpec
from . import HAS_TRITON, INTERPRETED, MIN_CAPABILITY, capability_of

CUDNN_CAPABILITY, HOPPER = 90, range(90, 100)
MAX_HEAD_DIM, MAX_DECODED_QUERIES = 256, 16
WEIGHTS = ("softmax", "signed", "sigmoid")  # the weight functions of the flash kernels
HALF, SERVED = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)
# Elements of query from which a call saves its output instead of O. Below, O costs at most 64 MiB, and its
# recomputation in the backward would take two more launches and a second stream. 0: every call, for tests.
LARGE = 2**25
# Elements of query from which cuDNN's forward is faster than ours at head dims above 64.
CUDNN_FORWARD = 2**23
# Whether large calls keep O in addition to their output too, for models in which many rows have a small alpha.
KEEPS_O = os.environ.get("AFFINE_KEEP_O") == "1"
# Queries from which the Gluon forward is faster than cuDNN with an epilogue, at head dims above 64 and without a gate
# (with one, at head dim 128: 1.17 of cuDNN's time against 1.06 at 8k, and 1.10 against 0.97 at 32k).
GLUON_FORWARD = 4096


@dataclass(frozen=True)
class Route:
    """How the calls of one signature run; `explain` describes it."""

    forward: str  # "empty", "sdpa", "decode", "hopper", "gluon", "cudnn" or "flash"
    backward: str | None  # "empty", "sdpa", "hopper", "cudnn" or "flash"; None: no gradient is needed
    saves: str  # "nothing", "output" or "softmax output": which of [B, H, T, D] the backward reads
    reason: str
    shift: bool = False  # the forward writes lse - log(alpha), which the backward reads (B7)
    ordered: bool = False  # the Hopper backward adds dQ in a fixed order

    @property
    def kernels(self) -> tuple[str, ...]:
        if self.backward in (None, self.forward):
            return (self.forward,)
        return f"{self.forward} forward", f"{self.backward} backward"


def why_not_fused(call: AttentionCall) -> str | None:
    """The reason why no fused route can serve the call, None when one can. A compiled graph traces it."""
    query, seen = call.query, call.visibility
    if query.device.type != "cuda" and not (INTERPRETED and query.device.type == "cpu"):
        return f"needs a CUDA GPU, got {query.device.type} tensors"
    if not HAS_TRITON:
        return "needs Triton, which is not installed"
    if query.device.type == "cuda" and capability_of(query) < MIN_CAPABILITY:
        return f"needs a GPU of compute capability 8.0 or newer, got {capability_of(query) / 10}"
    if call.weights not in WEIGHTS:
        return f"has kernels for weights={', '.join(map(repr, WEIGHTS))}, got {call.weights!r}"
    if query.dtype not in SERVED:
        return f"takes bfloat16, float16 or float32, got {str(query.dtype).removeprefix('torch.')}"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {query.shape[-1]}"
    if seen.pair_mask is not None:
        return "does not take a dense mask [B, 1|H, T, S]; causal, window, segment_ids and a [B, S] mask are served"
    return None


def why_not_decode(call: AttentionCall, needs_gradient: bool) -> str | None:
    """The reason why the decode kernels cannot serve a call that a fused route serves, None when they can."""
    seen = call.visibility
    if call.query.device.type != "cuda":
        return f"needs a CUDA GPU, got {call.query.device.type} tensors"
    if seen.num_queries > MAX_DECODED_QUERIES:
        return f"serves up to {MAX_DECODED_QUERIES} queries, got T = {seen.num_queries}"
    if 0 in call.query.shape or 0 in call.key.shape:
        return f"needs at least one query and one key, got T = {seen.num_queries} and S = {seen.num_keys}"
    if seen.query_segments is not None:
        return "takes no segment ids"
    if needs_gradient:
        return "has no gradient, and an input requires one; call it under torch.no_grad()"
    return None


def why_not_plain(call: AttentionCall) -> str | None:
    """The reason why the routes for plain causal and full attention cannot serve a call, None when they can."""
    query, key, seen = call.query, call.key, call.visibility
    if query.device.type != "cuda":
        return f"needs a CUDA GPU, got {query.device.type} tensors"
    if capability_of(query) < CUDNN_CAPABILITY:
        return f"needs compute capability 9.0 or newer, got {capability_of(query) / 10}"
    if query.dtype not in HALF:
        return f"takes bfloat16 and float16, got query of {query.dtype}"
    if query.shape[-1] % 8:
        return f"takes head dims that are multiples of 8, got {query.shape[-1]}"
    if call.weights != "softmax":
        return f"serves softmax weights, got {call.weights!r}"
    if call.rows.has_row_sinks:
        return "takes one sink per head [H], got a sink per row [B, H, T]"
    if 0 in query.shape or 0 in key.shape:
        return f"needs at least one query and one key, got T = {query.shape[2]} and S = {key.shape[2]}"
    if query.shape[2] == key.shape[2] == 1:
        return "does not take one query with one key"
    if not seen.has_ranges_only:
        return "serves plain causal and full attention only, got segment ids or a mask"
    if seen.window is not None:
        return f"serves plain causal and full attention only, got window = {seen.window}"
    if seen.is_causal and seen.offset != 0:
        return f"causal attention needs as many queries as keys, got T = {seen.num_queries} and S = {seen.num_keys}"
    if torch.are_deterministic_algorithms_enabled() and (
        call.rows.is_plain or not seen.is_causal or why_not_hopper_backward(call) is not None
    ):
        return "its backward is not deterministic, and torch.use_deterministic_algorithms requires that"
    return None


def choose_route(call: AttentionCall, needs_gradient: bool) -> Route:
    """The route of a call for which `why_not_fused` returns None."""
    seen = call.visibility
    if 0 in call.query.shape or 0 in call.key.shape:
        return Route("empty", "empty" if needs_gradient else None, "output", "no query or no key: zeros")
    refusals = []
    if seen.num_queries < seen.num_keys:
        reason = why_not_decode(call, needs_gradient)
        if reason is None:
            return Route(
                "decode", None, "nothing", f"{seen.num_queries} queries against {seen.num_keys} keys, no gradient"
            )
        refusals.append(f"decode {reason}")
    reason = why_not_plain(call)
    if reason is None:
        route = _plain_route(call, needs_gradient)
        if isinstance(route, Route):
            return route
        reason = route
    refusals.append(f"plain causal or full attention {reason}")
    plain_rows = call.rows.alpha is None and call.rows.beta is None and call.rows.gate is None
    saves = "nothing" if not needs_gradient else "output" if plain_rows else "softmax output"
    reason = why_not_ranges(call, needs_gradient)
    if reason is not None:
        refusals.append(f"the Hopper kernels {reason}")
        return Route("flash", "flash" if needs_gradient else None, saves, "; ".join(refusals))
    backward = "hopper" if needs_gradient else None
    if why_not_gluon_forward(call) is not None:
        return Route("flash", backward, saves, "; ".join(refusals))
    # A gate or a negative alpha needs lse itself (B7).
    shift = needs_gradient and call.rows.alpha is not None and call.rows.gate is None and call.nonnegative_alpha
    return Route("gluon", backward, saves, "; ".join(refusals), shift)


def why_not_ranges(call: AttentionCall, needs_gradient: bool) -> str | None:
    """The reason why Hopper kernels cannot serve a call with any visibility but a dense mask, None when they can."""
    if call.query.device.type != "cuda" or capability_of(call.query) not in HOPPER:
        return "need a GPU of compute capability 9.x"
    if call.query.dtype not in HALF:
        return f"take bfloat16 and float16, got query of {call.query.dtype}"
    if call.weights != "softmax" or call.softmax_scale <= 0:
        return f"serve softmax weights with a positive softmax_scale, got {call.weights!r} and {call.softmax_scale}"
    if call.rows.has_row_sinks:
        return "take one sink per head [H], got a sink per row [B, H, T]"
    if not needs_gradient:
        return None
    from .hopper.backward import HEAD_DIMS, why_not_here

    if call.query.shape[-1] not in HEAD_DIMS:
        return (
            f"serve head dims {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1} that are multiples of 8, "
            f"got {call.query.shape[-1]}"
        )
    if torch.are_deterministic_algorithms_enabled():
        return "have a backward that is not deterministic, and torch.use_deterministic_algorithms requires that"
    return why_not_here()


def why_not_gluon_forward(call: AttentionCall) -> str | None:
    """The reason why the Gluon forward does not serve a call that other Hopper kernels serve, None when it does."""
    from .hopper.backward import why_not_here
    from .hopper.gluon_forward import HEAD_DIMS

    seen = call.visibility
    if capability_of(call.query) not in HOPPER:
        return f"needs compute capability 9.x, got {capability_of(call.query) / 10}"
    if not seen.is_causal or seen.window is not None or not seen.has_ranges_only or call.softmax_scale <= 0:
        return "serves causal attention without windows, segments and padding, with a positive softmax_scale"
    if call.query.shape[-1] not in HEAD_DIMS:
        return f"serves head dims {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}, got {call.query.shape[-1]}"
    return why_not_here()


def _plain_route(call: AttentionCall, needs_gradient: bool) -> Route | str:
    """The route of plain causal or full attention, or the reason why there is none."""
    alpha, beta, _, gate = call.rows
    if call.rows.is_plain:
        return Route("sdpa", "sdpa" if needs_gradient else None, "output", "no mechanism: PyTorch's own attention")
    forward = "hopper" if _fits_hopper_forward(call) else "cudnn"
    is_long = call.query.shape[2] >= GLUON_FORWARD
    if forward == "cudnn" and is_long and gate is None and why_not_gluon_forward(call) is None:
        forward = "gluon"
    backward, told = None, ""
    ordered = needs_gradient and torch.are_deterministic_algorithms_enabled()
    if needs_gradient:
        refusal = why_not_hopper_backward(call)
        backward = "hopper" if refusal is None else "cudnn"
        told = "" if refusal is None else f" (the Hopper backward {refusal})"
    if "cudnn" in (forward, backward):
        refusal = why_not_cudnn(call)
        if refusal is not None:
            return refusal
    has_rows = alpha is not None or beta is not None or gate is not None
    saves = "nothing"
    if needs_gradient:
        drops_core = backward == "hopper" and gate is None and call.query.numel() >= LARGE and not KEEPS_O
        saves = "softmax output" if has_rows and not drops_core else "output"
    # B8 needs lse without log(alpha), and so does a backward that must handle a negative alpha.
    shift = needs_gradient and alpha is not None and gate is None and call.nonnegative_alpha
    shift = shift and saves == "softmax output"
    if has_rows and needs_gradient and saves == "output":
        told += "; O is recomputed for rows that lose it to cancellation (AFFINE_KEEP_O=1 keeps it)"
    kind = "causal" if call.visibility.is_causal else "full"
    told += "; dQ is added in a fixed order" if ordered else ""
    return Route(forward, backward, saves, f"plain {kind} attention: the fastest measured{told}", shift, ordered)


def _fits_hopper_forward(call: AttentionCall) -> bool:
    query = call.query
    if not (call.visibility.is_causal and call.softmax_scale > 0 and capability_of(query) in HOPPER):
        return False
    return fits_hopper_forward(query.shape[-1], query.numel())


def fits_hopper_forward(dim: int, elements: int) -> bool:
    """Whether the Hopper forward is the fastest for a causal call with this head dim and so many elements of query."""
    return dim <= 64 or (dim <= 128 and elements < CUDNN_FORWARD)


def why_not_hopper_backward(call: AttentionCall) -> str | None:
    from .hopper.backward import HEAD_DIMS, why_not_here

    if capability_of(call.query) not in HOPPER:
        return f"needs compute capability 9.x, got {capability_of(call.query) / 10}"
    if not call.visibility.is_causal or call.softmax_scale <= 0:
        return "serves causal attention with a positive softmax_scale"
    if call.query.shape[-1] not in HEAD_DIMS:
        return f"serves head dims {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}, got {call.query.shape[-1]}"
    return why_not_here()


def why_not_cudnn(call: AttentionCall) -> str | None:
    """The reason why PyTorch's cuDNN attention cannot serve plain attention of this kind, None when it can."""
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "needs cuDNN's attention, which torch.backends.cuda has disabled"
    if not _cudnn_takes(call.query.device, call.query.dtype, call.query.shape[-1], call.visibility.is_causal):
        return "needs cuDNN's attention, which does not take this device, dtype or head dim"
    return None


@functools.cache
def _cudnn_takes(device: torch.device, dtype: torch.dtype, dim: int, is_causal: bool) -> bool:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # a compiled graph is traced with tensors that have no memory
        x = torch.empty(1, 1, 64, dim, dtype=dtype, device=device)
        params = torch.backends.cuda.SDPAParams(x, x, x, None, 0.0, is_causal, False)
        return bool(torch.backends.cuda.can_use_cudnn_attention(params, False))


class Plan:
    """A route with its launches, for all calls of one kind. `inputs` are the ten tensors of `inputs_of`.

    The launches of the backward are prepared at the first backward, for each kind of gradient.
    """

    def __init__(self, call: AttentionCall, route: Route):
        self.route, self.device = route, call.query.get_device()
        inputs = inputs_of(call)
        self.copied = [n for n in _DENSE if (x := inputs[n]) is not None and not _is_addressable(x)]
        spec = _call_of(self.prepared(inputs), call)
        self.call = CallSpec.of(spec)
        self.forward = self._forward()
        self._backwards: dict[Any, Any] = {}

    def prepared(self, inputs: list[Tensor | None]) -> list[Tensor | None]:
        """The inputs as the kernels address them: copies of those whose strides or addresses do not fit."""
        for n in self.copied:
            inputs[n] = _addressable(inputs[n])  # type: ignore[arg-type]
        address = 0
        for x in inputs:
            if x is not None:
                address |= x.data_ptr()
        if address & 15:
            inputs = [x if x is None or x.data_ptr() & 15 == 0 else _moved(x) for x in inputs]
        return inputs

    def _forward(self) -> Any:
        route, call = self.route, self.call
        keeps_core = route.saves == "softmax output"
        if route.forward == "empty":
            return lambda *inputs: (torch.zeros_like(inputs[0]), None, None, None)
        if route.forward == "flash":
            from .flash.forward import FlashForward

            return FlashForward(call, keeps_core=keeps_core)
        rows = call.rows
        keeps_marks = route.saves == "output" and (rows.alpha is not None or rows.beta is not None)
        settings: dict[str, Any] = {"keeps_core": keeps_core, "keeps_marks": keeps_marks, "shift": route.shift}
        if route.forward == "gluon":
            from .hopper.gluon_forward import GluonForward

            return GluonForward(call, **settings)
        if route.forward == "hopper":
            from .hopper.forward import HopperForward

            return HopperForward(call, **settings)
        from .cudnn.forward import CudnnForward

        return CudnnForward(call, **settings)

    def run_forward(self, inputs: list[Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(out, softmax output, lse, state): what the route does not save, or keeps elsewhere, is None."""
        return self.forward(*(inputs if self.route.forward == "flash" else inputs[:7]))

    def run_backward(
        self,
        grad_out: Tensor,
        core: Tensor,
        lse: Tensor | None,
        state: Tensor | None,
        inputs: list[Tensor | None],
        wants_sink: bool,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value, alpha, beta, sink and gate; None for absent inputs."""
        if self.route.backward == "empty":
            return tuple(None if x is None else torch.zeros_like(x) for x in inputs[:7])
        if self.route.backward == "flash":
            core = aligned(core)
        elif self.route.backward == "cudnn" and lse is None:
            lse = self.forward.state.views(state)[0].unsqueeze(3)
        backward = self._backwards.get((grad_out.stride(), wants_sink))
        if backward is None or grad_out.data_ptr() & 15:
            grad_out = aligned(grad_out)
            kind = (grad_out.stride(), wants_sink)
            if kind not in self._backwards:
                self._backwards[kind] = self._backward(grad_out, core, lse, wants_sink)
            backward = self._backwards[kind]
        if self.route.backward == "flash":
            return backward(grad_out, core, state, *inputs)
        return backward(grad_out, core, lse, state, *(inputs if self.route.backward == "hopper" else inputs[:7]))

    def _backward(self, grad_out: Tensor, core: Tensor, lse: Tensor | None, wants_sink: bool, **projected: Any) -> Any:
        route, call, state = self.route, self.call, self.forward.state
        specs = (TensorSpec.of(grad_out), TensorSpec.of(core))
        of_lse = None if lse is None else TensorSpec.of(lse)
        if route.backward == "flash":
            from .flash.backward import FlashBackward

            return FlashBackward(call, *specs, state)
        if route.backward == "hopper":
            from .hopper.backward import HopperBackward

            # Where a group is one head and a gate keeps O, cuDNN's backward needs less memory than all sums of dQ.
            halves = call.rows.gate is not None and call.query.shape[1] == call.key.shape[1]
            halves = halves and call.query.numel() >= LARGE
            return HopperBackward(
                call, *specs, of_lse, state, shift=route.shift, halves=halves, wants_sink=wants_sink,
                lse_in_log2=route.forward == "flash", ordered=route.ordered, **projected,
            )  # fmt: skip
        from .cudnn.backward import CudnnBackward

        assert of_lse is not None, "cuDNN's backward reads cuDNN's lse"
        return CudnnBackward(call, *specs, of_lse, state, shift=route.shift, wants_sink=wants_sink)


_DENSE = (0, 1, 2, 6)  # query, key, value and gate, whose rows are read by TMA or in vectors


def inputs_of(call: AttentionCall) -> list[Tensor | None]:
    """The tensors of a call in the order of the slots: query to gate, segments of queries and keys, key mask."""
    seen = call.visibility
    sink = call.rows.sink
    rows = call.rows if sink is None or sink.dim() == 3 else call.rows._replace(sink=sink.contiguous())
    segments = [None if x is None else x.contiguous() for x in (seen.query_segments, seen.key_segments)]
    mask = None if seen.key_mask is None else seen.key_mask.contiguous().view(torch.int8)
    return [call.query, call.key, call.value, *rows, *segments, mask]


def _call_of(inputs: list[Tensor | None], call: AttentionCall) -> AttentionCall:
    query, key, value, *rows = inputs[:7]
    assert query is not None
    assert key is not None
    assert value is not None
    return call._replace(query=query, key=key, value=value, rows=type(call.rows)(*rows))


def _is_addressable(x: Tensor) -> bool:
    from .shared.descriptors import is_addressable

    return is_addressable(x)


def _addressable(x: Tensor) -> Tensor:
    from .shared.descriptors import addressable

    return addressable(x)


def _moved(x: Tensor) -> Tensor:
    """A copy at an aligned address with the strides of x, which the launches of a plan contain."""
    copy = x.clone()  # keeps the strides of a tensor without gaps
    if copy.stride() == x.stride():
        return copy
    once = x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]  # expanded dimensions
    room = torch.empty_strided(once.shape, once.stride(), dtype=x.dtype, device=x.device)
    return room.copy_(once).expand(x.shape)


def aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy, as the kernels address it."""
    return x if _is_addressable(x) and x.data_ptr() & 15 == 0 else _addressable(x)
