"""Attaches a mechanism to a transformers model, and detaches it again."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from ..nn import AttentionMechanism, Mechanism
from ..nn.attention import check_shared_values
from ..nn.mechanism import as_mechanism
from .classes import AffineModelMixin, affine_config_class, affine_model_class, mark_part, unmark_part
from .composite import decoder_config, own_configs
from .families import find_sites
from .installation import (
    check_identity,
    check_keywords,
    check_start,
    install,
    refuse_part,
    remove_hooks,
    scale_out_proj,
)
from .interface import IMPLEMENTATION, SLOT
from .sequence import is_sequence_parallel

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


class BiasLengthNotice(UserWarning):
    """A mechanism was attached whose N is longer than every sequence of the model."""


def attach(model: ModelT, mechanism: Mechanism | str, start: str = "fresh") -> ModelT:
    """Adds a mechanism to every attention module of a model, in place, and returns the model.

    >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
    >>> attach(model, "affine", start="identity")

    The model keeps its weights, its forward and its methods. Its class becomes an `Affine...` subclass, so that
    `save_pretrained` and `from_pretrained` keep the mechanism.

    Args:
        model: a causal decoder of transformers that uses the library's attention interface, or a multimodal model with
            such a text decoder: the decoder gets the mechanism, the other towers keep their attention.
        mechanism: a `Mechanism` or the name of a preset. Presets divide the bias by N = 2048, the paper's training
            length, whatever the lengths of the model: a configuration holds the longest context and not the length of
            your training sequences, which N should be: `Mechanism.named("affine", bias_length=4096)`. A
            `BiasLengthNotice` says so where the model cannot reach that length.
        start: "fresh" starts with random gates, as in the paper. "identity" keeps the outputs of a pretrained model
            exactly, while every gate can still learn: zero gate weights halve the attention output, so the output
            projection is doubled for each gate, and running_alpha starts at 0.5, which makes beta 0.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}; attach before a model is "
            "wrapped by PEFT, DDP or torch.compile"
        )
    by_name = isinstance(mechanism, str)
    mechanism = as_mechanism(mechanism)
    check_start(mechanism, start)
    if is_attached(model):
        name = model.config.affine_attention["mechanism"]["name"]
        raise ValueError(f"model already has a mechanism ({name!r}); call affine_attention.hf.detach(model) first")
    sites = find_sites(model)  # raise for unsupported models before changing anything
    check_keywords(sites)
    if start == "identity":
        check_identity(sites)
    if mechanism.differential:
        settings = decoder_config(model.config)
        check_shared_values(
            sites[0].num_heads, getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
        )
    own_configs(model)
    config: Any = model.config
    text = decoder_config(config)
    if by_name:
        _notice_bias_length(mechanism, text)
    before = (config._attn_implementation, text._attn_implementation)
    config.affine_attention = {"mechanism": mechanism.to_dict(), "start": start}
    config.__class__ = affine_config_class(type(config))
    model.__class__ = affine_model_class(type(model))
    mark_part(config)
    for part in (config, text):
        part._attn_implementation_internal = IMPLEMENTATION  # the property would set it in every part
    install(model, mechanism, start)
    model._implementations_before_attach = before  # type: ignore[assignment]
    return model


def detach(model: ModelT) -> ModelT:
    """Removes the mechanism, in place, and returns the model, bitwise equal to the model before `attach`.

    Training between `attach` and `detach` is kept.
    """
    if not is_attached(model):
        raise ValueError(f"model must have a mechanism to detach, got a plain {type(model).__name__}")
    plain_class: Any = model.plain_class
    if type(model) is not affine_model_class(plain_class):
        raise ValueError(f"model must be detached before it is sharded or wrapped, got {type(model).__name__}")
    if is_sequence_parallel(model):
        raise ValueError(
            "model is sequence-parallel; call remove() of the handle that sequence_parallel returned, then detach"
        )
    config: Any = model.config
    mechanism = Mechanism.from_dict(config.affine_attention["mechanism"])
    identity = config.affine_attention["start"] == "identity"
    scaled: set[int] = set()
    for module in model.modules():
        remove_hooks(module)
        if isinstance(getattr(module, SLOT, None), AttentionMechanism):
            delattr(module, SLOT)
            module.__dict__.pop("affine_carried", None)
            if identity:
                scale_out_proj(module, mechanism, scaled, undo=True)
    for key, hook in list(model._state_dict_pre_hooks.items()):
        if hook is refuse_part:
            del model._state_dict_pre_hooks[key]
    unmark_part(config)
    text = decoder_config(config)
    for name in ("affine_attention", "auto_map", "base_model_type"):
        config.__dict__.pop(name, None)
    for part in (config, text):
        part.__dict__.pop("base_model_tp_plan", None)
    architectures = config.__dict__.get("architectures")
    if architectures:
        config.architectures = [name.removeprefix("Affine") for name in architectures]
    config.__class__ = config.plain_class
    model.__class__ = plain_class
    before = model.__dict__.pop("_implementations_before_attach", ("sdpa", "sdpa"))
    config._attn_implementation_internal, text._attn_implementation_internal = before
    model.init_parallel_plans()
    return model


def is_attached(model: nn.Module) -> bool:
    return isinstance(model, AffineModelMixin)


def _notice_bias_length(mechanism: Mechanism, config: Any) -> None:
    """Warns where the N of a preset is longer than the sequences that a model can have."""
    longest, length = getattr(config, "max_position_embeddings", None), mechanism.bias_length
    if mechanism.bias and isinstance(length, int) and isinstance(longest, int) and 0 < longest < length:
        warnings.warn(
            f"the bias of {mechanism.name!r} is divided by N = {length}, and the sequences of this model have at most "
            f"{longest} tokens; for another N: Mechanism.named({mechanism.name!r}, bias_length={longest})",
            BiasLengthNotice,
            stacklevel=3,
        )
