"""Loads a frozen teacher from a folder or the hub, and checks that it has the same tokens as the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...hf.loading import load_model, load_tokenizer_of

PROBE = "Alice's 3 cats\n\tdidn't see “über-naïve” code: x_i += 1;  日本語 🙂"


def load_teacher(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> Any:
    """A model in evaluation mode without gradients, with every weight loaded from the checkpoint.

    Args:
        source: a folder that `save_pretrained` wrote, the folder of a finished run, or a name on the hub.
        device, dtype: of the weights.
        attn_implementation: as in transformers; by default transformers chooses.

    Code in the checkpoint is never run and pickles are never read (hf/loading.py).
    """
    model = load_model(source, "teacher", dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device).eval().requires_grad_(False)


def load_teacher_tokenizer(source: str | Path) -> Any:
    """The tokenizer in the teacher's folder; None if there is none."""
    return load_tokenizer_of(source, "teacher")


def check_same_tokens(tokenizer: Any, teacher_tokenizer: Any, first: str = "student", second: str = "teacher") -> None:
    """Raises unless both map the same token to the same id: the loss compares the two distributions by token id.

    `first` and `second` name the owners of the tokenizers in the message.
    """
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    sizes = f"the {first}'s tokenizer has {len(ours)} tokens, the {second}'s {len(theirs)}"
    way_out = f"use the {second}'s tokenizer (tokenizer={second.upper()}), or another {second}"
    other = [(token, number) for token, number in ours.items() if theirs.get(token) != number]
    if other:
        token, number = min(other, key=lambda pair: pair[1])
        raise ValueError(
            f"{sizes}, and {len(other)} of the {first}'s tokens have another id: {token!r} is {number} for the {first} "
            f"and {theirs.get(token, 'missing')} for the {second}; {way_out}"
        )
    if _encode(tokenizer) != _encode(teacher_tokenizer):
        raise ValueError(f"{sizes} with the same ids, but they split text differently; {way_out}")


def _encode(tokenizer: Any) -> list[int]:
    return tokenizer(PROBE, add_special_tokens=False)["input_ids"]
