"""Rotary position embedding: rotates queries and keys by their positions (halves paired as in LLaMA)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TABLES = 8
# Tables of all layers with the same head dim, theta, device and dtype: they are in no state dict and follow every move.
_tables: dict[tuple[int, float, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}


def rotate(x_BHTD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotates the pair (d, d + D/2) of a vector at position p by p * theta^(-2d/D); angles in fp32 or better."""
    return apply_rotation(x_BHTD, *cos_sin(positions_BT[:, None], x_BHTD.shape[-1], theta, angle_dtype(x_BHTD)))


def apply_rotation(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates vectors by angles with these cosines and sines, which broadcast to [B, H, T, D/2]."""
    first, second = x_BHTD.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BHTD.dtype)


def angle_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cos_sin(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, [..., D/2] for positions [...]."""
    half = head_dim // 2
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=dtype) / half)
    angle = positions[..., None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def cos_sin_table(
    length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`cos_sin` of at least the positions 0 .. length - 1, from a cached table that is doubled when it is too short."""
    key = (head_dim, theta, device, dtype)
    found = _tables.get(key)
    if found is not None and len(found[0]) >= length:
        return found
    rows = length if found is None else max(length, 2 * len(found[0]))
    with torch.inference_mode(False):  # autograd cannot save inference tensors, and a later call may need gradients
        table = cos_sin(torch.arange(rows, device=device), head_dim, theta, dtype)
    # A fake tensor has no values, and a CUDA graph under capture computes them only when it is replayed.
    if type(table[0]) is Tensor and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        if len(_tables) >= MAX_TABLES:
            _tables.clear()
        _tables[key] = table
    return table
