"""Rotates queries and keys by their positions (rotary embedding, halves paired as in LLaMA)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BHTD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotates the pair (d, d + D/2) of a vector at position p by p * theta^(-2d/D); angles in fp32 or better."""
    half = x_BHTD.shape[-1] // 2
    dtype = torch.float64 if x_BHTD.dtype == torch.float64 else torch.float32
    frequency = theta ** (-torch.arange(half, device=x_BHTD.device, dtype=dtype) / half)
    angle_B1TD = positions_BT[:, None, :, None].to(dtype) * frequency
    cos, sin = angle_B1TD.cos(), angle_B1TD.sin()
    first, second = x_BHTD[..., :half].to(dtype), x_BHTD[..., half:].to(dtype)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x_BHTD.dtype)
