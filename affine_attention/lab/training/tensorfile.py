"""Writes and reads safetensors files one tensor at a time.

The library's own writer needs all tensors in memory. Here each tensor is copied from the GPU or gathered from the ranks
when it is written, hashed in the same pass and freed, so that saving needs only the memory of the largest tensor. The
format is that of safetensors (a length, a JSON header, the bytes), and the library can read the files.
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
    """Expected hash and size of a file, computed from the bytes in memory."""

    sha256: str
    bytes: int


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], fetch: Callable[[Tensor], Tensor]) -> Written:
    """Writes tensors to a new safetensors file and syncs it to disk.

    Args:
        path: the file.
        tensors: names and tensors, which may be sharded or on a GPU; only shapes and dtypes are read at first.
        fetch: returns the full tensor on the CPU; called for each tensor in order.
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
    """(shape, dtype name of the format) of each tensor of a safetensors file; tensors are not read."""
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (list(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The library's reader, which checks the header against the file size; its errors get the file name."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path):
            pass
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); is it truncated?") from error


def write_bytes(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Writes a new file, hashes the bytes in memory, and syncs the file to disk."""
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
    """The bytes of a CPU tensor, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(file, piece: memoryview) -> None:
    """A write may be partial, for example on a full disk; the next write then raises the error."""
    while len(piece):
        piece = piece[file.write(piece) :]
