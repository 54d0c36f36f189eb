"""The attention function and the hooks through which an attached model calls the operator.

A call of an attached model runs: `note_call` (before the decoder: are these packed documents? are weights wanted?),
then for each layer `note_hidden` (before the attention module: keep what feeds q_proj) and `affine_attention`, in the
place of transformers' own attention function, after the cache has been updated.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..nn import AttentionMechanism
from ..ops import attention, attention_weights
from .masks import compact_mask, packed_segments, read_mask
from .parallel import own_sink

IMPLEMENTATION = "affine_attention"  # the name in config._attn_implementation
SLOT = "affine"  # the submodule of an attention module that holds its mechanism
NOT_OURS = ("position_bias", "s_aux", "softcap")  # arguments of attention functions that no mechanism has


class WeightsNotice(UserWarning):
    """output_attentions=True was asked of an attached model."""


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
    affine_segments: Tensor | None = None,
    affine_weights: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function registered with transformers: (output [B, T, H, D], weights [B, H, T, S] or None)."""
    layer: AttentionMechanism | None = getattr(module, SLOT, None)
    if layer is None or affine_hidden is None:
        raise ValueError(
            f'attn_implementation="{IMPLEMENTATION}" needs a model with a mechanism, got {type(module).__name__} '
            "without one; call affine_attention.hf.attach(model, mechanism)"
        )
    if dropout:
        raise ValueError(
            f"dropout on attention weights is not part of any mechanism, got {dropout}; set attention_dropout (GPT-2: "
            "attn_pdrop) of the configuration to 0 before the model is built"
        )
    for name in NOT_OURS:
        if others.get(name) is not None:
            raise ValueError(f"{name} is not part of any mechanism, but {type(module).__name__} passes one")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    arguments, num_keys, token_mask = read_mask(attention_mask, query, key, is_causal, affine_segments)
    if num_keys < key.shape[2]:
        key, value = key[:, :, :num_keys], value[:, :, :num_keys]
    if layer.mechanism.bias and layer.mechanism.bias_length == "keys" and num_keys != query.shape[2]:
        raise ValueError(GENERATES_NOT)
    alpha, beta, sink, gate = layer.coefficients(affine_hidden, query, key, **arguments, token_mask=token_mask)
    sink = own_sink(sink, query.shape[1])
    if layer.observer is not None:
        layer.observer(
            query, key, value, alpha=alpha, beta=beta, sink=sink, gate=gate, softmax_scale=scaling,
            token_mask=token_mask, **arguments,
        )  # fmt: skip
    out = attention(
        query, key, value, alpha=alpha, beta=beta, sink=sink, gate=gate, softmax_scale=scaling, nonnegative_alpha=True,
        **arguments,
    )  # fmt: skip
    weights = None
    if affine_weights:
        weights = attention_weights(query, key, alpha=alpha, beta=beta, sink=sink, softmax_scale=scaling, **arguments)
    return out.transpose(1, 2), weights


GENERATES_NOT = (
    'bias_length="keys" cannot generate: every new key would change the earlier outputs; train with an integer '
    'bias_length or "visible"'
)


def note_hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before an attention module: hands its input, which feeds q_proj, on to `affine_attention`."""
    check_implementation(module.config)
    if torch.compiler.is_compiling() and "affine_segments" not in kwargs:
        raise ValueError(
            f"torch.compile of an attention layer outside of its decoder: {type(module).__name__} was not told whether "
            "documents are packed; compile the decoder layers or the model, not the attention module"
        )
    kwargs["affine_hidden"] = args[0] if args else kwargs["hidden_states"]
    return args, kwargs


def note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a decoder: tells its layers whether position_ids pack documents and whether weights are wanted.

    Only position_ids that the caller passes can pack documents, and the decoder cannot tell them from those that it
    makes itself while it is traced. So this is asked here, and plain causal training needs no mask, compiled or not.
    """
    check_implementation(module.config)
    segments = None
    given = kwargs if not args else kwargs | _by_name(module, args)
    position_ids = given.get("position_ids")
    if position_ids is not None and given.get("attention_mask") is None and given.get("past_key_values") is None:
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if position_ids.dim() == 2 and inputs is not None:
            segments = packed_segments(position_ids, inputs.shape[0])
            if not torch.compiler.is_compiling() and not bool(segments[:, -1].any()):
                segments = None
    weights = kwargs.get("output_attentions")
    if weights is None:
        weights = bool(getattr(module.config, "output_attentions", False))
    if weights and not torch.compiler.is_compiling():
        warnings.warn(
            "output_attentions=True computes the weights of every layer a second time and holds [B, H, T, S] for each; "
            "they are alpha * softmax + beta and do not contain the output gate",
            WeightsNotice,
            stacklevel=2,
        )
    kwargs["affine_segments"], kwargs["affine_weights"] = segments, bool(weights)
    return args, kwargs


def _by_name(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    code = inspect.unwrap(type(module).forward).__code__
    return dict(zip(code.co_varnames[1 : code.co_argcount], args, strict=False))


def check_implementation(config: Any) -> None:
    """An attached model whose attention was switched away would run plain softmax without a word."""
    if config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f'attn_implementation must stay "{IMPLEMENTATION}" while a mechanism is attached, got '
            f'"{config._attn_implementation}", which would run plain softmax attention; call '
            "affine_attention.hf.detach(model) first"
        )


def register() -> None:
    """Makes the implementation known to transformers; both registers are needed, or padding would be ignored."""
    AttentionInterface.register(IMPLEMENTATION, affine_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, compact_mask)
