"""Measures a trained model: its losses, the weight on the first token, value and hidden-state norms, alpha and gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from affine_attention import attention_weights
from affine_attention.lab.inspection.capture import AttentionCall, watch

from .model import Transformer, token_losses
from .task import Task

SINK_SHARE = 0.3  # a head is a sink if its mean weight on the first token exceeds this (Gu et al., arXiv 2410.10781)


@torch.no_grad()
def attention_map(model: Transformer, tokens: Tensor) -> dict[str, Any]:
    """The weights of one sequence [1, T] in every layer, [T][T], and alpha [T] where the mechanism has one."""
    maps: list[dict[str, Any]] = []

    def observe(call: AttentionCall) -> None:
        alpha = None if call.alpha is None else call.alpha[0, 0].tolist()
        maps.append({"weights": _weights(call)[0].tolist(), "alpha": alpha})

    with watch(model, observe):
        model(tokens)
    return {"tokens": tokens[0].tolist(), "layers": maps}


@torch.no_grad()
def measure(model: Transformer, task: Task, tokens: Tensor) -> dict[str, Any]:
    """Every number of one model on sequences [N, T + 1].

    Means are over sequences and positions 1 to T - 1: position 0 is <s> itself, which sees no other key. A "bigram"
    query is a token that is no trigger; the query of a "backcopy" label is a trigger.
    """
    model.eval()
    inputs = tokens[:, :-1]
    trigger = task.is_trigger(inputs)[:, 1:]
    best = task.best_loss(tokens)[:, 1:]
    hidden_states: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, given, out: hidden_states.append(out)) for block in model.blocks
    ]
    layers: list[dict[str, Any]] = []
    try:
        with watch(model, lambda call: layers.append(_measure_layer(call, trigger))):
            losses = token_losses(model, tokens)[:, 1:]
    finally:
        for hook in hooks:
            hook.remove()
    for layer, hidden in zip(layers, hidden_states, strict=True):
        layer |= _measure_hidden(hidden)
    # The first key hidden from every query: what is lost if <s> leaves the cache.
    mask = torch.ones_like(inputs, dtype=torch.bool)
    mask[:, 0] = False
    evicted = token_losses(model, tokens, mask)[:, 1:]
    model.train()
    return {
        "loss_excess": (losses - best).mean().item(),
        "loss_bigram_excess": (losses - best)[~trigger].mean().item(),
        "loss_backcopy": losses[trigger].mean().item(),
        "loss_bigram_excess_evicted": (evicted - best)[~trigger].mean().item(),
        "loss_backcopy_evicted": evicted[trigger].mean().item(),
        "sink_rate": _share_of_sinks(layers, "first_weight"),
        "sink_rate_softmax_part": _share_of_sinks(layers, "first_softmax"),
        "layers": layers,
    }


def _share_of_sinks(layers: list[dict[str, Any]], name: str) -> float:
    return sum(layer[name] > SINK_SHARE for layer in layers) / len(layers)


def _measure_layer(call: AttentionCall, trigger: Tensor) -> dict[str, Any]:
    """The numbers of one layer with one head; `trigger` [N, T - 1] starts at position 1."""
    weights = _weights(call)[:, 1:]
    # The softmax over the keys alone: without alpha, beta and the sink's share.
    part = attention_weights(call.query, call.key, is_causal=True, softmax_scale=call.softmax_scale)[:, 0, 1:]
    previous = weights.diagonal(0, 1, 2)  # row i is query i + 1, whose previous token is key i
    norms = call.value[:, 0].norm(dim=-1)
    found = {
        **_by_query("first_weight", weights[..., 0], trigger),
        **_by_query("first_softmax", part[..., 0], trigger),
        **_by_query("previous_weight", previous, trigger),
        **_by_query("row_sum", weights.sum(-1), trigger),
        "value_norm_first": (norms[:, 0].mean() / norms[:, 1:].mean()).item(),
    }
    if call.alpha is not None:
        found |= _by_query("alpha", call.alpha[:, 0, 1:], trigger) | {"alpha_std": call.alpha[:, 0, 1:].std().item()}
    if call.gate is not None:
        found |= _by_query("gate", call.gate[:, 0, 1:].mean(-1), trigger)
    return found


def _weights(call: AttentionCall) -> Tensor:
    """alpha p + beta [N, T, T], with the sink in the denominator of p."""
    return attention_weights(
        call.query, call.key, alpha=call.alpha, beta=call.beta, sink=call.sink, is_causal=True,
        softmax_scale=call.softmax_scale,
    )[:, 0]  # fmt: skip


def _by_query(name: str, values: Tensor, trigger: Tensor) -> dict[str, float]:
    return {
        name: values.mean().item(),
        f"{name}_bigram": values[~trigger].mean().item(),
        f"{name}_backcopy": values[trigger].mean().item(),
    }


def _measure_hidden(hidden: Tensor) -> dict[str, float]:
    """The residual stream after a layer: its largest entry, and the norm of <s> relative to the other tokens."""
    norms = hidden.norm(dim=-1)
    return {
        "largest_activation": hidden.abs().max().item(),
        "median_activation": hidden.abs().median().item(),
        "hidden_norm_first": (norms[:, 0].mean() / norms[:, 1:].mean()).item(),
    }
