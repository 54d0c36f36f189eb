"""Runs a transformers model up to its head: inputs -> the hidden states that the head would get, and the head.

The model's own forward runs, through whatever wraps it (DDP, FSDP2, autocast, compiled regions), with one change: for
the time of the call its head hands on its input. Their hooks therefore see a forward whose output carries the gradient.
A factor that a family puts on its logits (cohere, granite, ..) lands on the hidden states, which is the same. A soft
cap (gemma 2, nanochat, ..) is taken out and left to the loss. Anything else is refused by name.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import Head

SOFTCAP = "final_logit_softcapping"
TEACHER_HIDDEN = "teacher_hidden"  # of a batch: what a teacher that was run before gave to its head
NOT_GIVEN = ("labels", "num_items_in_batch", TEACHER_HIDDEN)  # of a batch, to a model
TOLERANCE = 0.02  # of a head's input that is scaled in bf16


@dataclass(frozen=True)
class Headless:
    """What a model gives to its head, and in which dtype the head would have multiplied it."""

    hidden_BTM: Tensor
    head: Head
    compute_dtype: torch.dtype


@dataclass
class _Kept:
    hidden: list[Tensor] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)


def run_headless(model: Any, inputs: Mapping[str, Any], checked: weakref.WeakSet[nn.Module]) -> Headless:
    """Runs `model` on `inputs` (without labels) up to its head. `checked` holds the models that were seen to fit."""
    inner = unwrapped(model)
    linear = _head_of(inner)
    given = {name: x for name, x in inputs.items() if name not in NOT_GIVEN}
    with _head_hands_on(inner, linear, keep=inner not in checked) as kept:
        hidden = model(**given, use_cache=False).logits
    if len(kept.dtypes) != 1:
        raise _refusal(inner, f"its head ran {len(kept.dtypes)} times in a forward, not once")
    if inner not in checked:
        _check_is_linear(inner, hidden, kept.hidden[0])
        checked.add(inner)
    return Headless(hidden, head_of(inner), kept.dtypes[0])


def head_of(model: Any) -> Head:
    """What makes a model's logits of the hidden states that `run_headless` gives."""
    inner = unwrapped(model)
    linear = _head_of(inner)
    return Head(whole(linear.weight), whole(linear.bias), getattr(_text_config(inner), SOFTCAP, None))


def unwrapped(model: Any) -> Any:
    """The transformers model inside DDP and torch.compile."""
    while True:
        for name in ("module", "_orig_mod"):
            inside = getattr(model, name, None)
            if isinstance(inside, nn.Module):
                model = inside
                break
        else:
            return model


def whole(weight: Any) -> Any:
    """A weight that FSDP2 has sharded, gathered; its gradient is averaged over the ranks, as FSDP2 does."""
    if not torch.distributed.is_available():
        return weight
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    if "tp" in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the head is split by tensor parallelism (mesh {mesh.mesh_dim_names}); leave the head out of it"
        )
    full = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        ranks = mesh.size()
        full.register_hook(lambda grad: grad / ranks)
    return full


@contextlib.contextmanager
def _head_hands_on(inner: Any, linear: Any, keep: bool) -> Iterator[_Kept]:
    """For the time of the context the head returns its input, and no soft cap follows it."""
    kept = _Kept()

    def forward(hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        kept.dtypes.append(dtype)
        if keep:
            kept.hidden.append(hidden.detach())
        return hidden.to(dtype, copy=True)  # FSDP2 warns of an output that is a view, which a slice of all tokens is

    config = _text_config(inner)
    softcap = getattr(config, SOFTCAP, None)
    before = vars(linear).get("forward")
    linear.forward = forward
    if softcap is not None:
        setattr(config, SOFTCAP, None)
    try:
        yield kept
    finally:
        if before is None:
            del linear.forward
        else:
            linear.forward = before
        if softcap is not None:
            setattr(config, SOFTCAP, softcap)


def _head_of(inner: Any) -> Any:
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or not head.weight.dtype.is_floating_point:
        raise _refusal(inner, f"its head is {type(head).__name__}, not a plain Linear")
    return head


def _check_is_linear(inner: Any, after: Tensor, before: Tensor) -> None:
    """What comes out must be what the head was given, up to a factor; looked at once for each model."""
    with torch.no_grad():
        if after.shape == before.shape:
            a, b = after.detach().double(), before.double()
            factor = (a * b).sum() / (b * b).sum()
            if not bool((a - factor * b).abs().max() > TOLERANCE * a.abs().max()):
                return
    raise _refusal(inner, "it changes its logits after the head by more than a factor or a final_logit_softcapping")


def _text_config(inner: Any) -> Any:
    return inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config


def _refusal(inner: Any, reason: str) -> ValueError:
    kind = getattr(getattr(inner, "config", None), "model_type", "unknown")
    return ValueError(f"{type(inner).__name__} (model_type={kind!r}) cannot be used with the chunked loss: {reason}")
