"""Says where the package keeps what it can make again: packed text, a teacher's states, tile sizes."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/affine_attention, or ~/.cache/affine_attention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "affine_attention"
