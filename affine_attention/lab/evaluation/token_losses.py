"""Computes the loss of every token of a few sequences, without the logits of all tokens in memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..distill.chunks import Head
from ..distill.lm_head import run_to_head
from .scoring import LOGITS_PER_CHUNK, evaluating

_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose head was checked, see run_to_head


@torch.no_grad()
def token_losses(model: Any, inputs: dict[str, Any], autocast: torch.dtype | None = None) -> Tensor:
    """-log p of each token but the first, [B, T - 1] in fp32 on the CPU; `inputs` are keywords of the model."""
    device = next(model.parameters()).device
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    with evaluating(model), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        found = run_to_head(model, given, _CHECKED)
    hidden_NM = found.hidden_BTM[:, :-1].flatten(0, 1).to(found.compute_dtype)
    targets_BT = given["input_ids"][:, 1:]
    rows = max(1, LOGITS_PER_CHUNK["cpu" if device.type == "cpu" else "cuda"] // found.head.vocabulary)
    losses = [
        torch.nn.functional.cross_entropy(_logits(hidden, found.head), targets, reduction="none").cpu()
        for hidden, targets in zip(hidden_NM.split(rows), targets_BT.flatten().split(rows), strict=True)
    ]
    return torch.cat(losses).view(targets_BT.shape)


def _logits(hidden_NM: Tensor, head: Head) -> Tensor:
    bias = None if head.bias is None else head.bias.to(hidden_NM.dtype)
    logits_NV = torch.nn.functional.linear(hidden_NM, head.weight.to(hidden_NM.dtype), bias)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return logits_NV if head.softcap is None else head.softcap * torch.tanh(logits_NV / head.softcap)
