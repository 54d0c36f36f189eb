"""Says in which dtype row quantities and long sums are kept."""

from __future__ import annotations

import torch


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax state, alpha, beta and other numbers of a row: fp32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over many keys: one step above the inputs, so that the rounding of T additions is negligible."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
