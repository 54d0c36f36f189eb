"""Attention with any weight function in blocks of queries, recomputed in the backward: no T x S tensor.

F12  out_i = gate_i * sum_j (alpha_i w_ij + beta_i) v_j over visible keys, w from a weight function of the scores
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call import AttentionCall
from ..dtypes import row_dtype
from ..nonfinite_keys import nan_where_seen, zero_nonfinite
from . import FUNCTIONS

BLOCK = 128  # queries whose weights are in memory at a time


def weighted_attention(call: AttentionCall) -> Tensor:
    """F12 for any visibility; differentiable in every tensor, with the memory of one block of weights."""
    heads, num_queries = call.query.shape[1:3]
    key, value, nonfinite = zero_nonfinite(call.key, call.value)
    clean = call._replace(key=key, value=value)
    blocks = []
    for first in range(0, num_queries, BLOCK):
        last = min(first + BLOCK, num_queries)
        arguments = _block_of(clean, first, last)
        if call.needs_gradient:
            # checkpoint keeps the inputs of a block only, and runs it again in the backward.
            run: Any = checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False)
            blocks.append(run)
        else:
            blocks.append(_attend(*arguments))
    out = torch.cat(blocks, dim=2) if blocks else call.query * 0
    nan_BHT1 = nan_where_seen(nonfinite, call.visibility, heads, out.dtype)
    return out if nan_BHT1 is None else out + nan_BHT1


def _block_of(call: AttentionCall, first: int, last: int) -> tuple[Any, ...]:
    """The arguments of `_attend` for the queries first .. last - 1 and the keys that causal and window allow."""
    start, stop = call.visibility.key_bounds(first, last - 1)
    alpha, beta, _, gate = (None if x is None or x.dim() == 1 else x[:, :, first:last] for x in call.rows)
    return (
        call.query[:, :, first:last], call.key[:, :, start:stop], call.value[:, :, start:stop], alpha, beta, gate, call,
        slice(first, last), slice(start, stop),
    )  # fmt: skip


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    gate: Tensor | None,
    call: AttentionCall,
    queries: slice,
    keys: slice,
) -> Tensor:
    dtype, heads, groups = row_dtype(query.dtype), query.shape[1], key.shape[1]
    visible = call.visibility.block(queries, keys)
    if visible is None:
        visible = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    empty_BHT = ~visible.any(-1)  # their coefficients may hold anything, and 0 times NaN is NaN
    query = query.masked_fill(empty_BHT[..., None], 0).to(dtype)
    # The query heads of a group are rows of one product, so that keys and values are not repeated.
    folded = query.unflatten(1, (groups, -1)).flatten(2, 3)
    scores = (folded @ key.to(dtype).mT * call.softmax_scale).view(query.shape[0], heads, query.shape[2], key.shape[2])
    counts = visible.sum(-1, keepdim=True).clamp(min=1).to(dtype)
    weights = FUNCTIONS[call.weights].weigh(scores.masked_fill(~visible, 0), visible, counts)
    if alpha is not None:
        weights = weights * alpha.masked_fill(empty_BHT, 0).to(dtype)[..., None]
    if beta is not None:
        weights = weights + beta.masked_fill(empty_BHT, 0).to(dtype)[..., None]
    weights = weights.masked_fill(~visible, 0).expand(scores.shape)
    folded = weights.unflatten(1, (groups, -1)).flatten(2, 3) @ value.to(dtype)
    out = folded.view(query.shape)
    if gate is not None:
        out = out * gate.masked_fill(empty_BHT[..., None], 0).to(dtype)
    return out.to(call.query.dtype)
