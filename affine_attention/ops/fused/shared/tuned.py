"""Stores the tile sizes that `affine tune` found for a GPU in a JSON file, which a process reads at the first call.

There is one file per GPU model and Triton version in the user's cache folder: $XDG_CACHE_HOME/affine_attention/tuned or
~/.cache/affine_attention/tuned. AFFINE_TUNED=0 ignores the file; deleting it undoes the tuning.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import triton

from ....cache import default_cache
from .tile_sizes import HEAD_DIMS, KERNELS, Config, shipped_config

SCHEMA = 1
Key = tuple[str, int, int]  # kernel, bytes of an element, head dim up to


def chosen_config(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Config:
    """The tile sizes of `kernel`: the tuned ones if they exist, otherwise the shipped ones."""
    found = _tuned(device).get((kernel, dtype.itemsize, bucket(head_dim))) if device.type == "cuda" else None
    return found or shipped_config(kernel, head_dim, dtype, device)


def bucket(head_dim: int) -> int:
    """The largest head dim that shares tile sizes with this one."""
    return next(limit for limit in HEAD_DIMS if head_dim <= limit)


@functools.cache
def _tuned(device: torch.device) -> dict[Key, Config]:
    return {} if os.environ.get("AFFINE_TUNED") == "0" else read(file_of(torch.cuda.get_device_name(device)))


def file_of(gpu: str) -> Path:
    """The file with the tuned tile sizes of a GPU model."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-").lower()
    return default_cache() / "tuned" / f"{name}-triton-{triton.__version__}.json"


def save(gpu: str, configs: dict[Key, Config], about: dict[str, Any]) -> Path:
    """Adds tile sizes to the file of a GPU model; `about` records how they were found."""
    path = file_of(gpu)
    known = read(path) | configs
    entries = [
        {"kernel": kernel, "itemsize": itemsize, "head_dim": head_dim, **config._asdict()}
        for (kernel, itemsize, head_dim), config in sorted(known.items())
    ]
    content = {"schema": SCHEMA, "gpu": gpu, "triton": triton.__version__, **about, "configs": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)
    _tuned.cache_clear()
    return path


def read(path: Path) -> dict[Key, Config]:
    """Reads tile sizes; empty without a file. A damaged file is an error, since slow kernels would go unnoticed."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(
            f"{path} is not a valid file of `affine tune` ({error}); delete it or run `affine tune` again"
        ) from error
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, not {SCHEMA}")
        return dict(map(_entry, content["configs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a valid file of `affine tune` ({error!r}); delete it or run `affine tune` again"
        ) from error


def _entry(entry: dict[str, Any]) -> tuple[Key, Config]:
    config = Config(**{name: entry[name] for name in Config._fields})
    if entry["kernel"] not in KERNELS or entry["head_dim"] not in HEAD_DIMS or entry["itemsize"] not in (2, 4):
        raise ValueError(f"unknown kernel: {entry}")
    for name, number in config._asdict().items():
        absent = name == "maxnreg" and number is None
        if not absent and not (type(number) is int and 1 <= number <= 256):
            raise ValueError(f"{name} = {number!r}")
    if min(config.block_m, config.block_n) < 16 or any(x & (x - 1) for x in config[:3]):
        raise ValueError(f"tiles and warps must be powers of two, tiles at least 16: {config}")
    return (entry["kernel"], entry["itemsize"], entry["head_dim"]), config
