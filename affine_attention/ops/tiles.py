"""Softmax attention over any visibility, split into tiles that PyTorch's kernels support without a T x S mask.

Tiles are unmasked rectangles, causal squares and, for windows and segments, blocks of query rows with a small mask.
Tiles of the same rows are merged by their log-sum-exp. The sink is merged in the same way:

F5  lse = log(exp(lse_1) + exp(lse_2));  O = O_1 exp(lse_1 - lse) + O_2 exp(lse_2 - lse)
F6  the sink is a tile with log-sum-exp `sink` and O = 0

The backward runs the backward of each tile with the merged O and lse, which gives exact gradients.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .call import sink_by_row
from .dtypes import row_dtype
from .sdpa import PLAIN, Kernel, choose_kernel
from .visibility import Visibility

QUERY_BLOCK = 256  # rows that share one small mask; also the query block of the CPU kernel


class Tile(NamedTuple):
    """A block of queries x keys for one kernel call. Causal tiles are square and aligned to the diagonal.

    Bounds are integers, not slices: a compiled graph keeps an integer dynamic but specialises on one inside a slice.
    """

    first_query: int
    stop_query: int
    first_key: int
    stop_key: int
    is_causal: bool = False
    mask: Literal["none", "keys", "pairs"] = "none"

    @property
    def queries(self) -> slice:
        return slice(self.first_query, self.stop_query)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.stop_key)

    def covers(self, num_queries: int, num_keys: int) -> bool:
        """True if the tile is the whole call."""
        starts = self.first_query == 0 and self.first_key == 0
        return starts and self.stop_query == num_queries and self.stop_key == num_keys


def plan(visibility: Visibility, device_type: str) -> list[list[Tile]]:
    """Returns groups of tiles with the same query rows; rows outside of all groups see no key."""
    queries, keys = visibility.num_queries, visibility.num_keys
    if queries == 0 or keys == 0:
        return []
    ranges_only = visibility.window is None and visibility.query_segments is None and visibility.pair_mask is None
    # Only the CPU kernel supports a [B, 1, 1, S] mask together with is_causal without expanding it.
    if ranges_only and (visibility.key_mask is None or device_type == "cpu"):
        return _rectangles(queries, keys, visibility.is_causal, "none" if visibility.key_mask is None else "keys")
    groups = []
    for first in range(0, queries, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, queries)
        start, stop = visibility.key_bounds(first, last - 1)
        if stop > start:
            groups.append([Tile(first, last, start, stop, mask="pairs")])
    return groups


def _rectangles(queries: int, keys: int, is_causal: bool, mask: Literal["none", "keys"]) -> list[list[Tile]]:
    if not is_causal or queries == 1:
        return [[Tile(0, queries, 0, keys, mask=mask)]]
    # Bottom-right: the last min(T, S) queries and keys form a causal square; all these queries see the keys before it.
    size = min(queries, keys)
    square = Tile(queries - size, queries, keys - size, keys, is_causal=True, mask=mask)
    if keys == size:
        return [[square]]
    return [[Tile(queries - size, queries, 0, keys - size, mask=mask), square]]


def softmax_forward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, visibility: Visibility, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
    """Returns the softmax output O [B, H, T, D], its log-sum-exp [B, H, T], a mask of the rows that see no key
    [B, H, T] (None: there are none), and `aux`, the auxiliary values of the tiles for `softmax_backward`.

    The log-sum-exp of a row that sees no key is +inf, so that exp(s - lse) is 0 in every backward.
    """
    query, key, value = (_unit_stride(x) for x in (query, key, value))
    aux, parts = [], []
    for tiles in plan(visibility, query.device.type):
        out, lse, empty, tile_aux = _tile_forward(query, key, value, tiles[0], visibility, softmax_scale)
        aux.append(tile_aux)
        for tile in tiles[1:]:
            tile_out, tile_lse, tile_empty, tile_aux = _tile_forward(query, key, value, tile, visibility, softmax_scale)
            aux.append(tile_aux)
            out, lse = _merge(out, lse, tile_out, tile_lse)
            empty = None if empty is None or tile_empty is None else empty & tile_empty
        parts.append((tiles[0], out, lse, empty))

    num_queries = query.shape[2]
    if len(parts) == 1 and parts[0][0].first_query == 0 and parts[0][0].stop_query == num_queries:
        _, out, lse, empty = parts[0]
    else:
        out = torch.zeros_like(query)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=row_dtype(query.dtype), device=query.device)
        empty = torch.ones(query.shape[:3], dtype=torch.bool, device=query.device)
        for tile, part_out, part_lse, part_empty in parts:
            out[:, :, tile.queries] = part_out
            lse[:, :, tile.queries] = part_lse
            empty[:, :, tile.queries] = False if part_empty is None else part_empty
    if empty is not None and _can_read_values(query) and not empty.any():
        empty = None

    if sink is not None:
        row_sink = sink_by_row(sink.to(lse.dtype)).expand_as(lse)
        if empty is not None and sink.dim() == 3:
            row_sink = row_sink.masked_fill(empty, -torch.inf)  # a row that sees no key is zero, whatever its sink
        with_sink = torch.logaddexp(lse, row_sink)
        out = (out * _exp_difference(lse, with_sink)[..., None]).to(query.dtype)
        lse = with_sink
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), empty, aux


def softmax_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    visibility: Visibility,
    softmax_scale: float,
    aux: list[Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `softmax_forward` with respect to query, key and value, tile by tile."""
    query, key, value, grad_out = (_unit_stride(x) for x in (query, key, value, grad_out))
    tiles = [tile for tiles in plan(visibility, query.device.type) for tile in tiles]
    if len(tiles) == 1 and tiles[0].covers(query.shape[2], key.shape[2]):
        return _tile_backward(grad_out, query, key, value, out, lse, tiles[0], visibility, softmax_scale, aux[0])
    total = row_dtype(query.dtype)
    grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=total) for x in (query, key, value))
    for tile, tile_aux in zip(tiles, aux, strict=True):
        dq, dk, dv = _tile_backward(grad_out, query, key, value, out, lse, tile, visibility, softmax_scale, tile_aux)
        grad_query[:, :, tile.queries] += dq
        grad_key[:, :, tile.keys] += dk
        grad_value[:, :, tile.keys] += dv
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _tile_forward(
    query: Tensor, key: Tensor, value: Tensor, tile: Tile, visibility: Visibility, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Any]:
    visible, keys = _tile_mask(tile, visibility)
    query, key, value = query[:, :, tile.queries], key[:, :, keys], value[:, :, keys]
    kernel, _ = choose_kernel(query, key, visible is not None, tile.is_causal)
    bias = _as_bias(visible, query.dtype)
    out, lse, aux = kernel.forward(query, key, value, bias, tile.is_causal, softmax_scale)
    if query.device.type == "cpu":
        out, lse = _with_nan_queries(query, out, lse)
    if visible is None:
        return out, lse, None, aux
    empty = _empty_rows(visible, tile.is_causal, query.shape[2]).expand(lse.shape)
    broken = lse.isnan() & ~empty
    if _can_read_values(query) and broken.any():
        # Kernels add the bias: if the score of a masked key is +inf, inf - inf makes the whole row NaN.
        plain_out, plain_lse, _ = PLAIN.forward(query, key, value, bias, tile.is_causal, softmax_scale)
        out, lse = torch.where(broken[..., None], plain_out, out), torch.where(broken, plain_lse, lse)
        aux = PLAIN.name
    # Kernels differ in what they return for a row without keys (0, NaN, lse 0), so set it here.
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf), empty, aux


def _tile_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    visibility: Visibility,
    softmax_scale: float,
    aux: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    visible, keys = _tile_mask(tile, visibility)
    rows = tile.queries
    query, key, value = query[:, :, rows], key[:, :, keys], value[:, :, keys]
    kernel: Kernel = PLAIN
    if aux != PLAIN.name:
        kernel, _ = choose_kernel(query, key, visible is not None, tile.is_causal)
    arguments = (
        grad_out[:, :, rows], query, key, value, out[:, :, rows], lse[:, :, rows].contiguous(), aux,
        _as_bias(visible, query.dtype), tile.is_causal, softmax_scale,
    )  # fmt: skip
    dq, dk, dv = kernel.backward(*arguments)
    if kernel is not PLAIN and _can_read_values(query) and dq.isnan().any():
        # Kernels multiply the weight 0 of a masked key by grad . v, which overflows for values near 1e38.
        dq, dk, dv = PLAIN.backward(*arguments)
    if keys.start != tile.first_key or keys.stop != tile.stop_key:
        margins = (0, 0, keys.start - tile.first_key, tile.stop_key - keys.stop)
        dk, dv = pad(dk, margins), pad(dv, margins)
    return dq, dk, dv


def _can_read_values(x: Tensor) -> bool:
    """True if reading values neither synchronises with a device nor breaks a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _with_nan_queries(query: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Sets rows with a NaN query to NaN: the CPU kernel may return out = 0 and lse = 0, as for a row without keys."""
    suspect = lse == 0
    if _can_read_values(query) and not suspect.any():
        return out, lse
    wrong = suspect & query.isnan().any(-1)
    return out.masked_fill(wrong[..., None], torch.nan), lse.masked_fill(wrong, torch.nan)


def _tile_mask(tile: Tile, visibility: Visibility) -> tuple[Tensor | None, slice]:
    """The boolean mask of a tile and its keys, both trimmed to the keys that some row of the tile sees."""
    if tile.mask == "none":
        return None, tile.keys
    if tile.mask == "keys":
        assert visibility.key_mask is not None
        return visibility.key_mask[:, None, None, tile.keys], tile.keys
    visible = visibility.block(tile.queries, tile.keys)
    if visible is None or not _can_read_values(visible):
        return visible, tile.keys
    seen = visible.flatten(0, 2).any(0).nonzero()
    if seen.numel() == 0:
        return visible[..., :1], slice(tile.first_key, tile.first_key + 1)
    first, last = int(seen[0]), int(seen[-1])
    return visible[..., first : last + 1], slice(tile.first_key + first, tile.first_key + last + 1)


def _empty_rows(visible: Tensor, is_causal: bool, num_rows: int) -> Tensor:
    """Rows of a masked tile that see no key, [1|B, 1|H, rows]. The mask of a causal tile is a key mask."""
    if is_causal:
        return ~visible[:, :, 0].cummax(dim=-1).values.bool()
    return ~visible.any(-1).expand(-1, -1, num_rows)


def _as_bias(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)


def _merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """F5."""
    lse = torch.logaddexp(lse_1, lse_2)
    out = out_1 * _exp_difference(lse_1, lse)[..., None] + out_2 * _exp_difference(lse_2, lse)[..., None]
    return out.to(out_1.dtype), lse


def _exp_difference(lse_part: Tensor, lse: Tensor) -> Tensor:
    """exp(lse_part - lse), and 0 if the part is empty, where -inf minus -inf would be NaN."""
    return torch.exp(lse_part - lse).masked_fill(lse_part == -torch.inf, 0)


def _unit_stride(x: Tensor) -> Tensor:
    """Copies x if its last stride is not 1, which kernels do not support and for which some are silently wrong."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
