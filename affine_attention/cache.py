"""Says where the package keeps what it can make again (packed text, a teacher's states, tile sizes), and empties it."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from .files import expanded

LIMIT = "AFFINE_CACHE_LIMIT"  # environment variable: gigabytes
DEFAULT_LIMIT = 200.0
RECENT = 24 * 3600.0  # seconds: what was used since then may be in use
ENTRY = re.compile(r"(tokens|tokenizer|teacher)-[0-9a-f]{24}")
REST = re.compile(r"\.(tokens|tokenizer|teacher)-[0-9a-f]{24}\.(lock|part-.+)")  # of processes, also killed ones


class Entry(NamedTuple):
    """One folder of the cache."""

    path: Path
    bytes: int
    used: float  # seconds since the epoch


def default_cache() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/affine_attention, or ~/.cache/affine_attention."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "the cache") / "affine_attention"


def cache_limit() -> float:
    """Bytes that the cache may hold: AFFINE_CACHE_LIMIT gigabytes, 200 by default."""
    text = os.environ.get(LIMIT) or str(DEFAULT_LIMIT)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1e9:
        raise ValueError(f"{LIMIT} must be a number of gigabytes from 0 on, got {text[:80]!r}")
    return limit * 1e9


def cache_entries(cache: Path) -> list[Entry]:
    """What this package has put into a cache folder, the least recently used first."""
    if not cache.is_dir():
        return []
    found = []
    for path in cache.iterdir():
        if ENTRY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(Entry(path, size, path.stat().st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def note_use(folder: Path) -> None:
    """Marks an entry as used now."""
    if os.access(folder, os.W_OK):
        os.utime(folder)


def remove_oldest(cache: Path, keep: str) -> list[Path]:
    """Removes the least recently used entries until the rest is within the limit; returns their paths.

    Neither the entry `keep` nor one that was used in the last day is removed: another process may be reading it.
    """
    entries, limit = cache_entries(cache), cache_limit()
    total = sum(entry.bytes for entry in entries)
    removed = []
    for entry in entries:
        if total > limit and entry.path.name != keep and time.time() - entry.used > RECENT:
            shutil.rmtree(entry.path, ignore_errors=True)
            total -= entry.bytes
            removed.append(entry.path)
    return removed


def clear_cache(cache: Path) -> int:
    """Removes what this package can make again from a cache folder, and nothing else; the bytes that were freed."""
    entries = cache_entries(cache)
    for entry in entries:
        shutil.rmtree(entry.path)
    for path in cache.iterdir() if cache.is_dir() else ():
        if REST.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return sum(entry.bytes for entry in entries)
