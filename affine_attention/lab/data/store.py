"""Turns documents' ids into files of a cache, once, and memory-maps them.

A folder of the cache appears whole or not at all: it is written under another name and renamed. Of several processes
that want the same one, the first writes and the others wait for its lock; where a file system has no locks, each writes
its own and one of them stays.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from ...cache import note_use, remove_oldest
from ...files import read_table
from ..fingerprint import hash_file, hash_file_once

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # told by a write, without the name of a file
SEAL = "whole.json"  # written last: the sha256 of every file


def cached(cache: Path, key: str, write: Callable[[Path], None]) -> Path:
    """The folder cache/key. `write` fills an empty folder where there is none yet, or a damaged one."""
    target = cache / key
    if is_whole(target):
        note_use(target)
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{key}.lock"):
            if not is_whole(target):
                _write(cache, key, write)
                remove_oldest(cache, keep=key)
    except OSError as error:
        ours = error.filename is not None and cache in (Path(error.filename), *Path(error.filename).parents)
        if not ours and error.errno not in NO_ROOM:
            raise  # of a source, which is named already
        message = f"the cache {cache} cannot be written ({error.strerror}); name another with cache="
        raise OSError(error.errno, message) from error
    return target


def is_whole(folder: Path) -> bool:
    """True when every file that was written is there, byte for byte; each is read once in a process."""
    try:
        hashes = read_table(folder / SEAL)
        return all(hash_file_once(folder / name) == expected for name, expected in hashes.items())
    except (OSError, ValueError):
        return False


def _write(cache: Path, key: str, write: Callable[[Path], None]) -> None:
    for left_over in cache.glob(f".{key}.part-*"):  # by a process that was killed: the lock is ours
        shutil.rmtree(left_over, ignore_errors=True)
    part = cache / f".{key}.part-{os.getpid()}-{secrets.token_hex(4)}"
    part.mkdir()
    try:
        write(part)
        names = [str(file.relative_to(part)) for file in part.rglob("*") if file.is_file()]
        for name in names:
            _to_disk(part / name)
        (part / SEAL).write_text(json.dumps({name: hash_file(part / name) for name in names}))
        _to_disk(part / SEAL)
        _rename(part, cache / key)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _rename(part: Path, target: Path) -> None:
    try:
        part.rename(target)
    except OSError:
        if is_whole(target):
            return  # another process was faster, with the same content
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:  # a file, a link or a pipe in its place
            target.unlink()
        part.rename(target)


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@dataclass
class PartStats:
    """What is in one part (training or held-out) of a corpus."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    largest_id: int = -1


class TokenPart:
    """One part of a corpus on disk: `ids` of all its tokens, `starts` of its documents."""

    def __init__(self, folder: Path, name: str) -> None:
        described = json.loads((folder / f"{name}.json").read_text())
        dtype = np.dtype(described.pop("dtype"))
        self.stats = PartStats(**described)
        self.ids = _map(folder / f"{name}.ids", dtype)
        self.starts = _map(folder / f"{name}.starts", np.dtype("<i8"))


class PartWriter:
    """Writes a part document by document; use it in a `with` block."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.stats = PartStats()

    def __enter__(self) -> PartWriter:
        self._ids = (self.folder / f"{self.name}.ids").open("wb")
        self._starts = (self.folder / f"{self.name}.starts").open("wb")
        return self

    def add(self, documents: list[np.ndarray], characters: int) -> None:
        if not documents:
            return
        lengths = [len(ids) for ids in documents]
        together = np.concatenate(documents)
        starts = self.stats.tokens + np.cumsum([0, *lengths[:-1]])
        self._ids.write(together.astype(self.dtype, copy=False).tobytes())
        self._starts.write(starts.astype("<i8").tobytes())
        self.stats.documents += len(documents)
        self.stats.tokens += len(together)
        self.stats.characters += characters
        self.stats.largest_id = max(self.stats.largest_id, int(together.max()))

    def __exit__(self, *error: Any) -> None:
        self._ids.close()
        self._starts.close()
        if error[0] is None:
            described = asdict(self.stats) | {"dtype": self.dtype.str}
            (self.folder / f"{self.name}.json").write_text(json.dumps(described))


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
