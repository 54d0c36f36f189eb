"""Keeps NaN, infinity and numbers that overflow in keys and values away from queries that do not see them.

A kernel multiplies an invisible value by a weight of 0, and 0 * NaN is NaN. So a key whose key or value vector is not
finite is replaced by zeros, and the rows that do see it are set to NaN afterwards: those rows, and no others.

Finite keys near 1e38 have the same effect. A kernel adds -inf to the score of an invisible key, and that score may have
overflowed to +inf. Eager code on the CPU finds the rows where that happened (ops/tiles.py). A compiled graph and a GPU
cannot look without a synchronisation: there, vectors above `largest_safe` are replaced as if they were infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .visibility import Visibility


def largest_safe(dtype: torch.dtype) -> float:
    """The largest entry of a key or value with which no score and no gradient of a weight overflows.

    2^80 where sums are in fp32: with queries and output gradients up to 2^40, a dot product of 256 entries stays within
    2^128. 2^640 in fp64. fp16 cannot hold a number that large, so every finite one is safe.
    """
    return min(2.0**640 if dtype == torch.float64 else 2.0**80, torch.finfo(dtype).max)


def shield(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns key and value with broken rows zeroed, and which those are: [B, G, S], or None when there are none.

    In eager code on the CPU a row is broken when it is not finite, and a check comes first. Elsewhere a check would
    synchronise with the device: broken rows are always replaced there, and so are those above `largest_safe`.
    """
    if key.device.type == "cpu" and not torch.compiler.is_compiling():
        # 0 * x is 0 for finite x and NaN otherwise: exact, where a plain sum could overflow.
        broken_BGS = ~torch.isfinite((key * 0).sum(-1) + (value * 0).sum(-1))
        if not broken_BGS.any():
            return key, value, None
    else:
        # Negated: a comparison with NaN is False.
        limit = largest_safe(key.dtype)
        broken_BGS = ~((key.abs().amax(-1) <= limit) & (value.abs().amax(-1) <= limit))
    broken = broken_BGS[..., None]
    return key.masked_fill(broken, 0), value.masked_fill(broken, 0), broken_BGS


def poison(broken_BGS: Tensor | None, visibility: Visibility, heads: int, dtype: torch.dtype) -> Tensor | None:
    """NaN for the rows that see a broken key and 0 for the others, to be added to the output: [B, H, T, 1]."""
    if broken_BGS is None:
        return None
    seen_BGT1 = visibility.sum_keys(broken_BGS[..., None].to(torch.float32)) > 0
    poison_BGT1 = torch.zeros(seen_BGT1.shape, dtype=dtype, device=seen_BGT1.device).masked_fill(seen_BGT1, torch.nan)
    return poison_BGT1.repeat_interleave(heads // poison_BGT1.shape[1], dim=1)
