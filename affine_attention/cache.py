"""The cache folder of tokenized text, tokenizers, teacher states and tile sizes: location, size limit, removal."""

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
RECENT = 24 * 3600.0  # seconds; entries used more recently may be in use
ENTRY = re.compile(r"(tokens|tokenizer|teacher)-[0-9a-f]{24}")
LEFTOVER = re.compile(r"\.(tokens|tokenizer|teacher)-[0-9a-f]{24}\.(lock|part-.+)")  # locks and partial entries


class Entry(NamedTuple):
    """One folder in the cache."""

    path: Path
    bytes: int
    used: float  # seconds since the epoch


def default_cache() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/affine_attention, or ~/.cache/affine_attention."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "the cache") / "affine_attention"


def cache_limit() -> float:
    """Maximum size of the cache in bytes: AFFINE_CACHE_LIMIT gigabytes, 200 by default."""
    text = os.environ.get(LIMIT) or str(DEFAULT_LIMIT)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1e9:
        raise ValueError(f"{LIMIT} must be a non-negative number of gigabytes, got {text[:80]!r}")
    return limit * 1e9


def cache_entries(cache: Path) -> list[Entry]:
    """The entries of this package in a cache folder, least recently used first."""
    if not cache.is_dir():
        return []
    found = []
    for path in cache.iterdir():
        if ENTRY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(Entry(path, size, path.stat().st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def note_use(folder: Path) -> None:
    """Sets the last use of an entry to now."""
    if os.access(folder, os.W_OK):
        os.utime(folder)


def remove_oldest(cache: Path, keep: str) -> list[Path]:
    """Removes the least recently used entries until the cache is within its limit; returns the removed paths.

    The entry `keep` and entries used within the last day are kept, because another process may be reading them.
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
    """Removes this package's entries, and nothing else, from a cache folder; returns the freed bytes."""
    entries = cache_entries(cache)
    for entry in entries:
        shutil.rmtree(entry.path)
    for path in cache.iterdir() if cache.is_dir() else ():
        if LEFTOVER.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return sum(entry.bytes for entry in entries)
