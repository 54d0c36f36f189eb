"""Gives a transformers model a mechanism and takes it away again."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..nn import AttentionMechanism, Mechanism
from ..nn.mechanism import as_mechanism
from .classes import AffineModelMixin, affine_config_class, affine_model_class
from .families import PROJECTIONS, find_decoders, find_sites
from .interface import IMPLEMENTATION, SLOT, note_call, note_hidden
from .sequence import is_sequence_parallel

STARTS = ("fresh", "identity")
IDENTITY_ALPHA = 0.5  # of a projection of zeros, for both activations; an output gate of zeros is 0.5 too
ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def attach(model: ModelT, mechanism: Mechanism | str, start: str = "fresh") -> ModelT:
    """Gives every attention module of a model a mechanism, in place, and returns the model.

    >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
    >>> attach(model, "affine", start="identity")

    The model keeps its weights, its forward and its methods. Its class becomes `Affine...` (a subclass of what it was),
    so that `save_pretrained` and `from_pretrained` keep the mechanism.

    Args:
        model: a causal decoder of transformers whose attention goes through the library's attention interface.
        mechanism: a `Mechanism` or the name of a preset.
        start: "fresh" begins as the paper does, with random gates. "identity" leaves the outputs of a pretrained model
            exactly as they are while every gate can learn: gates of zero halve the output of attention, and the
            output projection is doubled for each of them; running_alpha starts at 0.5, so that beta is 0.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}; attach before a model is "
            "wrapped by PEFT, DDP or torch.compile"
        )
    mechanism = as_mechanism(mechanism)
    check_start(mechanism, start)
    if is_attached(model):
        name = model.config.affine_attention["mechanism"]["name"]
        raise ValueError(f"model already has a mechanism ({name!r}); call affine_attention.hf.detach(model) first")
    find_sites(model)  # every refusal comes before any change
    config = _own_config(model)
    before = config._attn_implementation
    config.affine_attention = {"mechanism": mechanism.to_dict(), "start": start}
    config.__class__ = affine_config_class(type(config))
    model.__class__ = affine_model_class(type(model))
    config._attn_implementation = IMPLEMENTATION
    install(model, mechanism, start)
    model._implementation_before = before
    return model


def detach(model: ModelT) -> ModelT:
    """Takes the mechanism away, in place, and returns the model: what `attach` found, bit for bit.

    Weights that were trained in between stay trained.
    """
    if not is_attached(model):
        raise ValueError(f"model must have a mechanism to detach, got a plain {type(model).__name__}")
    plain_class: Any = model.plain_class
    if type(model) is not affine_model_class(plain_class):
        raise ValueError(f"model must be detached from before it is sharded or wrapped, got {type(model).__name__}")
    if is_sequence_parallel(model):
        raise ValueError(
            "model is sequence-parallel; call remove() of the handle that sequence_parallel returned, then detach"
        )
    config: Any = model.config
    mechanism = Mechanism.from_dict(config.affine_attention["mechanism"])
    identity = config.affine_attention["start"] == "identity"
    for module in model.modules():
        _remove_hooks(module)
        if isinstance(getattr(module, SLOT, None), AttentionMechanism):
            delattr(module, SLOT)
            if identity:
                scale_out_proj(module, mechanism, undo=True)
    for name in ("affine_attention", "auto_map", "base_model_type", "base_model_tp_plan"):
        config.__dict__.pop(name, None)
    architectures = config.__dict__.get("architectures")
    if architectures:
        config.architectures = [name.removeprefix("Affine") for name in architectures]
    config.__class__ = config.plain_class
    model.__class__ = plain_class
    config._attn_implementation = model.__dict__.pop("_implementation_before", "sdpa")
    model.init_parallel_plans()
    return model


def _own_config(model: PreTrainedModel) -> Any:
    """Gives a model a configuration of its own: another model may have been built from the same object."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]
    return own


def is_attached(model: nn.Module) -> bool:
    return isinstance(model, AffineModelMixin)


def install(model: PreTrainedModel, mechanism: Mechanism, start: str) -> None:
    """Puts the modules and hooks of a mechanism into a model whose class and configuration are already set."""
    sites = find_sites(model)
    for site in sites:
        like: Any = site.out_proj.weight
        layer = AttentionMechanism(
            mechanism, site.embed_dim, site.num_heads, site.head_dim, device=like.device, dtype=like.dtype
        )
        if start == "identity":
            _start_as_identity(layer)
            scale_out_proj(site.module, mechanism)
        layer.train(site.module.training)
        setattr(site.module, SLOT, layer)
        site.module.register_forward_pre_hook(note_hidden, with_kwargs=True)
        if not like.is_meta:
            # Else the library's next sweep over "new" modules draws them anew.
            parts: list[Any] = [*layer.modules(), *layer.parameters(), *layer.buffers()]
            for part in parts:
                part._is_hf_initialized = True
    for decoder in find_decoders(model, sites):
        decoder.register_forward_pre_hook(note_call, with_kwargs=True)


def check_start(mechanism: Mechanism, start: str) -> None:
    if start not in STARTS:
        raise ValueError(f"start must be one of {', '.join(map(repr, STARTS))}, got {start!r}")
    if start == "identity" and mechanism.sink is not None:
        raise ValueError(
            f'start="identity" is not possible for {mechanism.name!r}: a sink takes weight from every key whatever its '
            'value; use start="fresh", with sink_start=-10 for a sink that begins nearly closed'
        )


@torch.no_grad()
def scale_out_proj(module: nn.Module, mechanism: Mechanism, undo: bool = False) -> None:
    """Makes up for gates of one half: a factor of 2 for alpha and 2 for the output gate, exact in every dtype."""
    factor = 2.0 ** (mechanism.has_alpha + mechanism.gate)
    out_proj = next(
        getattr(module, last) for first, last in PROJECTIONS if hasattr(module, first) and hasattr(module, last)
    )
    out_proj.weight.mul_(1 / factor if undo else factor)


@torch.no_grad()
def _start_as_identity(layer: AttentionMechanism) -> None:
    if layer.scale is not None:
        layer.scale.proj.weight.zero_()
        if layer.mechanism.bias:
            layer.scale.running_alpha.fill_(IDENTITY_ALPHA)
    if layer.gate_proj is not None:
        layer.gate_proj.weight.zero_()


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (note_call, note_hidden):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
