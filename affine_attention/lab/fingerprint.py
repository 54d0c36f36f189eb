"""Hashes files and model weights completely, so that a change of any bit changes the fingerprint."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch

from ..files import open_regular
from ..hf.loading import model_folder

SETTLED = 2.0  # seconds after which a further change of a file certainly changes its modification time
_KNOWN: dict[tuple[str, int, int, int], str] = {}  # per process: a study loads one teacher for many students


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_file_once(path: Path) -> str:
    """sha256 of a file's bytes, computed once per process as long as size and modification times do not change."""
    found = path.stat()
    if time.time() - max(found.st_mtime, found.st_ctime) < SETTLED:
        return hash_file(path)  # another change could have the same times
    key = (str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if key not in _KNOWN:
        _KNOWN[key] = hash_file(path)
    return _KNOWN[key]


def fingerprint_folder(folder: Path) -> str:
    """Hash of a checkpoint's configuration and of every byte of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {hash_file_once(path)} ".encode())
    return digest.hexdigest()


def fingerprint_model(model: Any) -> str:
    """Hash of a loaded model: names, shapes, dtypes and every value of its tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def fingerprint_source(source: str | Path) -> str | None:
    """Hash of a model folder; None for a name on the hub, whose loaded model is hashed instead."""
    path = Path(model_folder(source, weights=False))
    return fingerprint_folder(path) if path.is_dir() else None
