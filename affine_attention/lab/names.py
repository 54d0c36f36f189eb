"""Validates names that become folder names, so that they cannot point to another folder."""

from __future__ import annotations

import re
from typing import Any

LONGEST = 100


def check_name(argument: str, name: Any) -> str:
    """A printable name without path separators, colons or a leading dot, of limited length."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{argument} must be a name, got {str(name)[:LONGEST]!r}; is a variable unset?")
    if len(name) > LONGEST:
        raise ValueError(f"{argument} must have at most {LONGEST} characters, got {len(name):,}")
    if name.startswith(".") or not name.isprintable() or re.search(r"[/\\:\0]", name):
        raise ValueError(f"{argument} must be printable, without / \\ : and not begin with a dot, got {name!r}")
    return name


def folder_name(text: str) -> str:
    """Text as a folder name: characters that some file systems do not allow become `_`."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "_", text).lstrip(".") or "_"
