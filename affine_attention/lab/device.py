"""Turns a device name into a torch.device, with a clear error if it is not available."""

from __future__ import annotations

import torch


def choose_device(device: torch.device | str | None) -> torch.device:
    """The device of a name; None uses a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device must be "cpu" or "cuda", got {str(device)[:80]!r}') from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {str(chosen)!r}')
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(chosen)!r} needs a CUDA GPU, but torch sees none; use cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(chosen)!r} must be one of the {torch.cuda.device_count()} GPUs that torch sees")
    return chosen
