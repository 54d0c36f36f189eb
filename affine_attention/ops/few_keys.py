"""The softmax backward of calls with a sink in which every row sees at most a few keys.

Attention kernels recompute the weights as exp(s - lse) and take delta = rowsum(grad * O). With one to eight keys beside
a sink both lose accuracy: lse is rounded in units of itself, and dP - delta cancels, while the rounding errors of dP
and of O do not. Here the weights come from one softmax that includes the sink, and delta is the sum of weights * dP
over the same products (B2 of ops/README.md), as in the formula written out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import sink_by_row
from .dtypes import row_dtype
from .visibility import Visibility

MAX_KEYS = 8  # with more keys the kernels' errors are below twice those of the formula written out
QUERY_BLOCK = 256


def has_few_keys(visibility: Visibility) -> bool:
    """True if every query sees at most MAX_KEYS keys. Data is read on the CPU in eager mode only."""
    if visibility.num_keys <= MAX_KEYS:
        return True
    window = visibility.window
    if window is not None and (window if visibility.is_causal else 2 * window - 1) <= MAX_KEYS:
        return True
    if visibility.query_segments is None and visibility.pair_mask is None:
        return False  # padding alone hides all but a few keys only in batches that are nearly empty
    if visibility.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    counts = visibility.count()
    return counts.numel() > 0 and int(counts.max()) <= MAX_KEYS


def softmax_backward_of_few_keys(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor,
    visibility: Visibility,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the softmax part with respect to query, key and value, in blocks of queries."""
    dtype, heads, groups = row_dtype(query.dtype), query.shape[1], key.shape[1]
    key_BHSD, value_BHSD = (x.to(dtype).repeat_interleave(heads // groups, 1) for x in (key, value))
    sink_BHT = sink_by_row(sink.to(dtype)).expand(query.shape[:3])
    grad_query = torch.zeros_like(query, dtype=dtype)
    grad_key, grad_value = torch.zeros_like(key_BHSD), torch.zeros_like(value_BHSD)
    for first in range(0, query.shape[2], QUERY_BLOCK):
        rows = slice(first, min(first + QUERY_BLOCK, query.shape[2]))
        keys = slice(*visibility.key_bounds(rows.start, rows.stop - 1))
        if keys.stop == keys.start:
            continue
        query_block, grad_block = query[:, :, rows].to(dtype), grad_out[:, :, rows].to(dtype)
        scores = query_block @ key_BHSD[:, :, keys].mT * softmax_scale
        visible = visibility.block(rows, keys)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        weights = torch.softmax(torch.cat([scores, sink_BHT[:, :, rows, None]], -1), -1)[..., :-1]
        weights = weights.masked_fill(scores == -torch.inf, 0)  # a row without keys and with a sink of -inf is NaN
        grad_weights = (grad_block @ value_BHSD[:, :, keys].mT).masked_fill(weights == 0, 0)
        delta = (weights * grad_weights).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - delta) * softmax_scale
        grad_query[:, :, rows] = grad_scores @ key_BHSD[:, :, keys]
        grad_key[:, :, keys] += grad_scores.mT @ query_block
        grad_value[:, :, keys] += weights.mT @ grad_block
    grad_key, grad_value = (x.unflatten(1, (groups, -1)).sum(2) for x in (grad_key, grad_value))
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
