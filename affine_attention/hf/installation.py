"""Adds the modules and hooks of a mechanism to a model, and initialises the weights that a checkpoint does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

from ..nn import AttentionMechanism, Mechanism
from .families import INNER_NORMS, PROJECTIONS, Site, drops_keywords, find_decoders, find_sites
from .interface import SLOT, carry_keywords, note_call, note_hidden, take_keywords

STARTS = ("fresh", "identity")
IDENTITY_ALPHA = 0.5  # alpha for a zero projection, with both activations; a zero output gate is 0.5 as well
TEXT_PARTS = ("language_model", "text_model", "text_decoder", "llm", "thinker")  # attributes of multimodal models


def check_start(mechanism: Mechanism, start: str) -> None:
    if start not in STARTS:
        raise ValueError(f"start must be one of {', '.join(map(repr, STARTS))}, got {start!r}")
    if start == "identity" and mechanism.sink is not None:
        raise ValueError(
            f'start="identity" does not work for {mechanism.name!r}: a sink reduces the weight of every key, whatever '
            'its value; use start="fresh", with sink_start=-10 for a sink that starts nearly closed'
        )


def check_identity(sites: list[Site]) -> None:
    """Raises where a norm between the gates and the output projection removes the factor of a gate."""
    for site in sites:
        for name in INNER_NORMS:
            if hasattr(site.module, name):
                raise ValueError(
                    f'start="identity" does not work for {type(site.module).__name__}: {site.name}.{name} normalises '
                    'the output of attention before it is projected; use start="fresh"'
                )


def install(model: PreTrainedModel, mechanism: Mechanism, start: str) -> None:
    """Adds the modules and hooks of a mechanism to a model whose class and configuration are already set."""
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
        around = model.get_submodule(site.name.rpartition(".")[0])
        if not isinstance(around, PreTrainedModel) and drops_keywords(around):
            site.module.affine_carried = {}  # type: ignore[assignment]
            around.register_forward_pre_hook(carry_keywords, with_kwargs=True)
            site.module.register_forward_pre_hook(take_keywords, with_kwargs=True)
        site.module.register_forward_pre_hook(note_hidden, with_kwargs=True)
        if not like.is_meta:
            # Without this mark, transformers initialises the new modules again in `init_weights`.
            parts: list[Any] = [*layer.modules(), *layer.parameters(), *layer.buffers()]
            for part in parts:
                part._is_hf_initialized = True
    for decoder in find_decoders(model, sites):
        decoder.register_forward_pre_hook(note_call, with_kwargs=True)
    model.register_state_dict_pre_hook(refuse_part)


def refuse_part(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Before a state dict is made: raises where the model is a part of a multimodal one, which would load as plain."""
    name = prefix.rstrip(".")
    if name.rpartition(".")[2] in TEXT_PARTS:
        raise ValueError(
            f"{name} has a mechanism and the multimodal model around it does not know: its checkpoint would load as "
            "plain softmax attention; detach the part and call affine_attention.hf.attach for the whole model, or save "
            "the part with its own save_pretrained"
        )


def remove_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (note_call, note_hidden, carry_keywords, take_keywords):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


@torch.no_grad()
def scale_out_proj(module: nn.Module, mechanism: Mechanism, undo: bool = False) -> None:
    """Compensates gates of 0.5: multiplies the output projection by 2 for alpha and by 2 for the output gate.

    Powers of 2 are exact in every dtype.
    """
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


@torch.no_grad()
def initialise_missing(module: nn.Module, layer: AttentionMechanism, start: str) -> None:
    """Initialises the tensors of one layer that were not loaded; transformers marks those that were."""
    scale = layer.scale
    parameters = list(layer.parameters())
    loaded = [getattr(p, "_is_hf_initialized", False) for p in parameters]
    if scale is not None and scale.mechanism.bias:
        has_average = getattr(scale.running_alpha, "_is_hf_initialized", False)
        if not has_average and getattr(scale.proj.weight, "_is_hf_initialized", False):
            raise ValueError(
                f"the checkpoint has the weights of {type(module).__name__}.{SLOT} but not its scale.running_alpha; "
                "add the missing tensor, or set it to a start value explicitly"
            )
        begin = IDENTITY_ALPHA if start == "identity" else scale.mechanism.running_alpha_start
        initialization.constant_(scale.running_alpha, begin)
        # Checkpoints never hold this buffer, and loading turns its requires_grad off.
        scale.collected = torch.zeros_like(scale.collected, device=scale.running_alpha.device, requires_grad=True)
    for proj in (None if scale is None else scale.proj, layer.gate_proj):
        if proj is not None:
            std = 0.0 if start == "identity" else layer.mechanism.init_std
            initialization.normal_(proj.weight, mean=0.0, std=std)
    if layer.sink is not None:
        learned = layer.mechanism.sink == "learned"
        initialization.constant_(layer.sink, layer.mechanism.sink_start if learned else 0.0)
    if start == "identity" and parameters and not any(loaded):
        scale_out_proj(module, layer.mechanism)  # the checkpoint is that of a plain model
