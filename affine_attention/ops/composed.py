"""alpha * SDPA + beta * (sum of visible values): every device, no T x S matrix.

What is visible is cut into tiles that PyTorch's kernels can serve without a T x S mask: whole rectangles, causal
squares, and, for windows and segments, a few query rows at a time with a small mask. Tiles of the same rows are merged
through their log-sum-exp (F5), the sink enters the same way (F6), and the sums of values come from `Visibility`.

F5  lse = log(exp(lse_1) + exp(lse_2));  O = O_1 exp(lse_1 - lse) + O_2 exp(lse_2 - lse)
F6  the sink is a tile with log-sum-exp `sink` and O = 0
F7  out = gate * (alpha O + beta * sum of visible v)

The backward is B1 to B6 of ops/README.md: one call of the kernel's own backward for each tile, given the merged O and
lse, and one reversed sum of beta * E for the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from .dtypes import row_dtype, sum_dtype
from .sdpa import choose_kernel
from .shield import poison, shield
from .visibility import Visibility

QUERY_BLOCK = 256  # rows that share one small mask; the CPU kernel's own block of queries


@dataclass(frozen=True)
class Tile:
    """A block of (queries x keys) for one kernel call. Causal tiles are square and aligned to the diagonal."""

    queries: slice
    keys: slice
    is_causal: bool = False
    mask: Literal["none", "keys", "pairs"] = "none"


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
    softmax_scale: float,
) -> Tensor:
    """F1 to F7 for any visibility, differentiable once in every tensor."""
    dim = query.shape[-1]
    if query.device.type == "cuda" and dim % 8:
        # CUDA kernels read vectors of 8; zeros change neither scores nor sums.
        query, key, value = (pad(x, (0, -dim % 8)) for x in (query, key, value))
        gate = None if gate is None else pad(gate, (0, -dim % 8))
    out = _Composed.apply(query, key, value, alpha, beta, sink, gate, visibility, softmax_scale)
    return out[..., :dim]


def plan(visibility: Visibility, device_type: str) -> list[tuple[slice, list[Tile]]]:
    """Groups of query rows with the tiles that they need; rows that no tile covers see nothing."""
    queries, keys = visibility.num_queries, visibility.num_keys
    if queries == 0 or keys == 0:
        return []
    ranges_only = visibility.window is None and visibility.query_segments is None and visibility.pair_mask is None
    # Only the CPU kernel takes a [B, 1, 1, S] mask beside is_causal without expanding it.
    if ranges_only and (visibility.key_mask is None or device_type == "cpu"):
        mask: Literal["none", "keys"] = "none" if visibility.key_mask is None else "keys"
        return _rectangles(queries, keys, visibility.is_causal, mask)
    groups = []
    for first in range(0, queries, QUERY_BLOCK):
        rows = slice(first, min(first + QUERY_BLOCK, queries))
        start, stop = visibility.key_bounds(rows.start, rows.stop - 1)
        if stop > start:
            groups.append((rows, [Tile(rows, slice(start, stop), mask="pairs")]))
    return groups


def _rectangles(
    queries: int, keys: int, is_causal: bool, mask: Literal["none", "keys"]
) -> list[tuple[slice, list[Tile]]]:
    if not is_causal or queries == 1:
        rows = slice(0, queries)
        return [(rows, [Tile(rows, slice(0, keys), mask=mask)])]
    # Bottom-right: the last min(T, S) queries face a causal square, the keys before it are seen by all of them.
    size = min(queries, keys)
    rows = slice(queries - size, queries)
    tiles = [Tile(rows, slice(keys - size, keys), is_causal=True, mask=mask)]
    if keys > size:
        tiles.insert(0, Tile(rows, slice(0, keys - size), mask=mask))
    return [(rows, tiles)]


class _Composed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        alpha: Tensor | None,
        beta: Tensor | None,
        sink: Tensor | None,
        gate: Tensor | None,
        visibility: Visibility,
        softmax_scale: float,
    ) -> Tensor:
        clean_key, clean_value, broken = shield(key, value)
        softmax_out, lse, kept = _softmax_forward(query, clean_key, clean_value, sink, visibility, softmax_scale)
        ctx.save_for_backward(query, key, value, alpha, beta, gate, softmax_out, lse, sink)
        ctx.visibility, ctx.softmax_scale, ctx.kept = visibility, softmax_scale, kept

        out = _scale_and_shift(softmax_out, clean_value, alpha, beta, visibility)
        poison_BHT1 = poison(broken, visibility, query.shape[1], out.dtype)
        if poison_BHT1 is not None:
            out = out + poison_BHT1
        if gate is not None:
            out = gate * out
        # Without alpha, beta and gate this is the tensor that is saved: nothing is kept twice.
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):
        *tensors, sink = ctx.saved_tensors
        chunks = _batch_chunks(tensors[0])
        if len(chunks) == 1:
            grads = _gradients(
                grad_out, *tensors, sink, ctx.visibility, ctx.softmax_scale, ctx.kept, ctx.needs_input_grad
            )
            return *grads, None, None
        total: list[Tensor | None] = [None] * 7
        for rows in chunks:
            part = _gradients(
                grad_out[rows], *(None if x is None else x[rows] for x in tensors), sink,
                ctx.visibility.for_batch(rows), ctx.softmax_scale, ctx.kept, ctx.needs_input_grad,
            )  # fmt: skip
            for index, (name, grad) in enumerate(zip(GRADIENTS, part, strict=True)):
                if grad is None:
                    continue
                if name == "sink":
                    total[index] = grad if total[index] is None else total[index] + grad
                    continue
                if total[index] is None:
                    total[index] = grad.new_empty((grad_out.shape[0], *grad.shape[1:]))
                total[index][rows] = grad
            del part, grad  # else a part lives on beside the next one
        return *total, None, None


GRADIENTS = ("query", "key", "value", "alpha", "beta", "sink", "gate")
CHUNK_ELEMENTS = 2**20  # of query: a part of the backward whose temporaries do not show in the peak memory


def _batch_chunks(query: Tensor) -> list[slice]:
    """Parts of the batch for one pass each; on other devices than the CPU one launch for all is faster."""
    batch = query.shape[0]
    parts = min(batch, query.numel() // CHUNK_ELEMENTS) if query.device.type == "cpu" else 1
    size = -(-batch // max(parts, 1)) if batch else 1
    return [slice(first, min(first + size, batch)) for first in range(0, batch, size)] or [slice(0, 0)]


def _gradients(
    grad_out, query, key, value, alpha, beta, gate, softmax_out, lse, sink, visibility, softmax_scale, kept, needed
):
    """B1 to B6, in the order of GRADIENTS; None for what is not needed."""
    rows = row_dtype(query.dtype)
    grad_query = grad_key = grad_value = grad_alpha = grad_beta = grad_sink = grad_gate = None
    key, value, _ = shield(key, value)
    groups = value.shape[1]

    if gate is not None and needed[6]:
        grad_gate = (grad_out * _scale_and_shift(softmax_out, value, alpha, beta, visibility)).to(gate.dtype)
    inner = grad_out if gate is None else grad_out * gate  # E of design.md section 2

    row_grad = _row_dot(inner, softmax_out) if alpha is not None or sink is not None else None
    if alpha is not None and needed[3]:
        grad_alpha = row_grad.to(alpha.dtype)
    if sink is not None and needed[5]:
        delta = row_grad if alpha is None else row_grad * alpha.to(rows)
        grad_sink = -(torch.exp(sink.to(rows)[:, None] - lse) * delta).sum((0, 2)).to(sink.dtype)
    if beta is not None and needed[4]:
        sums = _value_sums(value, beta, visibility)  # made again: cheaper than keeping it
        grad_beta = _row_dot(_split_heads(inner, sums.shape[1]), sums[:, :, None]).flatten(1, 2).to(beta.dtype)
        del sums

    if any(needed[:3]):
        from_beta = None if beta is None else _beta_grad_value(inner, beta, groups, visibility)
        if alpha is not None:
            # The CPU kernel's backward copies a gradient that does not lie in memory as [B, T, H, D].
            laid_out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
            inner = torch.mul(inner, alpha[..., None], out=laid_out.transpose(1, 2))
        grad_query, grad_key, grad_value = _softmax_backward(
            inner.to(query.dtype), query, key, value, softmax_out, lse, visibility, softmax_scale, kept
        )
        if from_beta is not None:
            grad_value = (from_beta + grad_value).to(value.dtype)
    return grad_query, grad_key, grad_value, grad_alpha, grad_beta, grad_sink, grad_gate


def _softmax_forward(query, key, value, sink, visibility, softmax_scale):
    """F1, F2, F5, F6: the softmax output [B, H, T, D], its log-sum-exp [B, H, T] and what the backward needs.

    The log-sum-exp of a row that sees nothing is +inf, so that exp(s - lse) is 0 in every backward.
    """
    batch, heads, num_queries, _ = query.shape
    groups = plan(visibility, query.device.type)
    query, key, value = (_unit_stride(x) for x in (query, key, value))
    kept, parts = [], []
    for rows, tiles in groups:
        out = lse = None
        for tile in tiles:
            tile_out, tile_lse, tile_kept = _tile_forward(query, key, value, tile, visibility, softmax_scale)
            kept.append(tile_kept)
            if out is None:
                out, lse = tile_out, tile_lse
            else:
                out, lse = _merge(out, lse, tile_out, tile_lse)
        parts.append((rows, out, lse))

    if len(parts) == 1 and parts[0][0] == slice(0, num_queries):
        out, lse = parts[0][1:]
    else:
        out = torch.zeros_like(query)
        lse = torch.full((batch, heads, num_queries), -torch.inf, dtype=row_dtype(query.dtype), device=query.device)
        for rows, part_out, part_lse in parts:
            out[:, :, rows], lse[:, :, rows] = part_out, part_lse

    if sink is not None:
        with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None].expand_as(lse))
        out = (out * _exp_difference(lse, with_sink)[..., None]).to(query.dtype)
        lse = with_sink
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), kept


def _softmax_backward(grad_out, query, key, value, out, lse, visibility, softmax_scale, kept):
    """Gradients of `_softmax_forward` in query, key and value (not the sink), tile by tile."""
    query, key, value, grad_out = (_unit_stride(x) for x in (query, key, value, grad_out))
    tiles = [tile for _, tiles in plan(visibility, query.device.type) for tile in tiles]
    whole_queries, whole_keys = slice(0, query.shape[2]), slice(0, key.shape[2])
    if len(tiles) == 1 and (tiles[0].queries, tiles[0].keys) == (whole_queries, whole_keys):
        return _tile_backward(grad_out, query, key, value, out, lse, tiles[0], visibility, softmax_scale, kept[0])
    total = row_dtype(query.dtype)
    grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=total) for x in (query, key, value))
    for tile, tile_kept in zip(tiles, kept, strict=True):
        dq, dk, dv = _tile_backward(grad_out, query, key, value, out, lse, tile, visibility, softmax_scale, tile_kept)
        grad_query[:, :, tile.queries] += dq
        grad_key[:, :, tile.keys] += dk
        grad_value[:, :, tile.keys] += dv
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _tile_forward(query, key, value, tile, visibility, softmax_scale):
    visible, keys = _tile_mask(tile, visibility)
    query, key, value = query[:, :, tile.queries], key[:, :, keys], value[:, :, keys]
    kernel, _ = choose_kernel(query, key, visible is not None, tile.is_causal)
    out, lse, kept = kernel.forward(query, key, value, _as_bias(visible, query.dtype), tile.is_causal, softmax_scale)
    if visible is not None:
        # Kernels disagree on what a row without keys returns (0, NaN, lse 0): say it here.
        empty = _empty_rows(visible, tile.is_causal, query.shape[2]).expand(lse.shape)
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return out, lse, kept


def _tile_backward(grad_out, query, key, value, out, lse, tile, visibility, softmax_scale, kept):
    visible, keys = _tile_mask(tile, visibility)
    rows = tile.queries
    query, key_part, value_part = query[:, :, rows], key[:, :, keys], value[:, :, keys]
    kernel, _ = choose_kernel(query, key_part, visible is not None, tile.is_causal)
    dq, dk, dv = kernel.backward(
        grad_out[:, :, rows], query, key_part, value_part, out[:, :, rows], lse[:, :, rows].contiguous(), kept,
        _as_bias(visible, query.dtype), tile.is_causal, softmax_scale,
    )  # fmt: skip
    if keys != tile.keys:
        margins = (0, 0, keys.start - tile.keys.start, tile.keys.stop - keys.stop)
        dk, dv = pad(dk, margins), pad(dv, margins)
    return dq, dk, dv


def _tile_mask(tile: Tile, visibility: Visibility) -> tuple[Tensor | None, slice]:
    """The boolean mask of a tile, and its keys without those at the ends that no row of the tile sees."""
    if tile.mask == "none":
        return None, tile.keys
    if tile.mask == "keys":
        assert visibility.key_mask is not None
        return visibility.key_mask[:, None, None, tile.keys], tile.keys
    visible = visibility.block(tile.queries, tile.keys)
    if visible is None or visibility.device.type != "cpu" or torch.compiler.is_compiling():
        return visible, tile.keys  # looking at the data would wait for the device or break the graph
    seen = visible.flatten(0, 2).any(0).nonzero()
    if seen.numel() == 0:
        return visible[..., :1], slice(tile.keys.start, tile.keys.start + 1)
    first, last = int(seen[0]), int(seen[-1])
    return visible[..., first : last + 1], slice(tile.keys.start + first, tile.keys.start + last + 1)


def _empty_rows(visible: Tensor, is_causal: bool, num_rows: int) -> Tensor:
    """Rows of a masked tile that see no key: [1|B, 1|H, rows]. A causal tile is square, its mask one of keys."""
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
    """exp(lse_part - lse), 0 where the part is empty (-inf minus -inf is NaN)."""
    return torch.exp(lse_part - lse).masked_fill(lse_part == -torch.inf, 0)


def _scale_and_shift(softmax_out, value, alpha, beta, visibility) -> Tensor:
    """alpha O + beta * sum of visible v, in the row dtype when either is given."""
    out = softmax_out
    if alpha is not None:
        out = alpha.to(row_dtype(out.dtype))[..., None] * out
    sums = _value_sums(value, beta, visibility)
    if sums is None:
        return out
    out = out.to(sums.dtype) if alpha is not None else out.to(sums.dtype, copy=True)
    heads = sums.shape[1]
    _split_heads(out, heads).addcmul_(_split_heads(beta.to(sums.dtype)[..., None], heads), sums[:, :, None])
    return out


def _value_sums(value: Tensor, beta: Tensor | None, visibility: Visibility) -> Tensor | None:
    """Sum of visible values [B, G|H, T, D] in the row dtype, summed in better; None when there is no beta."""
    if beta is None:
        return None
    return visibility.sum_keys(value.to(sum_dtype(value.dtype))).to(row_dtype(value.dtype))


def _beta_grad_value(inner: Tensor, beta: Tensor, groups: int, visibility: Visibility) -> Tensor:
    """Sum of beta E over the queries that see each key and over the query heads of its group: [B, G, S, D]."""
    per_head = visibility.pair_mask is not None and visibility.pair_mask.shape[1] > 1
    shared = _split_heads(inner, groups)
    weight = _split_heads(beta.to(row_dtype(inner.dtype))[..., None], groups)
    if per_head:
        # A mask that differs between heads forbids adding heads up before the sum over queries.
        summed = visibility.sum_queries((shared * weight).flatten(1, 2).to(sum_dtype(inner.dtype)))
        return _split_heads(summed, groups).sum(2).to(weight.dtype)
    total = shared[:, :, 0] * weight[:, :, 0]
    for head in range(1, shared.shape[2]):
        total.addcmul_(shared[:, :, head].to(total.dtype), weight[:, :, head])
    return visibility.sum_queries(total.to(sum_dtype(inner.dtype))).to(total.dtype)


def _split_heads(x: Tensor, groups: int) -> Tensor:
    """[B, H, ...] as [B, groups, H / groups, ...]."""
    return x.unflatten(1, (groups, -1))


def _row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum over the last dim of x * y in the row dtype."""
    rows = row_dtype(x.dtype)
    return (x.to(rows) * y.to(rows)).sum(-1)


def _unit_stride(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, and some give wrong numbers rather than an error for it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
