"""Turns a folder or a hub name into a frozen teacher, and checks that it speaks of the student's tokens."""

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
    """A model that is only read: evaluation mode, no gradients, every weight from the checkpoint.

    Args:
        source: a folder that `save_pretrained` wrote, the folder of a finished run, or a name on the hub.
        device, dtype: where it lives and in what it computes.
        attn_implementation: as in transformers; its own choice by default.

    Code of the checkpoint is never run and pickles are never read (hf/loading.py).
    """
    model = load_model(source, "teacher", dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device).eval().requires_grad_(False)


def load_teacher_tokenizer(source: str | Path) -> Any:
    """The tokenizer beside a teacher; None where its folder has none."""
    return load_tokenizer_of(source, "teacher")


def check_same_tokens(tokenizer: Any, teacher_tokenizer: Any) -> None:
    """Raises unless both mean the same token by the same number: the teacher's probabilities are compared by number."""
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    sizes = f"the student's tokenizer has {len(ours)} tokens, the teacher's {len(theirs)}"
    way_out = "train the student with the teacher's tokenizer (tokenizer=TEACHER), or take another teacher"
    other = [(token, number) for token, number in ours.items() if theirs.get(token) != number]
    if other:
        token, number = min(other, key=lambda pair: pair[1])
        raise ValueError(
            f"{sizes}, and {len(other)} of the student's mean something else: {token!r} is {number} for the student "
            f"and {theirs.get(token, 'nothing')} for the teacher; {way_out}"
        )
    if _encode(tokenizer) != _encode(teacher_tokenizer):
        raise ValueError(f"{sizes} with the same numbers, but they split text differently; {way_out}")


def _encode(tokenizer: Any) -> list[int]:
    return tokenizer(PROBE, add_special_tokens=False)["input_ids"]
