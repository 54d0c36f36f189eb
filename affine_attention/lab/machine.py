"""Describes the machine, the package versions and the command that made a result, so that it can be reproduced."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..version import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "transformers", "accelerate", "tokenizers", "datasets", "lm-eval")


def now() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe_machine(device: torch.device | str | None = None) -> dict[str, Any]:
    """Date, device, versions, commit and command of this process."""
    import torch  # here, so that the report can use `now` without torch

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cpu = f"{device.type}, {platform.machine()}, {os.cpu_count()} cores"
    return {
        "date": now(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "python": platform.python_version(),
        "versions": {"affine_attention": __version__}
        | {package: version for package in PACKAGES if (version := _version(package))},
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree of this package, with "+" if tracked files were changed; None outside of git."""
    root = Path(__file__).parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        ).stdout.strip()
        return commit + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
