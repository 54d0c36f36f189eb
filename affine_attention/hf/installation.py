"""Adds the modules and hooks of a mechanism to a model, and initialises the weights that a checkpoint does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, initialization

from ..nn import AttentionMechanism, Mechanism
from .families import INNER_NORMS, PROJECTIONS, Site, drops_keywords, find_decoders, find_sites
from .interface import SLOT, carry_keywords, note_call, note_hidden, take_keywords

STARTS = ("fresh", "identity")
TEXT_PARTS = ("language_model", "text_model", "text_decoder", "llm", "thinker")  # attributes of multimodal models


def check_start(mechanism: Mechanism, start: str) -> None:
    if start not in STARTS:
        raise ValueError(f"start must be one of {', '.join(map(repr, STARTS))}, got {start!r}")
    if start != "identity" or mechanism.identity_scale is not None:
        return
    if mechanism.sink is not None:
        raise ValueError(
            f'start="identity" does not work for {mechanism.name!r}: a sink reduces the weight of every key, whatever '
            'its value; use start="fresh", with sink_start=-10 for a sink that starts nearly closed'
        )
    for name in ("weights", "differential", "head_norm", "exclusion"):
        if getattr(mechanism, name) not in (None, False, "softmax", "learned"):
            part = f"{name}={getattr(mechanism, name)!r}"
            hint = ', or exclusion="learned", which starts at 0' if name == "exclusion" else ""
            raise ValueError(
                f'start="identity" does not work for {mechanism.name!r}: {part} changes the outputs at the start; '
                f'use start="fresh"{hint}'
            )
    if mechanism.alpha_rule is not None and mechanism.alpha_rule.scores == "constant":
        raise ValueError(
            f'start="identity" does not work for {mechanism.name!r}: an alpha that is always '
            f'{mechanism.initial_alpha:g} changes the outputs; use start="fresh", or alpha_start=1'
        )
    raise ValueError(
        f'start="identity" does not work for {mechanism.name!r}: its alpha starts at {mechanism.initial_alpha:g}, and '
        "the output projection can undo powers of 2 only without rounding; use "
        'start="fresh", or an activation and alpha_start with such a start ("double_sigmoid" starts at 1)'
    )


def check_identity(sites: list[Site]) -> None:
    """Raises where a factor of the output projection cannot compensate the gates."""
    for site in sites:
        weight: Any = site.out_proj.weight
        if type(weight) not in (nn.Parameter, Tensor, DTensor):
            raise ValueError(
                f'start="identity" does not work for {type(site.module).__name__}: it scales output projections, and '
                f'{site.name} has one in a format of its own ({type(weight).__name__}); use start="fresh", or attach '
                "before the weights are quantised"
            )
        for name in INNER_NORMS:
            if hasattr(site.module, name):
                raise ValueError(
                    f'start="identity" does not work for {type(site.module).__name__}: {site.name}.{name} normalises '
                    'the output of attention before it is projected; use start="fresh"'
                )


def check_keywords(sites: list[Site]) -> None:
    """Raises where an attention module would not tell the attention function which documents are packed."""
    for site in sites:
        if drops_keywords(site.module):
            raise ValueError(
                f"{site.name} must pass its keyword arguments on to the attention function, got "
                f"{type(site.module).__name__}, which drops them; a mechanism would not know which documents are packed"
            )


def install(model: PreTrainedModel, mechanism: Mechanism, start: str) -> None:
    """Adds the modules and hooks of a mechanism to a model whose class and configuration are already set."""
    sites = find_sites(model)
    scaled: set[int] = set()
    for site in sites:
        like: Any = site.out_proj.weight
        # Quantised weights may be bytes; the mechanism has the dtype in which the model computes.
        dtype = like.dtype if like.dtype.is_floating_point else model.dtype
        layer = AttentionMechanism(
            mechanism, site.embed_dim, site.num_heads, site.head_dim, device=like.device, dtype=dtype
        )
        if start == "identity":
            with torch.no_grad():
                for each in layer.starts(identity=True):
                    each.fill()
            scale_out_proj(site.module, mechanism, scaled)
        layer.train(site.module.training)
        setattr(site.module, SLOT, layer)
        around = model.get_submodule(site.name.rpartition(".")[0])
        if not isinstance(around, PreTrainedModel) and drops_keywords(around):
            site.module.affine_carried = {}  # type: ignore[assignment]
            around.register_forward_pre_hook(carry_keywords, with_kwargs=True)
            site.module.register_forward_pre_hook(take_keywords, with_kwargs=True)
        if not layer.is_plain:  # plain softmax attention does not need the input of q_proj
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


def identity_factor(mechanism: Mechanism) -> float:
    """The factor of the output projections under start="identity": 2 for each gate that starts at 0.5, and so on."""
    scale = mechanism.identity_scale
    assert scale is not None, "check_start refuses the others"
    return 1 / scale


@torch.no_grad()
def scale_out_proj(module: nn.Module, mechanism: Mechanism, scaled: set[int], undo: bool = False) -> None:
    """Compensates what zero gates do to the output: multiplies the output projection by 2 for alpha = 0.5, and so on.

    Powers of 2 are exact in every dtype. `scaled` holds the ids of the weights that the caller has scaled already:
    layers may share one (zamba).
    """
    factor = identity_factor(mechanism)
    out_proj = next(
        getattr(module, last) for first, last in PROJECTIONS if hasattr(module, first) and hasattr(module, last)
    )
    if id(out_proj.weight) not in scaled:
        scaled.add(id(out_proj.weight))
        out_proj.weight.mul_(1 / factor if undo else factor)


@torch.no_grad()
def initialise_missing(module: nn.Module, layer: AttentionMechanism, start: str, scaled: set[int]) -> None:
    """Initialises the tensors of one layer that were not loaded; transformers marks those that were."""
    scale = layer.scale
    parameters = list(layer.parameters())
    loaded = [getattr(p, "_is_hf_initialized", False) for p in parameters]
    if scale is not None and scale.mechanism.has_running_alpha:
        has_average = getattr(scale.running_alpha, "_is_hf_initialized", False)
        has_weight = any(getattr(p, "_is_hf_initialized", False) for p in scale.parameters())
        if not has_average and has_weight:
            raise ValueError(
                f"the checkpoint has the weights of {type(module).__name__}.{SLOT} but not its scale.running_alpha; "
                "add the missing tensor, or set it to a start value explicitly"
            )
        # Checkpoints never hold this buffer, and loading turns its requires_grad off.
        scale.collected = torch.zeros_like(scale.collected, device=scale.running_alpha.device, requires_grad=True)
    for each in layer.starts(identity=start == "identity"):
        # These functions leave tensors alone that were loaded.
        if each.std:
            initialization.normal_(each.tensor, mean=each.mean, std=each.std)
        else:
            initialization.constant_(each.tensor, each.mean)
    if start == "identity" and parameters and not any(loaded):
        scale_out_proj(module, layer.mechanism, scaled)  # the checkpoint is that of a plain model
