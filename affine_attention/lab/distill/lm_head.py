"""Runs a transformers model up to its LM head: inputs -> the input of the head, and the head itself.

The model's own forward runs, including all wrappers (DDP, FSDP2, autocast, compiled regions), with one change: during
the call, the head returns its input. The hooks of the wrappers therefore see an output that carries the gradient. A
factor that a model family applies to its logits (cohere, granite, ..) is applied to the hidden states instead, which is
equivalent. A soft cap (gemma 2, nanochat, ..) is disabled here and applied in the loss. A model that does anything else
with its logits raises ValueError.
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
TEACHER_HIDDEN = "teacher_hidden"  # key of a batch: cached hidden states of the teacher (teacher_cache.py)
STUDENT_MASK = "student_attention_mask"  # key of a batch: attention_mask of the student alone
# Keys of a batch that no model takes.
NOT_MODEL_INPUTS = ("labels", "shift_labels", "num_items_in_batch", TEACHER_HIDDEN, STUDENT_MASK)
TOLERANCE = 0.02  # relative; the hidden states may be scaled in bf16


@dataclass(frozen=True)
class HeadInput:
    """The input of an LM head, the head, and the dtype in which the model would have computed the logits."""

    hidden_BTM: Tensor
    head: Head
    compute_dtype: torch.dtype


@dataclass
class _Recorded:
    hidden: list[Tensor] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)


def run_to_head(model: Any, inputs: Mapping[str, Any], checked: weakref.WeakSet[nn.Module]) -> HeadInput:
    """Runs `model` on `inputs` (without labels) up to its head. `checked` holds the models that passed the check."""
    inner = unwrapped(model)
    linear = _head_of(inner)
    given = {name: x for name, x in inputs.items() if name not in NOT_MODEL_INPUTS}
    with _head_returns_input(inner, linear, keep=inner not in checked) as kept:
        hidden = model(**given, use_cache=False).logits
    if len(kept.dtypes) != 1:
        raise _refusal(inner, f"its head ran {len(kept.dtypes)} times in a forward, not once")
    if inner not in checked:
        _check_is_linear(inner, hidden, kept.hidden[0])
        checked.add(inner)
    return HeadInput(hidden, head_of(inner), kept.dtypes[0])


def head_of(model: Any) -> Head:
    """The LM head of a model, for the hidden states that `run_to_head` returns."""
    inner = unwrapped(model)
    linear = _head_of(inner)
    return Head(gathered(linear.weight), gathered(linear.bias), getattr(_text_config(inner), SOFTCAP, None))


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


def gathered(weight: Any) -> Any:
    """The full weight of an FSDP2 shard; its gradient is averaged over the ranks, as FSDP2 does."""
    if not torch.distributed.is_available():
        return weight
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    if "tp" in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"the head is split by tensor parallelism (mesh {mesh.mesh_dim_names}); exclude the head from the "
            "tensor-parallel plan"
        )
    full = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        ranks = mesh.size()
        full.register_hook(lambda grad: grad / ranks)
    return full


@contextlib.contextmanager
def _head_returns_input(inner: Any, linear: Any, keep: bool) -> Iterator[_Recorded]:
    """Inside the context, the head returns its input and no soft cap is applied."""
    kept = _Recorded()

    def forward(hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        kept.dtypes.append(dtype)
        if keep:
            kept.hidden.append(hidden.detach())
        return hidden.to(dtype, copy=True)  # a copy: FSDP2 warns about outputs that are views

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
    """The output must equal the head's input up to a constant factor; checked once per model."""
    with torch.no_grad():
        if after.shape == before.shape:
            a, b = after.detach().double(), before.double()
            factor = (a * b).sum() / (b * b).sum()
            if not bool((a - factor * b).abs().max() > TOLERANCE * a.abs().max()):
                return
    raise _refusal(inner, "it changes the logits by more than a constant factor or a final_logit_softcapping")


def _text_config(inner: Any) -> Any:
    return inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config


def _refusal(inner: Any, reason: str) -> ValueError:
    kind = getattr(getattr(inner, "config", None), "model_type", "unknown")
    return ValueError(f"{type(inner).__name__} (model_type={kind!r}) cannot be used with the chunked loss: {reason}")
