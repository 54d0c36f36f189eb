"""Turns a folder or a hub name into a model, its configuration or its tokenizer, without running code of the folder.

This is the one loader of the package. It never runs Python that a checkpoint brings along and never asks whether it
may, reads weights from safetensors alone (a pickle can run anything), follows no adapter to another model, and fills no
missing weight with random numbers. Whatever a file holds, an error is a ValueError of one sentence with its name.
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
LONGEST_REASON = 300  # characters of what a library says
_logger = logging.getLogger(__name__)


def model_folder(source: str | Path, what: str = "model", weights: bool = True) -> str:
    """The folder of a model (that of a run has it in model/), or the name on the hub as it is.

    Args:
        source: a folder that `save_pretrained` wrote, the folder of a finished run, or a name on the hub.
        what: names the argument in errors.
        weights: False for a folder whose configuration or tokenizer alone is read.
    """
    if not str(source).strip():
        raise ValueError(f"{what} must be a folder or a name on the hub, got an empty name")
    path = Path(source)
    if not path.is_dir():
        if path.is_file():
            raise ValueError(f"{what} must be a folder or a name on the hub, got the file {str(source)!r}")
        if path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2:
            raise FileNotFoundError(f"{what} {str(source)!r} is not there: no such folder")
        return str(source)
    if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
        path = path / "model"
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{what} {str(source)!r} has no config.json; name a folder that save_pretrained wrote, or that of a "
            "finished run"
        )
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"{what} {str(source)!r} is a PEFT adapter, which names another model to load; merge it into its model "
            "(merge_and_unload) and save that"
        )
    if weights and not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
        reason = f"only {', '.join(pickles[:3])}, which can run code when read" if pickles else "no weights at all"
        raise ValueError(
            f"{what} {str(source)!r} has no .safetensors file, {reason}; save it with save_pretrained, where you "
            "trust it"
        )
    return str(path)


def load_model(
    source: str | Path,
    what: str = "model",
    *,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
) -> Any:
    """A causal language model on the CPU, every weight of it from safetensors; a run's folder gives its model.

    Args:
        source: a folder that `save_pretrained` wrote, the folder of a finished run, or a name on the hub.
        what: names the argument in errors: "teacher", "student", "model".
        dtype: of the weights; "auto": as saved.
        attn_implementation: as in transformers; its own choice by default.
    """
    path = model_folder(source, what)
    check_config(path, what)
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with _without_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **chosen
            )
    except Exception as error:  # libraries raise their own, JSON's, torch's and plain KeyErrors on damaged files
        raise _refusal(path, what, error) from error
    model, found = loaded
    if extra := sorted(found["unexpected_keys"]):
        names = ", ".join(visible(name)[:LONGEST_REASON] for name in extra[:3])
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        _logger.warning("%s %s: the model has no place for the weights %s%s", what, visible(source), names, more)
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers fills them with random numbers and a warning.
        raise ValueError(
            f"{what} {str(source)!r} has no weights for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}; is it a complete causal language model?"
        )
    return model


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Without transformers' table of weights, which prints their names as they are, control characters included."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(max(before, transformers_logging.ERROR))
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def load_config(source: str | Path, what: str = "model") -> Any:
    """The configuration of a folder, or of a hub name that this machine has in its cache (else OSError)."""
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
    """The tokenizer beside a model; None where its folder has none."""
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
    """Refuses a config.json that is a pipe, too large, nested too deeply, no object or of too many layers."""
    if Path(path).is_dir():
        config = read_table(Path(path) / "config.json")
        for key in ("model_type", "base_model_type"):
            if not isinstance(config.get(key, ""), str):
                raise ValueError(f"{what} {path!r}: {key} of config.json must be text, got {config[key]!r}")
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            for key in LAYER_KEYS:
                if isinstance(part.get(key), int) and part[key] > MOST_LAYERS:  # transformers would make each of them
                    raise ValueError(f"{what} {path!r}: {key} of config.json must be at most {MOST_LAYERS:,}")


def _refusal(path: str, what: str, error: Exception) -> Exception:
    """What a library has said, in one sentence."""
    reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
    if "trust_remote_code" in reason or "custom code" in reason:
        reason = "its model type is known only to code that it brings along, which is never run"
    if "ignore_mismatched_sizes" in reason:
        reason = "its weights do not have the shapes that its config.json says"
    kind = OSError if isinstance(error, OSError) and not Path(path).is_dir() else ValueError
    return kind(f"{what} {path!r} cannot be loaded: {reason}")
