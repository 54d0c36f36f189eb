"""Finds and loads the model and tokenizer of a run folder or a checkpoint folder, for evaluation and inspection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..hf import detach, is_attached
from ..hf.loading import load_model, load_tokenizer_of
from ..nn import AttentionMechanism
from .device import choose_device
from .run import RunFolder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def find_model(path: str | Path) -> tuple[Path, RunFolder | None]:
    """(checkpoint folder, run it belongs to); the run is None for a folder that `save_pretrained` wrote."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give a run, a folder of save_pretrained, or a loaded model")
    run = None if (path / "config.json").is_file() else RunFolder(path)
    folder = path if run is None else run.model
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} holds no finished model: it has neither config.json nor model/config.json; "
            "let `affine train` finish"
        )
    return folder, run


def load(
    folder: Path, tokenizer: Any = None, *, device: torch.device | str | None = None, dtype: Any = None
) -> tuple[Any, Any]:
    """(model on its device, tokenizer or None). Code in the folder is never run and pickles are never read.

    Args:
        folder: a checkpoint folder, see `find_model`.
        tokenizer: a tokenizer to use; None loads the one in the folder, if there is one.
        device: None uses a GPU if there is one.
        dtype: of the weights; None: as saved.
    """
    model = load_model(folder, dtype=parse_dtype("dtype", dtype) or "auto").to(choose_device(device))
    return model, load_tokenizer_of(folder) if tokenizer is None else tokenizer


def without_plain_mechanism(model: Any) -> Any:
    """The model, detached in place if its mechanism is plain softmax attention: another one can then be attached.

    The baselines of this package are such models: they have the mechanism "softmax", which changes nothing.
    """
    if not is_attached(model):
        return model
    layers = [module for module in model.modules() if isinstance(module, AttentionMechanism)]
    return detach(model) if all(layer.is_plain for layer in layers) else model


def parse_dtype(argument: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from its name."""
    if value is None or isinstance(value, torch.dtype):
        return value
    if value not in DTYPES:
        raise ValueError(f"{argument} must be one of {', '.join(DTYPES)}, got {value!r}")
    return DTYPES[value]
