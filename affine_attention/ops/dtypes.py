"""The dtypes of row quantities and of long sums."""

from __future__ import annotations

import torch


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax state, alpha, beta and other per-row values: fp32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over many keys: wider than the inputs, so that the rounding of T additions is negligible."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
