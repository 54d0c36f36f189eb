"""The softmax backward of rows that see at most a few keys next to a sink.

Attention kernels recompute the weights as exp(s - lse) and take delta = rowsum(grad * O). With one to eight keys beside
a sink both lose accuracy: lse is rounded in units of itself, and dP - delta cancels, while the rounding errors of dP
and of O do not. Here the weights come from one softmax that includes the sink, and delta is the sum of weights * dP
over the same products (B2 of ops/README.md), as in the formula written out.

The rows are those of a whole call (a window of eight keys), or some rows of it: the first ones of a causal call and of
each packed document. A kernel gives the other rows; with lse = +inf the weights of these rows are 0 in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .call import sink_by_row
from .dtypes import row_dtype
from .visibility import Visibility

MAX_KEYS = 8  # with more keys the kernels' errors are below twice those of the formula written out
ROW_BLOCK = 256


class FewRows(NamedTuple):
    """Rows of a call that see few keys, and which keys they see. R rows, at most K = MAX_KEYS keys each."""

    batch: Tensor  # [R, 1]
    head: Tensor  # [R, 1], or [1, H] if the rows are those of all heads
    query: Tensor  # [R, 1]
    keys: Tensor  # [R, 1, K]
    is_visible: Tensor  # [R, 1|H, K], False where a row sees fewer keys
    is_whole_call: bool  # no other row sees a key

    def hidden(self, lse: Tensor) -> Tensor:
        """lse [B, H, T] with +inf in these rows: a kernel's backward then leaves them out."""
        infinity = torch.full((), torch.inf, dtype=lse.dtype, device=lse.device)
        return lse.index_put((self.batch, self.head, self.query), infinity)

    def block(self, rows: slice) -> FewRows:
        """Some of the rows."""
        head = self.head if self.head.shape[0] == 1 else self.head[rows]
        return self._replace(
            batch=self.batch[rows], head=head, query=self.query[rows], keys=self.keys[rows],
            is_visible=self.is_visible[rows],
        )  # fmt: skip


def find_few_rows(visibility: Visibility, heads: int, dtype: torch.dtype) -> FewRows | None:
    """The rows of a call whose gradients this file computes; None if a kernel computes them all.

    If other rows see more keys, these rows are taken in fp32 and fp64 only: the rounding of half precision exceeds the
    errors of the kernels. Eager code on the CPU reads segments and masks. Elsewhere that would synchronise or break a
    graph, and the rows are those that see few keys by causal and window alone.
    """
    if 0 in (visibility.batch, visibility.num_queries, visibility.num_keys):
        return None
    if visibility.device.type == "cpu" and not torch.compiler.is_compiling():
        return _read_rows(visibility, heads, dtype)
    return _known_rows(visibility, heads, dtype)


def _read_rows(visibility: Visibility, heads: int, dtype: torch.dtype) -> FewRows | None:
    counts = visibility.count()
    is_few = counts <= MAX_KEYS
    is_whole_call = bool(is_few.all())
    if not is_whole_call and dtype != row_dtype(dtype):
        return None
    rows = (is_few & (counts > 0)).expand(visibility.batch, -1, -1).nonzero()
    if not len(rows):
        return None
    keys = torch.zeros(len(rows), MAX_KEYS, dtype=torch.int64)
    is_visible = torch.zeros(len(rows), MAX_KEYS, dtype=torch.bool)
    for first in range(0, len(rows), ROW_BLOCK):
        batch, head, query = rows[first : first + ROW_BLOCK, :, None].unbind(1)
        key_S = torch.arange(*visibility.key_bounds(int(query.min()), int(query.max())))
        row, key = visibility.sees(batch, head, query, key_S[None]).nonzero().unbind(1)
        # The pairs are sorted by row: the place of a pair in its row is its index less that of the row's first pair.
        place = torch.arange(len(row)) - torch.searchsorted(row, row)
        keys[first + row, place] = key_S[key]
        is_visible[first + row, place] = True
    head = rows[:, 1:2] if counts.shape[1] > 1 else torch.arange(heads)[None]
    return FewRows(rows[:, :1], head, rows[:, 2:], keys[:, None], is_visible[:, None], is_whole_call)


def _known_rows(visibility: Visibility, heads: int, dtype: torch.dtype) -> FewRows | None:
    window, num_rows, device = visibility.window, visibility.num_queries, visibility.device
    is_whole_call = visibility.num_keys <= MAX_KEYS
    if not is_whole_call and window is not None:
        is_whole_call = (window if visibility.is_causal else 2 * window - 1) <= MAX_KEYS
    if not is_whole_call:
        if not visibility.is_causal or visibility.offset != 0 or dtype != row_dtype(dtype):
            return None
        num_rows = MAX_KEYS
    batch_R1 = torch.arange(visibility.batch, device=device).repeat_interleave(num_rows)[:, None]
    query_R1 = torch.arange(num_rows, device=device).repeat(visibility.batch)[:, None]
    head_1H = torch.arange(heads, device=device)[None]
    start_T, stop_T = visibility.key_ranges()
    keys = start_T[query_R1] + torch.arange(MAX_KEYS, device=device)
    inside = keys < stop_T[query_R1]
    keys_R1K = keys.clamp(max=visibility.num_keys - 1)[:, None]
    seen = visibility.sees(batch_R1[..., None], head_1H[..., None], query_R1[..., None], keys_R1K)
    return FewRows(batch_R1, head_1H, query_R1, keys_R1K, seen & inside[:, None], is_whole_call)


def add_gradients(
    few: FewRows,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor,
    softmax_scale: float,
) -> None:
    """Writes dQ of these rows, and adds their parts of dK and dV, to `grads` in the row dtype."""
    row_sink = sink_by_row(sink).expand(query.shape[:3])
    for first in range(0, few.query.shape[0], ROW_BLOCK):
        rows = few.block(slice(first, first + ROW_BLOCK))
        _add_block(rows, grads, grad_out, query, key, value, row_sink, softmax_scale)


def _add_block(
    few: FewRows,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_sink: Tensor,
    softmax_scale: float,
) -> None:
    dtype = row_dtype(query.dtype)
    at_RH = (few.batch, few.head, few.query)
    of_group = few.head // (query.shape[1] // key.shape[1])
    at_RHK = (few.batch[..., None], of_group[..., None], few.keys)
    query_RH1D, grad_RH1D = (x[at_RH].to(dtype)[:, :, None] for x in (query, grad_out))
    key_RHKD, value_RHKD = (x[at_RHK].to(dtype) for x in (key, value))
    scores = ((query_RH1D * key_RHKD).sum(-1) * softmax_scale).masked_fill(~few.is_visible, -torch.inf)
    weights = torch.softmax(torch.cat([scores, row_sink[at_RH].to(dtype)[..., None]], -1), -1)[..., :-1]
    weights = weights.masked_fill(~few.is_visible, 0)  # a row without keys and with a sink of -inf is NaN
    grad_weights = (grad_RH1D * value_RHKD).sum(-1).masked_fill(weights == 0, 0)
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = (weights * (grad_weights - delta) * softmax_scale)[..., None]
    grad_query, grad_key, grad_value = grads
    grad_query.index_put_(at_RH, (grad_scores * key_RHKD).sum(-2))
    grad_key.index_put_(at_RHK, grad_scores * query_RH1D, accumulate=True)
    grad_value.index_put_(at_RHK, weights[..., None] * grad_RH1D, accumulate=True)
