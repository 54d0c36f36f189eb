"""Computes the statistics behind the figures from query, key, alpha, beta, sink and visibility of an attention call.

With p_ij the softmax over the visible keys of query i and the sink, and w_ij = alpha_i p_ij + beta_i (the weights that
`affine_attention.attention_weights` returns), the figures are interpreted as follows.

| figure | here |
|---|---|
| 2, "QKᵀ logits mean .. over layers, heads and token positions" | `logit_sums`: the signed mean of q_i·k_j · softmax_scale over all visible pairs, per head |
| 3, "for each query token, we sum attention weights over all non-sink tokens and average across heads" | `Rows.row_sum`: sum_j w_ij = alpha_i (1 - the sink's share) + n_i beta_i; the mean over heads is taken from it |
| 4, "attention weight assigned to the first token" | `Rows.first_token`: w_ij for j the first token of the query's document, averaged over all its queries including the first; 0 if a window hides it |
| 5, "total attention weights .. exclude the sink value S" | the mean of `Rows.row_sum` over queries, per head; "normalized to [0, 1]" is read as min-max over all layers and heads of a model |
| 6, "attention entropy" | `Rows.entropy_softmax`: of p over the visible keys, normalised without the sink; `Rows.entropy_weights`: of abs(w) / sum abs(w); both in nats; `Rows.negative_mass` is reported with them |
| 9, "attention weight matrices .. first 30 x 30 tokens" | `weight_map`: w_ij, signed, one map per head |

Figures 8, 10 and 11 come from the log of a run and the activation function. No function stores T x S numbers: sums over
keys come from `ops/visibility.py`, and the other statistics process a few query rows of one key-value head at a time.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.dtypes import row_dtype
from ...ops.visibility import Visibility
from .other_weights import minus_next, of_signed, other_rows, weigh

BLOCK_SCORES = {"cpu": 2**20, "cuda": 2**25}  # scores in memory at a time; on the CPU they should fit into its caches
MOST_ROWS = 1024
GATE_CLOSED, GATE_OPEN = 0.01, 0.99  # a gate value beyond these is saturated


class Rows(NamedTuple):
    """One value per query and head, [B, H, T]; fp64 for fp64 inputs, fp32 otherwise."""

    row_sum: Tensor  # sum of w over the visible keys
    absolute_sum: Tensor  # sum of abs(w)
    negative_mass: Tensor  # share of absolute_sum from negative weights
    first_token: Tensor  # w of the document's first token
    first_softmax: Tensor  # alpha p of the document's first token: w without beta
    softmax_sum: Tensor  # sum of alpha p over the visible keys
    first_uniform: Tensor  # what uniform attention would put on the first token: 1 / visible keys
    entropy_softmax: Tensor  # nats
    entropy_weights: Tensor  # nats; NaN if all weights are 0
    counted: Tensor  # boolean: True for real tokens that see at least one key


def measure_rows(
    query: Tensor,
    key: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    visibility: Visibility,
    softmax_scale: float,
    token_mask: Tensor | None = None,
    difference: Tensor | None = None,
    weights: str = "softmax",
) -> Rows:
    """The statistics of every query of a call, with O(T) memory per head and O(T S D) operations.

    Args:
        query, key, alpha, beta, sink, softmax_scale: as `affine_attention.attention` takes them.
        difference: [B, H, T] of a differential mechanism, whose w is that of the head minus `difference` times that of
            the next head of its key-value head; `entropy_softmax` stays that of the head alone.
        weights: the function of the scores; for one other than softmax, `entropy_softmax` is that of abs(p).
        visibility: which keys each query sees.
        token_mask: boolean [B, T], True for real tokens; None counts every query.
    """
    batch, heads, queries, _ = query.shape
    groups, dtype = key.shape[1], row_dtype(query.dtype)
    repeats = heads // groups
    seen_keys_BHT = visibility.count().expand(batch, heads, queries)
    counted = seen_keys_BHT > 0
    if token_mask is not None:
        counted = counted & token_mask[:, None]
    first_key_BT = first_keys(visibility)
    out = torch.zeros(len(Rows._fields) - 1, batch, heads, queries, dtype=dtype, device=query.device)
    ones = torch.ones((), dtype=dtype, device=query.device)
    for b in range(batch):
        visible = visibility.for_batch(slice(b, b + 1))
        for g in range(groups):
            own = slice(g * repeats, (g + 1) * repeats)
            key_SD = key[b, g].to(dtype)
            for rows, keys in _blocks(visible, repeats):
                sink_HT = None
                if sink is not None:
                    sink_HT = (sink[own, None] if sink.dim() == 1 else sink[b, own, rows]).to(dtype)
                part = _block_rows(
                    query[b, own, rows].to(dtype) * softmax_scale,
                    key_SD,
                    ones.expand(repeats, rows.stop - rows.start) if alpha is None else alpha[b, own, rows].to(dtype),
                    None if beta is None else beta[b, own, rows].to(dtype),
                    sink_HT,
                    seen_keys_BHT[b, own, rows],
                    first_key_BT[min(b, len(first_key_BT) - 1), rows],
                    visible, own, rows, keys,
                    None if difference is None else difference[b, own, rows].to(dtype),
                    weights,
                )  # fmt: skip
                out[:, b, own, rows] = part
    return Rows._make([*out.unbind(0), counted])


def _block_rows(
    query_RTD: Tensor,
    key_SD: Tensor,
    alpha_RT: Tensor,
    beta_RT: Tensor | None,
    sink_RT: Tensor | None,
    seen_keys_RT: Tensor,
    first_key_T: Tensor,
    visible: Visibility,
    heads: slice,
    rows: slice,
    keys: slice,
    difference_RT: Tensor | None,
    function: str,
) -> Tensor:
    """The statistics [9, R, rows] of a few rows, for the R query heads of one key-value head and all their keys."""
    scores = query_RTD @ key_SD[keys].T
    if function != "softmax":
        seen = visible.block(rows, keys)
        seen_RTS = (
            torch.ones_like(scores, dtype=torch.bool)
            if seen is None
            else (seen[0, heads] if seen.shape[1] > 1 else seen[0]).expand_as(scores)
        )
        first_T = torch.where(first_key_T < 0, -1, first_key_T - keys.start).to(scores.device)
        return other_rows(function, scores, seen_RTS, seen_keys_RT, first_T, alpha_RT, beta_RT, difference_RT)
    # Keys before `edge` are visible to every row: a causal block needs a mask only for the last few keys.
    edge = keys.start
    if visible.has_ranges_only and visible.window is None and visible.is_causal:
        edge = min(max(rows.start + visible.offset + 1, keys.start), keys.stop)
    seen = visible.block(rows, slice(edge, keys.stop)) if edge < keys.stop else None
    hidden = None if seen is None else ~(seen[0, heads] if seen.shape[1] > 1 else seen[0])
    masked = slice(edge - keys.start, None)

    if hidden is not None:
        scores[..., masked].masked_fill_(hidden, -torch.inf)
    largest_RT = scores.amax(-1)
    largest_RT = largest_RT.masked_fill(largest_RT == -torch.inf, 0)
    scores.sub_(largest_RT[..., None])
    powers = scores.exp()
    if hidden is not None:
        scores[..., masked].masked_fill_(hidden, 0)  # 0 * -inf is NaN
    total_RT = powers.sum(-1)
    whole_RT = total_RT.clamp(min=torch.finfo(total_RT.dtype).tiny)  # avoids 0 / 0 in rows without visible keys
    entropy_RT = whole_RT.log() - torch.linalg.vecdot(powers, scores) / whole_RT

    kept_RT = total_RT / whole_RT  # softmax mass of the keys: exactly 1 without a sink; NaN stays NaN
    if sink_RT is not None:
        kept_RT = torch.sigmoid(total_RT.log() + largest_RT - sink_RT)
    softmax_sum_RT = row_sum_RT = alpha_RT * kept_RT
    factor_RT = row_sum_RT / whole_RT  # w = factor * powers + beta
    first_softmax_RT, sees_RT = _first_token(
        query_RTD, key_SD, first_key_T, largest_RT, factor_RT, visible, heads, rows
    )
    first_RT = first_softmax_RT if beta_RT is None else first_softmax_RT + beta_RT * sees_RT
    uniform_RT = sees_RT / seen_keys_RT.clamp(min=1)
    if difference_RT is not None:
        weights = powers.mul_(factor_RT[..., None])
        if beta_RT is not None:
            weights = weights.add_(beta_RT[..., None])
            if hidden is not None:
                weights[..., masked].masked_fill_(hidden, 0)
        first_RT, first_softmax_RT, softmax_sum_RT = (
            minus_next(x, difference_RT) for x in (first_RT, first_softmax_RT, softmax_sum_RT)
        )
        row_sum_RT, absolute_RT, negative_RT, weights_entropy_RT = of_signed(
            minus_next(weights, difference_RT[..., None])
        )
    elif beta_RT is None:
        absolute_RT = row_sum_RT.abs()
        negative_RT = (row_sum_RT < 0).to(row_sum_RT.dtype)
        weights_entropy_RT = entropy_RT.masked_fill(row_sum_RT == 0, torch.nan)
    else:
        row_sum_RT = row_sum_RT + seen_keys_RT * beta_RT
        weights = powers.mul_(factor_RT[..., None]).add_(beta_RT[..., None]).abs_()
        if hidden is not None:
            weights[..., masked].masked_fill_(hidden, 0)
        absolute_RT = weights.sum(-1)
        # A difference of two sums: if no weight can be negative, it would be rounding error.
        can_be_RT = (beta_RT < 0) | (alpha_RT < 0)
        negative_RT = ((absolute_RT - row_sum_RT) / (2 * absolute_RT)).clamp(0, 1) * can_be_RT
        logs = torch.xlogy(weights, weights, out=scores).sum(-1)
        weights_entropy_RT = absolute_RT.log() - logs / absolute_RT
        nothing = absolute_RT == 0
        negative_RT = negative_RT.masked_fill(nothing, 0)
        weights_entropy_RT = weights_entropy_RT.masked_fill(nothing, torch.nan)
    return torch.stack(
        [row_sum_RT, absolute_RT, negative_RT, first_RT, first_softmax_RT, softmax_sum_RT, uniform_RT, entropy_RT,
         weights_entropy_RT]
    )  # fmt: skip


def _first_token(
    query_RTD: Tensor,
    key_SD: Tensor,
    first_key_T: Tensor,
    largest_RT: Tensor,
    factor_RT: Tensor,
    visible: Visibility,
    heads: slice,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """(alpha p of the first token of each row, 0 if the row does not see it; whether it sees it, as 0 or 1)."""
    first_key_T = first_key_T.to(key_SD.device)
    exists_T = first_key_T >= 0
    index_T = first_key_T.clamp(min=0)
    score_RT = torch.linalg.vecdot(query_RTD, key_SD[index_T])
    position_T = torch.arange(rows.start, rows.stop, device=key_SD.device) + visible.offset
    seen = exists_T
    if visible.is_causal:
        seen = seen & (index_T <= position_T)
    if visible.window is not None:
        seen = seen & ((position_T - index_T).abs() < visible.window)
    if visible.pair_mask is not None:
        pair = visible.pair_mask[0, :, rows]
        pair = pair[heads] if pair.shape[0] > 1 else pair
        seen = seen & pair.gather(-1, index_T[None, :, None].expand(pair.shape[0], -1, 1)).squeeze(-1)
    # Clamped: the score of a masked first token may be far above every visible score.
    weight_RT = (score_RT - largest_RT).clamp(max=0).exp() * factor_RT
    return weight_RT.masked_fill(~seen, 0), seen.to(weight_RT.dtype).expand_as(weight_RT)


def first_keys(visibility: Visibility) -> Tensor:
    """The first real key of each query's document, [1|B, T]; -1 if there is none."""
    real_BS = visibility.key_mask
    if visibility.pair_mask is not None:
        shown_BS = visibility.pair_mask.flatten(1, 2).any(1)
        real_BS = shown_BS if real_BS is None else real_BS & shown_BS
    queries, keys, device = visibility.num_queries, visibility.num_keys, visibility.device
    position_S = torch.arange(keys, device=device)
    if real_BS is None:
        real_BS = torch.ones(1, keys, dtype=torch.bool, device=device)
    candidate_BS = torch.where(real_BS, position_S, keys)
    if visibility.query_segments is None or visibility.key_segments is None:
        none = torch.full((len(candidate_BS), 1), keys, device=device)
        first = torch.cat([candidate_BS, none], 1).amin(1, keepdim=True).expand(-1, queries)
    else:
        both = torch.cat([visibility.query_segments, visibility.key_segments], 1)
        ids, ranks = torch.unique(both, return_inverse=True)
        table = torch.full((len(both), len(ids)), keys, device=device)
        table.scatter_reduce_(1, ranks[:, queries:], candidate_BS.expand(len(both), -1), "amin")
        first = table.gather(1, ranks[:, :queries])
    return first.masked_fill(first == keys, -1)


def logit_sums(
    query: Tensor, key: Tensor, visibility: Visibility, softmax_scale: float, token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum, count) of the visible scaled logits of each head, [H] each; their quotient is the mean in Figure 2.

    Exact without computing scores: sum_i sum_j q_i·k_j = sum_i q_i · (sum of visible k), and sums of visible keys are
    prefix sums (`Visibility.sum_keys`). fp64 sums, one key-value head at a time.
    """
    batch, heads, queries, _ = query.shape
    groups = key.shape[1]
    exact = _exact(query.device)
    counts_BHT = visibility.count().expand(batch, heads, queries)
    if token_mask is not None:
        counts_BHT = counts_BHT.masked_fill(~token_mask[:, None], 0)
    sums = []
    for g in range(groups):
        own = slice(g * heads // groups, (g + 1) * heads // groups)
        key_sum_BHTD = visibility.sum_keys(key[:, g : g + 1].to(exact))
        if key_sum_BHTD.shape[1] == heads and heads > 1:  # a mask that differs between heads
            key_sum_BHTD = key_sum_BHTD[:, own]
        for head in range(own.start, own.stop):
            key_sum_BTD = key_sum_BHTD[:, min(head - own.start, key_sum_BHTD.shape[1] - 1)]
            logits_BT = torch.linalg.vecdot(query[:, head].to(exact), key_sum_BTD)
            if token_mask is not None:
                logits_BT = logits_BT.masked_fill(~token_mask, 0)
            sums.append(logits_BT.sum() * softmax_scale)
    return torch.stack(sums), counts_BHT.sum((0, 2))


def weight_map(
    query: Tensor,
    key: Tensor,
    length: int,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    visibility: Visibility,
    softmax_scale: float,
    difference: Tensor | None = None,
    weights: str = "softmax",
) -> Tensor:
    """The signed weights of the first `length` queries and keys of the first row of the batch: [H, length, length].

    The softmax includes all keys that these queries see, also those outside of the map.
    """
    dtype, heads = row_dtype(query.dtype), query.shape[1]
    visible = visibility.for_batch(slice(0, 1))
    length = min(length, query.shape[2], key.shape[2])
    maps = torch.zeros(heads, length, length, dtype=dtype, device=query.device)
    repeats = heads // key.shape[1]
    for head in range(heads):
        for rows, keys in _blocks(visible, 1, length):
            scores = query[0, head, rows].to(dtype) @ key[0, head // repeats, keys].to(dtype).T * softmax_scale
            seen = visible.block(rows, keys)
            hidden = None if seen is None else ~seen[0, head if seen.shape[1] > 1 else 0]
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            if weights != "softmax":
                shown = torch.ones_like(scores, dtype=torch.bool) if hidden is None else ~hidden
                part = weigh(weights, scores[None], shown[None], shown.sum(-1)[None])[0]
            else:
                if sink is not None:
                    of_rows = sink[head, None, None] if sink.dim() == 1 else sink[0, head, rows, None]
                    scores = torch.cat([scores, of_rows.to(dtype).expand(len(scores), 1)], 1)
                part = torch.softmax(scores, -1)[:, : keys.stop - keys.start]
            if alpha is not None:
                part = part * alpha[0, head, rows, None]
            if beta is not None:
                part = part + beta[0, head, rows, None]
            if hidden is not None:
                part = part.masked_fill(hidden, 0)
            stop = max(min(keys.stop, length), keys.start)
            maps[head, rows, keys.start : stop] = part[:, : stop - keys.start]
    if difference is None:
        return maps
    groups = maps.split(repeats), difference[0, :, :length, None].to(dtype).split(repeats)
    return torch.cat([minus_next(*pair) for pair in zip(*groups, strict=True)])


def is_saturated(alpha: Tensor) -> Tensor:
    """True if alpha is exactly 0 or 1, where linear clipping has no gradient."""
    return (alpha <= 0) | (alpha >= 1)


def is_gate_saturated(gate: Tensor) -> Tensor:
    return (gate < GATE_CLOSED) | (gate > GATE_OPEN)


def share_sums(values: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count) per head, [H], over the real tokens of [B, H, T] or [B, H, T, D]; for booleans, shares."""
    values = values.flatten(3) if values.dim() > 3 else values[..., None]
    sums_BHT = values.sum(-1, dtype=torch.int64 if values.dtype == torch.bool else _exact(values.device))
    counts_BHT = torch.full_like(sums_BHT, values.shape[-1])
    if token_mask is not None:
        sums_BHT = sums_BHT.masked_fill(~token_mask[:, None], 0)
        counts_BHT = counts_BHT.masked_fill(~token_mask[:, None], 0)
    return sums_BHT.sum((0, 2)), counts_BHT.sum((0, 2))


def finite_or_none(values: Any) -> Any:
    """Numbers, or nested lists of numbers, with None for NaN and infinities, which JSON lacks."""
    if isinstance(values, list):
        return [finite_or_none(each) for each in values]
    return values if math.isfinite(values) else None


def _blocks(visible: Visibility, heads: int, queries: int | None = None) -> Iterator[tuple[slice, slice]]:
    """(rows, keys): a few queries and the range of keys that they may see; rows without any key are skipped."""
    queries = visible.num_queries if queries is None else queries
    budget = BLOCK_SCORES.get(visible.device.type, BLOCK_SCORES["cpu"])
    first = 0
    while first < queries:
        rows = min(queries - first, MOST_ROWS)
        start, stop = visible.key_bounds(first, first + rows - 1)
        while rows > 1 and heads * rows * (stop - start) > budget:
            rows //= 2
            start, stop = visible.key_bounds(first, first + rows - 1)
        if stop > start:
            yield slice(first, first + rows), slice(start, stop)
        first += rows


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no fp64
