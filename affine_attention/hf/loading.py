"""Loads a model, its configuration or its tokenizer from a folder or a hub name, without running code of the folder.

This is the only loader of the package. It never runs Python code from a checkpoint and never prompts for permission to
do so. It reads weights from safetensors only, because unpickling can run any code. It does not load the base model of
an adapter, and it raises for missing weights instead of initialising them. Every damaged file gives a ValueError of one
sentence that names the file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..files import read_table
from ..visible import visible

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
LAYER_KEYS, MOST_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 1000
LONGEST_REASON = 300  # characters of a library's error message
_logger = logging.getLogger(__name__)


def model_folder(source: str | Path, what: str = "model", weights: bool = True) -> str:
    """Returns the folder of a model (for a run, its subfolder model/), or a hub name unchanged.

    Args:
        source: a folder written by `save_pretrained`, the folder of a finished run, or a name on the hub.
        what: the name of the argument in error messages.
        weights: False if only the configuration or the tokenizer is needed.
    """
    if not str(source).strip():
        raise ValueError(f"{what} must be a folder or a name on the hub, got an empty name")
    path = Path(source)
    if not path.is_dir():
        if path.is_file():
            raise ValueError(f"{what} must be a folder or a name on the hub, got the file {str(source)!r}")
        if path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2:
            raise FileNotFoundError(f"{what} {str(source)!r} does not exist: no such folder")
        return str(source)
    if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
        path = path / "model"
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{what} {str(source)!r} has no config.json; pass a folder written by save_pretrained, or the folder of "
            "a finished run"
        )
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{what} {str(source)!r} is a PEFT adapter, which needs another model; merge it into its base model "
            "(merge_and_unload) and save the result"
        )
    if weights and not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
        reason = f"only {', '.join(pickles[:3])}, which can run code on loading" if pickles else "no weights at all"
        raise ValueError(
            f"{what} {str(source)!r} has no .safetensors file, {reason}; if you trust the folder, load it and save it "
            "with save_pretrained"
        )
    return str(path)


def load_model(
    source: str | Path,
    what: str = "model",
    *,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
) -> Any:
    """Loads a causal language model on the CPU, with all weights from safetensors.

    Args:
        source: a folder written by `save_pretrained`, the folder of a finished run, or a name on the hub.
        what: the name of the argument in error messages: "teacher", "student", "model".
        dtype: dtype of the weights; "auto" keeps the saved dtype.
        attn_implementation: as in transformers; None uses its default.
    """
    path = model_folder(source, what)
    check_config(path, what)
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with _without_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **chosen
            )
    except Exception as error:  # damaged files raise errors of transformers, json and torch, and plain KeyErrors
        raise _refusal(path, what, error) from error
    model, found = loaded
    if extra := sorted(found["unexpected_keys"]):
        names = ", ".join(visible(name)[:LONGEST_REASON] for name in extra[:3])
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        _logger.warning("%s %s: the model does not use the weights %s%s", what, visible(source), names, more)
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers only warns and initialises them randomly.
        raise ValueError(
            f"{what} {str(source)!r} has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; is it a complete causal language model?"
        )
    return model


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Suppresses transformers' table of weights, which prints names without escaping control characters."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(max(before, transformers_logging.ERROR))
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def load_config(source: str | Path, what: str = "model") -> Any:
    """Loads the configuration of a folder, or of a hub name that is in the local cache (otherwise OSError)."""
    path = model_folder(source, what, weights=False)
    check_config(path, what)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except OSError:
        if not Path(path).is_dir():
            raise
        raise ValueError(f"{what} {path!r} has a config.json that cannot be read") from None
    except Exception as error:
        raise _refusal(path, what, error) from error


def load_tokenizer_of(source: str | Path, what: str = "model") -> Any:
    """Loads the tokenizer in the folder of a model; None if the folder has none."""
    path = model_folder(source, what, weights=False)
    if Path(path).is_dir() and not has_tokenizer(Path(path)):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise _refusal(path, f"the tokenizer of {what}", error) from error


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_config(path: str, what: str) -> None:
    """Rejects a config.json that is a pipe, too large, too deeply nested, not an object, or has too many layers."""
    if Path(path).is_dir():
        config = read_table(Path(path) / "config.json")
        for key in ("model_type", "base_model_type"):
            if not isinstance(config.get(key, ""), str):
                raise ValueError(f"{what} {path!r}: {key} of config.json must be text, got {config[key]!r}")
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            for key in LAYER_KEYS:
                if isinstance(part.get(key), int) and part[key] > MOST_LAYERS:  # transformers would build them all
                    raise ValueError(f"{what} {path!r}: {key} of config.json must be at most {MOST_LAYERS:,}")


def _refusal(path: str, what: str, error: Exception) -> Exception:
    """Turns the error of a library into one sentence."""
    reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
    if "trust_remote_code" in reason or "custom code" in reason:
        reason = "its model type needs Python code from the checkpoint, which is never run"
    if "ignore_mismatched_sizes" in reason:
        reason = "its weights do not have the shapes given in its config.json"
    kind = OSError if isinstance(error, OSError) and not Path(path).is_dir() else ValueError
    return kind(f"{what} {path!r} cannot be loaded: {reason}")
