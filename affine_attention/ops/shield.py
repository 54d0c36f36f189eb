"""Keeps NaN and infinity of keys and values away from queries that do not see them.

A kernel multiplies an invisible value by a weight of 0, and 0 * NaN is NaN. So a key whose key or value vector is not
finite is replaced by zeros, and the rows that do see it are set to NaN afterwards: those rows, and no others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .visibility import Visibility


def shield(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns key and value with non-finite rows zeroed, and which those are: [B, G, S], or None when there are none.

    On the CPU a check comes first; on other devices it would synchronise with the device, so the rows are always
    replaced there.
    """
    # 0 * x is 0 for finite x and NaN otherwise: exact, where a plain sum could overflow.
    broken_BGS = ~torch.isfinite((key * 0).sum(-1) + (value * 0).sum(-1))
    if key.device.type == "cpu" and not torch.compiler.is_compiling() and not broken_BGS.any():
        return key, value, None
    broken = broken_BGS[..., None]
    return key.masked_fill(broken, 0), value.masked_fill(broken, 0), broken_BGS


def poison(broken_BGS: Tensor | None, visibility: Visibility, heads: int, dtype: torch.dtype) -> Tensor | None:
    """NaN for the rows that see a broken key and 0 for the others, to be added to the output: [B, H, T, 1]."""
    if broken_BGS is None:
        return None
    seen_BGT1 = visibility.sum_keys(broken_BGS[..., None].to(torch.float32)) > 0
    poison_BGT1 = torch.zeros(seen_BGT1.shape, dtype=dtype, device=seen_BGT1.device).masked_fill(seen_BGT1, torch.nan)
    return poison_BGT1.repeat_interleave(heads // poison_BGT1.shape[1], dim=1)
