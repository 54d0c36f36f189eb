"""Turns named tensors into a safetensors file, one tensor at a time, and back.

The library's own writer wants all tensors in memory at once. Here a tensor is fetched from its GPU or gathered from its
ranks when its turn comes, written, hashed in the same pass and dropped, so that a checkpoint costs the memory of its
largest tensor. The format is that of safetensors (a length, a JSON header, the bytes), and the library reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...files import open_regular

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PIECE = 16 * 2**20  # bytes of one write


class Written(NamedTuple):
    """What a file should be, as it was in memory: the disk is checked against it."""

    sha256: str
    bytes: int


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], fetch: Callable[[Tensor], Tensor]) -> Written:
    """Writes tensors to a new safetensors file and waits for the disk.

    Args:
        path: the file.
        tensors: names and tensors, sharded or on a GPU as they are: only shapes and dtypes are read at first.
        fetch: makes one of them whole, on the CPU; called for each in turn.
    """
    pairs = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in pairs:
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in pairs:
            yield as_bytes(fetch(tensor))

    return write_bytes(path, pieces())


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, one at a time, on the CPU."""
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118  it is not a mapping
            yield name, file.get_tensor(name)


def read_shapes(path: Path) -> dict[str, tuple[list[int], str]]:
    """(shape, dtype in the words of the format) of each tensor of a safetensors file; no tensor is read."""
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (list(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The library's reader, which holds the header against the file's size; its complaints with the file's name."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path):
            pass
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); was it cut off?") from error


def write_bytes(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Writes a new file, hashes what was meant to be written, and waits for the disk."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            for start in range(0, len(piece), PIECE):
                _write_all(file, memoryview(piece)[start : start + PIECE])
        os.fsync(file.fileno())
    return Written(digest.hexdigest(), size)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(file, piece: memoryview) -> None:
    """One write may take less than it was given: at a limit of the disk, the next one says why."""
    while len(piece):
        piece = piece[file.write(piece) :]
