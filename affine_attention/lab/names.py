"""Checks names that become parts of paths: they stay in the folder that they are meant for."""

from __future__ import annotations

import re
from typing import Any

LONGEST = 100


def check_name(argument: str, name: Any) -> str:
    """A name for a folder: letters, digits and a few signs; no separator, no leading dot, not too long."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{argument} must be a name, got {str(name)[:LONGEST]!r}; is a variable unset?")
    if len(name) > LONGEST:
        raise ValueError(f"{argument} must have at most {LONGEST} characters, got {len(name):,}")
    if name.startswith(".") or not name.isprintable() or re.search(r"[/\\:\0]", name):
        raise ValueError(f"{argument} must be printable, without / \\ : and not begin with a dot, got {name!r}")
    return name


def folder_name(text: str) -> str:
    """A text as the name of a folder: what a file system may take amiss becomes `_`."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "_", text).lstrip(".") or "_"
