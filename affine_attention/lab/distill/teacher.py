"""Turns a folder or a hub name into a frozen teacher, and checks that it speaks of the student's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ... import hf  # noqa: F401  (importing it lets transformers load models with a mechanism)

PROBE = "Alice's 3 cats\n\tdidn't see “über-naïve” code: x_i += 1;  日本語 🙂"


def load_teacher(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> Any:
    """A model that is only read: evaluation mode, no gradients, every weight from the checkpoint.

    Args:
        source: a folder that `save_pretrained` wrote, the folder of a finished run, or a name on the hub.
        device, dtype: where it lives and in what it computes.
        trust_remote_code: True runs code that the checkpoint brings along; without it such a checkpoint is refused.
        attn_implementation: as in transformers; its own choice by default.

    Weights are read from safetensors alone: a pickle can run anything.
    """
    path = model_folder(source)
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True, **chosen
    )
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers fills them with random numbers and a warning: a teacher of noise.
        raise ValueError(
            f"teacher {str(source)!r} has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; is it a complete causal language model?"
        )
    return model.to(device).eval().requires_grad_(False)


def load_teacher_tokenizer(source: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a teacher; None where its folder has none."""
    path = model_folder(source)
    if Path(path).is_dir() and not any((Path(path) / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def model_folder(source: str | Path) -> str:
    """The folder of a model (that of a run has it in model/), or the name on the hub as it is."""
    path = Path(source)
    if not path.is_dir():
        if path.is_file():
            raise ValueError(f"teacher must be a folder or a name on the hub, got the file {str(source)!r}")
        if path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2:
            raise FileNotFoundError(f"teacher {str(source)!r} is not there: no such folder")
        return str(source)
    if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
        path = path / "model"
    if not (path / "config.json").is_file():
        raise ValueError(
            f"teacher {str(source)!r} has no config.json; name a folder that save_pretrained wrote, or that of a "
            "finished run"
        )
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        reason = f"only {', '.join(pickles)}, which can run code when read" if pickles else "no weights at all"
        raise ValueError(
            f"teacher {str(source)!r} has no .safetensors file, {reason}; save it with save_pretrained, where you "
            "trust it"
        )
    return str(path)


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
