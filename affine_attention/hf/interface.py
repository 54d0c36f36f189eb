"""The attention function and the hooks through which an attached model calls the operator.

A call of an attached model runs `note_call` before the decoder, which finds packed documents and requests for weights.
For each layer it then runs `note_hidden` before the attention module, which passes on the input of q_proj, and
`affine_attention` instead of transformers' own attention function, after the cache has been updated. Layers of plain
softmax attention need no input of q_proj, and no hook. What is the same for all layers is computed by the first layer
and kept in the `ForwardCall` of the forward. Plain causal calls have nothing to read: they go to the operator at once.

Every function and global that a compiled layer traces here becomes a guard, which each of its calls checks.
"""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..nn import AttentionMechanism
from ..nn.attention import PLAIN_CAUSAL, Coefficients, real_tokens, subtract_next
from ..ops import attention, attention_weights
from ..ops.api import plain_attention
from ..ops.finish import NORM_EPS, Finish
from .keywords import refuse_unknown
from .masks import compact_mask, packed_segments, read_mask, values_are_unknown
from .own_values import finish_with, own_keys
from .paged import PagedBatch
from .parallel import check_no_hidden_sharding, own_sink

IMPLEMENTATION = "affine_attention"  # the name in config._attn_implementation
# Names in config._attn_implementation of an attached model, and the implementation of the operator that each runs.
OPERATOR_IMPL = {IMPLEMENTATION: "auto"} | {
    f"{IMPLEMENTATION}_{impl}": impl for impl in ("reference", "composed", "fused")
}
# The name while continuous batching runs (continuous_batching.py). Transformers 5.17 switches names without "paged|" in
# them to flash attention, newer ones refuse names without "flash"; this one stays.
PAGED = f"{IMPLEMENTATION}_paged|flash"
SLOT = "affine"  # the submodule of an attention module that holds its mechanism
MAX_READINGS = 8  # of masks in one forward: a dense mask that is copied to each GPU must not be kept for every layer


class WeightsNotice(UserWarning):
    """An attached model was called with output_attentions=True."""


class Reading(NamedTuple):
    """What a layer needs to know about the keys of a call; the same for all layers with one mask and mechanism."""

    arguments: dict[str, Any]  # of the operator
    num_keys: int
    token_mask: Tensor | None  # [B, T], the queries that are real tokens; None: all
    divisor: Tensor | int | None  # N of Eq. 8


class ForwardCall:
    """What the layers of one forward share, so that each mask is read once and not once per layer.

    `note_call` creates one per forward and passes it on as a keyword argument, so no two forwards or threads share one;
    the recomputation of activation checkpointing receives the same one. Compiled graphs receive None: they read masks
    while they are traced.
    """

    __slots__ = ("_readings", "config")

    def __init__(self, config: Any):
        self.config = config
        self._readings: dict[tuple[Any, ...], tuple[Reading, tuple[Any, ...]]] = {}

    def read(
        self,
        layer: AttentionMechanism,
        mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        is_causal: bool,
        segments: Tensor | None,
    ) -> Reading:
        """`read_call`, or its result from an earlier layer."""
        batch, _, queries, _ = query.shape
        owners = (mask, segments, layer.mechanism)
        name = (*map(id, owners), is_causal, batch, queries, key.shape[2], query.get_device())
        found = self._readings.get(name)
        if found is None:
            if len(self._readings) >= MAX_READINGS:
                self._readings.clear()
            # Keeps the objects alive, because Python would otherwise reuse their ids.
            found = self.make(layer, mask, query, key, is_causal, segments), owners
            self._readings[name] = found
        return found[0]

    def make(self, *arguments: Any) -> Reading:
        return read_call(*arguments)


def read_call(
    layer: AttentionMechanism,
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    segments: Tensor | None,
) -> Reading:
    """Turns the mask of a layer into arguments of the operator, real tokens and the divisor of the bias."""
    arguments, num_keys, token_mask = read_mask(mask, query, key, is_causal, segments)
    if token_mask is None:
        token_mask = real_tokens(arguments.get("mask"), query.shape[2])
    divisor = None
    if layer.mechanism.bias:
        if num_keys != query.shape[2]:
            layer.mechanism.check_can_generate()
        divisor = layer.bias_divisor(query, key[:, :, :num_keys] if num_keys < key.shape[2] else key, **arguments)
    return Reading(arguments, num_keys, token_mask, divisor)


def affine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    affine_hidden: Tensor | None = None,
    affine_segments: Any = ...,
    affine_weights: bool = False,
    affine_call: ForwardCall | None = None,
    affine_impl: str = "auto",
    position_ids: Any = None,
    use_cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function registered with transformers: (output [B, T, H, D], weights [B, H, T, S] or None).

    `position_ids` and `use_cache` have no effect: they are named because most models pass them, and `others` are
    looked up one by one.
    """
    layer: Any = module._modules.get(SLOT)
    if layer is None or (affine_hidden is None and not layer.is_plain):
        raise ValueError(
            f'attn_implementation="{IMPLEMENTATION}" needs a model with a mechanism, got {type(module).__name__} '
            "without one; call affine_attention.hf.attach(model, mechanism), and leave out encoder_hidden_states: "
            "cross-attention gets no mechanism"
        )
    if dropout:
        raise ValueError(
            f"dropout on attention weights is not part of any mechanism, got {dropout}; set attention_dropout (GPT-2: "
            "attn_pdrop) of the configuration to 0 before the model is built"
        )
    if others:
        refuse_unserved(type(module).__name__, others)
    if affine_segments is ...:
        refuse_graph_without_decoder(module)
        affine_segments = None
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    sequence = layer.sequence
    queries, keys = query.shape[2], key.shape[2]
    is_simple = attention_mask is None and affine_segments is None and is_causal and sequence is None
    longest = layer.longest_simple
    is_simple = is_simple and queries == keys and queries > 1 and (longest is None or keys <= longest)
    if is_simple:
        # What `read_call` would return.
        arguments, num_keys, token_mask, divisor = PLAIN_CAUSAL, keys, None, layer.simple_divisor
        if layer.is_plain and affine_impl == "auto" and layer.observer is None and not affine_weights:
            out = plain_attention(query, key, value, True, scaling)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
    else:
        if sequence is not None:
            check_sequence(module, layer, affine_call)
        # A graph that reads the object would be compiled again for each new one.
        read = read_call if affine_call is None or is_compiling() else affine_call.read
        arguments, num_keys, token_mask, divisor = read(layer, attention_mask, query, key, is_causal, affine_segments)
        if num_keys < keys:
            key, value = key[:, :, :num_keys], value[:, :, :num_keys]
    alpha = beta = sink = gate = difference = exclusion = norm_weight = None
    function = "softmax"
    if not layer.is_plain:
        sink = layer.sink
        if sink is not None:
            sink = own_sink(sink, query.shape[1])
        # One autograd node for W_a and the operator: it runs the fused kernels.
        joined = query.is_cuda and affine_impl in ("auto", "fused") and sequence is None
        if joined and layer.observer is None and not affine_weights:
            if not is_simple:
                out = layer.attend(affine_hidden, query, key, value, divisor, token_mask, sink, scaling, arguments)
            elif layer.joins:  # as layer.attend does
                gate_of = layer._gate if "gate_proj" in layer._modules else None
                arguments_of_node = (affine_hidden, query, key, value, divisor, None, sink, gate_of, scaling)
                out = layer._modules["scale"].attend(*arguments_of_node)
            else:
                out = None
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        rows = layer.rows(affine_hidden, divisor, token_mask)
        alpha, beta, token_sink, gate, exclusion, norm_weight, function = rows
        if function == "softplus":
            query, key, scaling = layer.scored(query, key, scaling)
        if sink is None:
            sink = token_sink
        if layer.mechanism.differential:
            num_kv_heads = key.shape[1]
            difference = layer.difference(affine_hidden, num_kv_heads)
        if alpha is not None and alpha.shape[1] != query.shape[1]:
            # Tensor parallelism: a constant alpha has no parameter that would tell the layer how its heads are split.
            alpha = alpha[:, : query.shape[1]]
    if layer.observer is not None:
        layer.observer(
            query, key, value, alpha=alpha, beta=beta, sink=sink, gate=gate, exclusion=exclusion,
            norm_weight=norm_weight, weights=function, difference=difference, softmax_scale=scaling,
            token_mask=token_mask, **arguments,
        )  # fmt: skip
    if sequence is not None:
        rows = Coefficients(alpha, beta, sink, gate, exclusion, norm_weight, function)
        query, key, value, rows = sequence.to_heads(query, key, value, rows)
        alpha, beta, sink, gate, exclusion, norm_weight, _ = rows
    own = None if exclusion is None else own_keys(arguments, query.shape[2], key.shape[2])
    parts = None
    if own is not None:
        parts = Finish(exclusion, norm_weight, NORM_EPS, gate)
        exclusion = norm_weight = gate = None
    out = attention(
        query, key, value, alpha=alpha, beta=beta, sink=sink, gate=gate, exclusion=exclusion,
        norm_weight=norm_weight, weights=function, softmax_scale=scaling,
        nonnegative_alpha=layer.nonnegative_alpha, impl=affine_impl, **arguments,
    )  # fmt: skip
    if own is not None and parts is not None:
        out = finish_with(out, value, own, parts, affine_impl)
    if sequence is not None:
        out = sequence.to_part(out)
    weights = None
    if affine_weights:
        weights = attention_weights(
            query, key, alpha=alpha, beta=beta, sink=sink, weights=function, softmax_scale=scaling, **arguments
        )
    if difference is not None:
        out = subtract_next(out, difference, num_kv_heads)
        weights = None if weights is None else subtract_next(weights, difference, num_kv_heads)
    if weights is not None and num_keys < keys:
        weights = pad(weights, (0, keys - num_keys))  # to the length of a preallocated cache, as transformers does
    # Contiguous like transformers' own: a model may use view (afmoe does).
    return out.transpose(1, 2).contiguous(), weights


def refuse_unserved(kind: str, given: dict[str, Any]) -> None:
    """Raises for a keyword that changes attention, or that is not known to leave it as it is."""
    for name in ("position_bias", "s_aux", "softcap"):
        if given.get(name) is not None:
            raise ValueError(f"{name} is not part of any mechanism, but {kind} passes one")
    refuse_unknown(kind, given, "call affine_attention.hf.detach(model) first")


def refuse_graph_without_decoder(module: nn.Module) -> None:
    """Raises while a layer is compiled whose decoder has not run: it cannot know whether documents are packed."""
    if is_compiling():
        raise ValueError(
            f"torch.compile of an attention layer outside of its decoder: {type(module).__name__} does not know "
            "whether documents are packed; compile the decoder layers or the model, not the attention module"
        )


def check_sequence(module: nn.Module, layer: AttentionMechanism, call: ForwardCall | None) -> None:
    """Raises where a sequence-parallel layer does not know the whole sequence."""
    if layer.observer is not None:
        raise ValueError("observer is not served under sequence parallelism; inspect the model on one rank")
    if getattr(call, "sequence", None) is not layer.sequence:
        raise ValueError(
            f"{type(module).__name__} does not know the whole sequence: call "
            "affine_attention.hf.sequence_parallel(model, group), and the model uncompiled"
        )


def note_hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before an attention module: passes its input, which feeds q_proj, to `affine_attention`."""
    call = None
    if is_compiling():
        # A graph that reads the object would be compiled again for each new one.
        kwargs["affine_call"] = None
    else:
        call = kwargs.get("affine_call")
    if call is None or call.config is not module.config:
        check_implementation(module.config)
    kwargs["affine_hidden"] = args[0] if args else kwargs["hidden_states"]
    return args, kwargs


def carry_keywords(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a layer that passes no keywords on: leaves those of `note_call` with its attention, for this one call."""
    given = {name: kwargs[name] for name in ("affine_segments", "affine_weights", "affine_call") if name in kwargs}
    for child in module.children():
        if SLOT in child._modules:
            child.affine_carried = given  # type: ignore[assignment]


def take_keywords(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before the attention of such a layer, and before `note_hidden`: takes what `carry_keywords` left."""
    carried: Any = module.affine_carried
    module.affine_carried = {}  # type: ignore[assignment]
    return args, kwargs | carried


def note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a decoder: passes on to its layers whether position_ids pack documents and whether weights are wanted.

    Only position_ids that the caller passes can pack documents, and the decoder cannot tell them from those that it
    makes itself while it is traced. So this is asked here, and plain causal training needs no mask, compiled or not.
    """
    config: Any = module.config
    check_implementation(config)
    if config._attn_implementation == PAGED:
        kwargs |= {"affine_call": PagedBatch(config, kwargs), "affine_segments": None, "affine_weights": False}
        return args, kwargs
    compiling = is_compiling()
    check_no_hidden_sharding()
    segments = None
    given = kwargs if not args else kwargs | by_name(module, args)
    position_ids = given.get("position_ids")
    if position_ids is not None and position_ids.dim() == 3 and position_ids.shape[0] == 4:
        position_ids = position_ids[0]  # Qwen2-VL and its like: text, time, height, width
    if position_ids is not None and given.get("attention_mask") is None and given.get("past_key_values") is None:
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if position_ids.dim() == 2 and inputs is not None:
            segments = packed_segments(position_ids, inputs.shape[0])
            if not values_are_unknown() and not bool(segments[:, -1].any()):
                segments = None
            if segments is not None and "position_ids" not in inspect.signature(type(module).forward).parameters:
                raise ValueError(
                    f"position_ids must be left out, got packed documents for {type(module).__name__}, which counts "
                    "positions itself: later documents would not start at 0; pass one document per row"
                )
    weights = kwargs.get("output_attentions")
    if weights is None:
        weights = bool(getattr(config, "output_attentions", False))
    if weights and not compiling:
        warnings.warn(
            "output_attentions=True computes the weights of every layer a second time and holds [B, H, T, S] for each; "
            "they are alpha * softmax + beta and do not contain the output gate",
            WeightsNotice,
            stacklevel=2,
        )
    kwargs["affine_segments"], kwargs["affine_weights"] = segments, bool(weights)
    kwargs["affine_call"] = None if compiling else ForwardCall(config)
    return args, kwargs


def by_name(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    code = inspect.unwrap(type(module).forward).__code__
    return dict(zip(code.co_varnames[1 : code.co_argcount], args, strict=False))


def check_implementation(config: Any) -> None:
    """Raises where the attention implementation of an attached model was changed: plain softmax would run silently."""
    if config._attn_implementation not in OPERATOR_IMPL and config._attn_implementation != PAGED:
        raise ValueError(_unknown_implementation(config._attn_implementation))


def own_implementation(name: Any) -> str:
    """The name of ours that a name of transformers chooses on an attached model: never plain softmax."""
    given = name
    if isinstance(name, str):
        name = name.removeprefix("paged|")  # continuous batching switches by itself
    if name is None or name in OPERATOR_IMPL or name == PAGED:
        return name or IMPLEMENTATION
    if name == "eager":
        return f"{IMPLEMENTATION}_reference"
    if name == "sdpa":
        return f"{IMPLEMENTATION}_composed"
    if isinstance(name, str) and "flash" in name and "|" not in name:
        return f"{IMPLEMENTATION}_fused"
    raise ValueError(_unknown_implementation(given))


def _unknown_implementation(name: Any) -> str:
    return (
        f'attn_implementation must be left out or "{IMPLEMENTATION}" (the fastest), "eager" (reference), "sdpa" '
        f'(composed) or "flash_attention_2" and its like (fused) while a mechanism is attached, got {name!r}; call '
        "affine_attention.hf.detach(model) first for plain softmax attention"
    )


def register() -> None:
    """Makes the implementations known to transformers; both registers are needed, or padding would be ignored."""
    for name, impl in OPERATOR_IMPL.items():
        AttentionInterface.register(
            name, affine_attention if impl == "auto" else partial(affine_attention, affine_impl=impl)
        )
        AttentionMaskInterface.register(name, compact_mask)
