"""Combines causal, window, segments and masks: which keys each query sees, and sums over them.

Everything that depends on the visible keys is computed here: blocks of the mask, the number of visible keys n_i, the
sum of values over them, and its transpose. Sums never need a T x S tensor: after sorting the keys by (segment,
position), the visible keys of a query form a contiguous range, and a sum over a range takes at most two look-ups in
tables of partial sums. Only a dense `pair_mask`, which already is T x S, is multiplied with the values, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PAIR_BLOCK = 256  # query rows of a dense mask per step
FEW_QUERIES = 16  # up to this many queries (decoding), a matmul with the mask is cheaper than tables of partial sums


@dataclass(frozen=True, eq=False)
class Visibility:
    """The visibility of one call; a key is visible if all given conditions allow it.

    Query i has position i + S - T (bottom-right aligned: the last query sees the last key).
    `window` allows keys j with |position - j| < window; with `is_causal` these are the last `window` keys.
    """

    batch: int
    num_queries: int
    num_keys: int
    device: torch.device
    is_causal: bool = False
    window: int | None = None
    query_segments: Tensor | None = None  # [B, T]
    key_segments: Tensor | None = None  # [B, S]
    key_mask: Tensor | None = None  # [B, S], True = visible
    pair_mask: Tensor | None = None  # [B, 1|H, T, S], True = visible

    @property
    def offset(self) -> int:
        """Position of query 0."""
        return self.num_keys - self.num_queries

    @property
    def has_ranges_only(self) -> bool:
        """True if only causal and window are used, so that the visible keys of a row do not depend on data."""
        return self.query_segments is None and self.key_mask is None and self.pair_mask is None

    @property
    def _sees_all(self) -> bool:
        """True if every query sees every key, apart from padding and a dense mask."""
        return not self.is_causal and self.window is None and self.query_segments is None

    def for_batch(self, rows: slice) -> Visibility:
        """The visibility of some rows of the batch."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return replace(
            self,
            batch=len(range(self.batch)[rows]),
            query_segments=part(self.query_segments),
            key_segments=part(self.key_segments),
            key_mask=part(self.key_mask),
            pair_mask=part(self.pair_mask),
        )

    def key_bounds(self, first_query: int, last_query: int) -> tuple[int, int]:
        """The keys [start, stop) that causal and window allow for the queries first..last (inclusive)."""
        start, stop = 0, self.num_keys
        if self.is_causal:
            stop = last_query + self.offset + 1
        if self.window is not None:
            start = first_query + self.offset - self.window + 1
            stop = min(stop, last_query + self.offset + self.window)
        start = min(max(start, 0), self.num_keys)
        return start, max(start, min(stop, self.num_keys))

    def block(self, queries: slice, keys: slice) -> Tensor | None:
        """The boolean mask [1|B, 1|H, rows, cols] of a block; None if every pair is visible."""
        position_T = torch.arange(queries.start, queries.stop, device=self.device)[:, None] + self.offset
        key_S = torch.arange(keys.start, keys.stop, device=self.device)[None, :]
        visible = None

        def also(term: Tensor) -> Tensor:
            return term if visible is None else visible & term

        if self.is_causal and keys.stop > queries.start + self.offset + 1:
            visible = also((key_S <= position_T)[None, None])
        if self.window is not None:
            visible = also(((position_T - key_S).abs() < self.window)[None, None])
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[:, queries, None] == self.key_segments[:, None, keys]
            visible = also(same[:, None])
        if self.key_mask is not None:
            visible = also(self.key_mask[:, None, None, keys])
        if self.pair_mask is not None:
            visible = also(self.pair_mask[:, :, queries, keys])
        if visible is None:
            return None
        rows, cols = queries.stop - queries.start, keys.stop - keys.start
        return visible.expand(*visible.shape[:2], rows, cols)

    def sees(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key, for tensors of indices that broadcast."""
        distance = query + self.offset - key
        visible = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            visible = visible & (distance.abs() < self.window)
        if self.query_segments is not None and self.key_segments is not None:
            visible = visible & (self.query_segments[batch, query] == self.key_segments[batch, key])
        if self.key_mask is not None:
            visible = visible & self.key_mask[batch, key]
        if self.pair_mask is not None:
            visible = visible & self.pair_mask[batch, head if self.pair_mask.shape[1] > 1 else head * 0, query, key]
        return visible

    def dense(self) -> Tensor:
        """The dense mask [1|B, 1|H, T, S], for the reference implementation and diagnostics only."""
        mask = self.block(slice(0, self.num_queries), slice(0, self.num_keys))
        if mask is None:
            mask = torch.ones(1, 1, self.num_queries, self.num_keys, dtype=torch.bool, device=self.device)
        return mask

    def count(self) -> Tensor:
        """n_i, the number of keys that each query sees: [1|B, 1|H, T], int64."""
        if self.pair_mask is not None:
            blocks = [mask.sum(-1) for _, mask in self._mask_blocks()]
            return torch.cat(blocks, dim=2) if blocks else self.pair_mask.sum(-1)
        start_T, stop_T = self.key_ranges()
        if self.has_ranges_only:
            return (stop_T - start_T)[None, None]
        ones_BS1 = torch.ones(self.batch, 1, self.num_keys, 1, dtype=torch.int64, device=self.device)
        return self.sum_keys(ones_BS1).squeeze(-1)

    def sees_own_key(self) -> Tensor | None:
        """True where a query sees the key at its own position, [1|B, 1|H, T]; None if every query does.

        Causal and window always allow that key.
        """
        query_T = torch.arange(self.num_queries, device=self.device)
        inside_T = query_T + self.offset >= 0
        own_T = (query_T + self.offset).clamp(min=0)
        if self.num_keys == 0:
            return torch.zeros(1, 1, self.num_queries, dtype=torch.bool, device=self.device)
        terms = [inside_T[None, None]] if self.offset < 0 else []
        if self.key_mask is not None:
            terms.append(self.key_mask[:, None, own_T])
        packed = self.query_segments is self.key_segments and self.offset == 0
        if self.query_segments is not None and self.key_segments is not None and not packed:
            terms.append((self.query_segments == self.key_segments[:, own_T])[:, None])
        if self.pair_mask is not None:
            terms.append(self.pair_mask[:, :, query_T, own_T])
        if not terms:
            return None
        seen = terms[0]
        for term in terms[1:]:
            seen = seen & term
        return seen

    def sum_keys(self, x_BGSD: Tensor) -> Tensor:
        """Sum of x over the visible keys of each query: [B, G, T, D], in the dtype of x.

        With a pair mask that differs between heads, the result has all query heads: [B, H, T, D].
        """
        if self.key_mask is not None:
            x_BGSD = x_BGSD.masked_fill(~self.key_mask[:, None, :, None], 0)
        if self.pair_mask is not None:
            return self._sum_keys_by_matmul(x_BGSD)
        if self.num_queries == 0 or self.num_keys == 0:
            return x_BGSD.new_zeros(self.batch, x_BGSD.shape[1], self.num_queries, x_BGSD.shape[-1])
        if self._sees_all:
            return x_BGSD.sum(dim=2, keepdim=True).expand(-1, -1, self.num_queries, -1)
        if self.is_causal and self.window is None and self.query_segments is None and self.offset >= 0:
            before = x_BGSD[:, :, : self.offset].sum(dim=2, keepdim=True)
            return before + x_BGSD[:, :, self.offset :].cumsum(dim=2)
        if self.num_queries <= FEW_QUERIES:
            return self._sum_keys_by_matmul(x_BGSD)
        return _sum_ranges(x_BGSD, self.key_segments, self.query_segments, *self.key_ranges())

    def sum_queries(self, x_BGTD: Tensor) -> Tensor:
        """The transpose of `sum_keys`: sum of x over the queries that see each key, [B, G, S, D]."""
        if self.pair_mask is not None:
            summed = self._sum_queries_by_matmul(x_BGTD)
        else:
            summed = self._sum_queries_by_range(x_BGTD)
        if self.key_mask is not None:
            summed = summed.masked_fill(~self.key_mask[:, None, :, None], 0)
        return summed

    def _sum_queries_by_range(self, x_BGTD: Tensor) -> Tensor:
        if self.num_queries == 0 or self.num_keys == 0:
            return x_BGTD.new_zeros(self.batch, x_BGTD.shape[1], self.num_keys, x_BGTD.shape[-1])
        if self._sees_all:
            return x_BGTD.sum(dim=2, keepdim=True).expand(-1, -1, self.num_keys, -1)
        if self.is_causal and self.window is None and self.query_segments is None and self.offset >= 0:
            # Sum from the end instead of total - prefix: cancellation would round the sum of the later rows.
            after = x_BGTD.flip(2).cumsum(dim=2).flip(2)
            return torch.cat([after[:, :, :1].expand(-1, -1, self.offset, -1), after], dim=2)
        return _sum_ranges(x_BGTD, self.query_segments, self.key_segments, *self._query_ranges())

    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """Keys [start, stop) that causal and window allow for each query."""
        position_T = torch.arange(self.num_queries, device=self.device) + self.offset
        start_T = torch.zeros_like(position_T)
        stop_T = torch.full_like(position_T, self.num_keys)
        if self.is_causal:
            stop_T = position_T + 1
        if self.window is not None:
            start_T = position_T - self.window + 1
            stop_T = torch.minimum(stop_T, position_T + self.window)
        start_T = start_T.clamp(0, self.num_keys)
        return start_T, torch.maximum(start_T, stop_T.clamp(0, self.num_keys))

    def _query_ranges(self) -> tuple[Tensor, Tensor]:
        """Queries [start, stop) that see each key according to causal and window."""
        query_S = torch.arange(self.num_keys, device=self.device) - self.offset
        start_S = torch.zeros_like(query_S)
        stop_S = torch.full_like(query_S, self.num_queries)
        if self.is_causal:
            start_S = query_S
        if self.window is not None:
            start_S = torch.maximum(start_S, query_S - self.window + 1)
            stop_S = query_S + self.window
        start_S = start_S.clamp(0, self.num_queries)
        return start_S, torch.maximum(start_S, stop_S.clamp(0, self.num_queries))

    def _mask_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields (queries, mask) for blocks of rows of the dense mask."""
        for first in range(0, self.num_queries, PAIR_BLOCK):
            queries = slice(first, min(first + PAIR_BLOCK, self.num_queries))
            mask = self.block(queries, slice(0, self.num_keys))
            if mask is None:
                mask = torch.ones(1, 1, queries.stop - first, self.num_keys, dtype=torch.bool, device=self.device)
            yield queries, mask

    def _sum_keys_by_matmul(self, x_BGSD: Tensor) -> Tensor:
        # CUDA has no product of integer matrices; fp64 counts exactly up to 2^53.
        wide_BGSD = x_BGSD if x_BGSD.is_floating_point() else x_BGSD.to(torch.float64)
        blocks = []
        for _, mask in self._mask_blocks():
            x_BMSD, mask = _match_heads(wide_BGSD, mask)
            blocks.append(mask.to(wide_BGSD.dtype) @ x_BMSD)
        if not blocks:
            return x_BGSD.new_zeros(self.batch, x_BGSD.shape[1], 0, x_BGSD.shape[-1])
        return torch.cat(blocks, dim=2).to(x_BGSD.dtype)

    def _sum_queries_by_matmul(self, x_BGTD: Tensor) -> Tensor:
        total = x_BGTD.new_zeros(self.batch, x_BGTD.shape[1], self.num_keys, x_BGTD.shape[-1])
        for queries, mask in self._mask_blocks():
            x_block, mask = _match_heads(x_BGTD[:, :, queries], mask)
            total = total + mask.to(x_BGTD.dtype).mT @ x_block
        return total


def _match_heads(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats key-value heads to match a mask that differs between heads."""
    heads = mask.shape[1]
    if heads > 1 and x.shape[1] not in (1, heads):
        x = x.repeat_interleave(heads // x.shape[1], dim=1)
    return x, mask


def _sum_ranges(
    x: Tensor,
    source_segments: Tensor | None,
    target_segments: Tensor | None,
    start: Tensor,
    stop: Tensor,
) -> Tensor:
    """Sums x [B, G, n, D] over source positions [start, stop) of each target, within the target's segment.

    It does not subtract prefix sums: a huge or NaN value outside of a range must not affect the sum of the range. If
    `level` is the highest bit in which two positions first < last differ, they lie in the two halves of one block of
    2^(level+1) positions, and the sum over first..last is a suffix sum of the left half plus a prefix sum of the right.
    """
    batch, groups, num_sources, dim = x.shape
    num_targets = start.shape[-1]
    rows = x.transpose(1, 2).reshape(batch, num_sources, groups * dim)
    if source_segments is not None and target_segments is not None:
        order, start, stop = _sorted_ranges(source_segments, target_segments, start, stop)
        rows = rows.gather(1, order[:, :, None].expand_as(rows))
    else:
        start, stop = start.expand(batch, -1), stop.expand(batch, -1)

    size = 1 << max(num_sources - 1, 0).bit_length()
    rows = torch.nn.functional.pad(rows, (0, 0, 0, size - num_sources))
    empty = stop <= start
    first = start.masked_fill(empty, 0)
    last = (stop - 1).masked_fill(empty, 0)
    row_of_batch = torch.arange(batch, device=x.device)[:, None] * size

    def pick(table: Tensor, index: Tensor) -> Tensor:
        flat = (index + row_of_batch).reshape(-1)
        return table.reshape(batch * size, groups * dim).index_select(0, flat).view(batch, num_targets, groups * dim)

    summed = pick(rows, first)
    for level in range(size.bit_length() - 1):
        halves = rows.view(batch, size >> (level + 1), 2, 1 << level, groups * dim)
        suffix = halves[:, :, 0].flip(2).cumsum(2).flip(2)
        prefix = halves[:, :, 1].cumsum(2)
        table = torch.stack([suffix, prefix], dim=2)
        differs_here = ((first ^ last) >> level) == 1
        summed = torch.where(differs_here[:, :, None], pick(table, first) + pick(table, last), summed)
    summed = summed.masked_fill(empty[:, :, None], 0)
    return summed.view(batch, num_targets, groups, dim).transpose(1, 2)


def _sorted_ranges(
    source_segments: Tensor, target_segments: Tensor, start: Tensor, stop: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the sources by (segment, position) and moves each target's range [start, stop) into that order.

    Segments need not be contiguous and ids may be any integers: the sort key uses the rank of an id, not its value.
    """
    num_sources = source_segments.shape[1]
    sorted_ids, order = torch.sort(source_segments, dim=1, stable=True)
    target_segments = target_segments.contiguous()
    first = torch.searchsorted(sorted_ids, target_segments)
    last = torch.searchsorted(sorted_ids, target_segments, right=True)
    stride = num_sources + 1
    source_rank = torch.searchsorted(sorted_ids, sorted_ids.contiguous())
    keys = source_rank * stride + order
    lower = torch.searchsorted(keys, first * stride + start)
    upper = torch.searchsorted(keys, first * stride + stop)
    # A target whose segment id no source has would otherwise get the range of the next id.
    absent = first == last
    return order, lower.masked_fill(absent, 0), upper.masked_fill(absent, 0)
