"""Keeps NaN, infinity and overflow in keys and values from reaching queries that do not see them.

Kernels multiply the value of a masked key by a weight of 0, and 0 * NaN is NaN. Key and value vectors with non-finite
elements are therefore replaced by zeros, and the output rows that do see such a key are set to NaN afterwards.

Finite keys near 1e38 have the same effect: kernels add -inf to the score of a masked key, which may have overflowed to
+inf. Eager code on the CPU detects the affected rows (ops/tiles.py). A compiled graph and a GPU cannot do that without
a synchronisation, so there vectors above `largest_safe` are treated as non-finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .visibility import Visibility


def largest_safe(dtype: torch.dtype) -> float:
    """The largest element of a key or value for which no score and no gradient of a weight overflows.

    2^80 if sums are in fp32: with queries and output gradients up to 2^40, a dot product of 256 elements stays below
    2^128. 2^640 in fp64. Every finite fp16 value is below the limit.
    """
    return min(2.0**640 if dtype == torch.float64 else 2.0**80, torch.finfo(dtype).max)


def zero_nonfinite(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns key and value with non-finite vectors zeroed, and the mask [B, G, S] of those (None: there are none).

    Eager code on the CPU checks the values first. Elsewhere that would synchronise, so vectors are always masked there,
    including those above `largest_safe`.
    """
    if key.device.type == "cpu" and not torch.compiler.is_compiling():
        # 0 * x is 0 for finite x and NaN otherwise, and its sum cannot overflow.
        nonfinite_BGS = ~torch.isfinite((key * 0).sum(-1) + (value * 0).sum(-1))
        if not nonfinite_BGS.any():
            return key, value, None
    else:
        # Negated, because a comparison with NaN is False.
        limit = largest_safe(key.dtype)
        nonfinite_BGS = ~((key.abs().amax(-1) <= limit) & (value.abs().amax(-1) <= limit))
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
