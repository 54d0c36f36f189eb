"""Keeps NaN and infinity in keys and values from reaching queries that do not see them.

Kernels multiply the value of a masked key by a weight of 0, and 0 * NaN is NaN. Key and value vectors with non-finite
elements are therefore replaced by zeros, and the output rows that do see such a key are set to NaN afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .visibility import Visibility


def zero_nonfinite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns key and value with non-finite vectors zeroed, and the mask [B, G, S] of those (None: there are none).

    On the CPU the values are checked first. On other devices the check would synchronise, so vectors are always masked.
    """
    # 0 * x is 0 for finite x and NaN otherwise, and its sum cannot overflow.
    nonfinite_BGS = ~torch.isfinite((key * 0).sum(-1) + (value * 0).sum(-1))
    if key.device.type == "cpu" and not torch.compiler.is_compiling() and not nonfinite_BGS.any():
        return key, value, None
    nonfinite = nonfinite_BGS[..., None]
    return key.masked_fill(nonfinite, 0), value.masked_fill(nonfinite, 0), nonfinite_BGS


def nan_where_seen(
    nonfinite_BGS: Tensor | None, visibility: Visibility, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """A term to add to the output, [B, H, T, 1]: NaN for rows that see a non-finite key, 0 for the others."""
    if nonfinite_BGS is None:
        return None
    seen_BGT1 = visibility.sum_keys(nonfinite_BGS[..., None].to(torch.float32)) > 0
    nan_BGT1 = torch.zeros(seen_BGT1.shape, dtype=dtype, device=seen_BGT1.device).masked_fill(seen_BGT1, torch.nan)
    return nan_BGT1.repeat_interleave(heads // nan_BGT1.shape[1], dim=1)
