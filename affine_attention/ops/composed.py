"""Computes alpha * SDPA + beta * (sum of visible values) with PyTorch kernels, on every device, without a T x S matrix.

F7  out = gate * (alpha O + beta * sum of visible v), O from ops/tiles.py, the sums from ops/visibility.py

The backward is B1 to B6 of ops/README.md: the backward of the kernels for the softmax part, and a reversed sum of
beta * E for the values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from .call import AttentionCall, distinct, sink_by_row
from .dtypes import row_dtype, sum_dtype
from .few_keys import add_gradients, find_few_rows
from .nonfinite_keys import nan_where_seen, zero_nonfinite
from .tiles import softmax_backward, softmax_forward
from .visibility import Visibility
from .weights import SOFTMAX
from .weights.blocks import weighted_attention

CHUNK_ELEMENTS = 2**20  # elements of query per chunk of the backward: its temporaries hardly raise the peak memory


def composed_attention(call: AttentionCall) -> Tensor:
    """F1 to F7 for any visibility, F12 for weights other than softmax; differentiable once in every tensor."""
    if call.weights != SOFTMAX:
        return weighted_attention(call)
    call = call.with_positive_scale()
    query, key, value, (alpha, beta, sink, gate) = call[:4]
    dim = query.shape[-1]
    if query.device.type == "cuda" and dim % 8:
        # CUDA kernels read vectors of 8 elements; padding with zeros changes neither scores nor sums.
        query, key, value = (pad(x, (0, -dim % 8)) for x in (query, key, value))
        gate = None if gate is None else pad(gate, (0, -dim % 8))
    tensors: Any = (query, key, value, alpha, beta, sink, gate)
    if torch.compiler.is_compiling():
        tensors = distinct(tensors)
    run: Any = _Composed.apply
    out = run(*tensors, call.visibility, call.softmax_scale)
    return out[..., :dim]


class _Saved(NamedTuple):
    """The tensors saved for the backward.

    `softmax_out` and `lse` include the sink; `empty` marks the rows that see no key (None: there are none).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None
    beta: Tensor | None
    gate: Tensor | None
    softmax_out: Tensor
    lse: Tensor
    empty: Tensor | None
    sink: Tensor | None

    def part(self, rows: slice) -> _Saved:
        """Slices all tensors but a sink [H], which has no batch dimension."""
        return _Saved._make(x if x is None or x.dim() == 1 else x[rows] for x in self)


class _Gradients(NamedTuple):
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    sink: Tensor | None = None
    gate: Tensor | None = None


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
        clean_key, clean_value, nonfinite = zero_nonfinite(key, value)
        softmax_out, lse, empty, aux = softmax_forward(query, clean_key, clean_value, sink, visibility, softmax_scale)
        ctx.save_for_backward(*_Saved(query, key, value, alpha, beta, gate, softmax_out, lse, empty, sink))
        ctx.visibility, ctx.softmax_scale, ctx.aux = visibility, softmax_scale, aux

        alpha, beta, gate = (_without_rows(x, empty) for x in (alpha, beta, gate))
        out = _scale_and_shift(softmax_out, clean_value, alpha, beta, visibility)
        if gate is not None:
            out = gate * out
        nan_BHT1 = nan_where_seen(nonfinite, visibility, query.shape[1], out.dtype)
        if nan_BHT1 is not None:
            out = out + nan_BHT1
        # Without alpha, beta and gate this is the saved tensor itself, so no second copy is kept. It is not converted
        # to its own dtype: in a graph of torch 2.11 the result would be another output, and all gradients silently 0.
        return out if out.dtype == query.dtype else out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        saved = _Saved(*ctx.saved_tensors)
        need = _Gradients(*ctx.needs_input_grad[:7])
        chunks = _batch_chunks(saved.query)
        if len(chunks) == 1:
            grads = _gradients(grad_out, saved, need, ctx.visibility, ctx.softmax_scale, ctx.aux)
            return *grads, None, None
        total: dict[str, Tensor] = {}
        for rows in chunks:
            part = _gradients(
                grad_out[rows], saved.part(rows), need, ctx.visibility.for_batch(rows), ctx.softmax_scale, ctx.aux
            )
            for name, grad in part._asdict().items():
                if grad is None:
                    continue
                if name == "sink" and grad.dim() == 1:
                    total[name] = total[name] + grad if name in total else grad
                else:
                    if name not in total:
                        total[name] = grad.new_empty((grad_out.shape[0], *grad.shape[1:]))
                    total[name][rows] = grad
            del part, grad  # otherwise two chunks are in memory at a time
        return *_Gradients(**total), None, None


def _batch_chunks(query: Tensor) -> list[slice]:
    """Chunks of the batch; only the CPU uses several, since one launch for the whole batch is faster on a GPU."""
    batch = query.shape[0]
    if torch.compiler.is_compiling():
        return [
            slice(0, batch)
        ]  # the compiler plans memory, and computing the number of chunks would make the lengths static
    parts = min(batch, query.numel() // CHUNK_ELEMENTS) if query.device.type == "cpu" else 1
    size = -(-batch // parts) if parts > 1 else max(batch, 1)
    return [slice(first, min(first + size, batch)) for first in range(0, batch, size)] or [slice(0, 0)]


def _gradients(
    grad_out: Tensor, saved: _Saved, need: Any, visibility: Visibility, softmax_scale: float, aux: list[Any]
) -> _Gradients:
    """B1 to B6; None for gradients that are not needed."""
    query, key, value, alpha, beta, gate, softmax_out, lse, empty, sink = saved
    query, alpha, beta, gate = (_without_rows(x, empty) for x in (query, alpha, beta, gate))
    sink = _without_rows(sink, empty) if sink is not None and sink.dim() == 3 else sink
    grad_out = _without_rows(grad_out, empty)
    rows = row_dtype(query.dtype)
    key, value, _ = zero_nonfinite(key, value)
    grads: dict[str, Tensor] = {}

    if gate is not None and need.gate:
        grads["gate"] = (grad_out * _scale_and_shift(softmax_out, value, alpha, beta, visibility)).to(gate.dtype)
    inner = grad_out if gate is None else grad_out * gate  # E of ops/README.md

    if (alpha is not None and need.alpha) or (sink is not None and need.sink):
        alpha_grad = _row_dot(inner, softmax_out)
        if alpha is not None:
            grads["alpha"] = alpha_grad.to(alpha.dtype)
        if sink is not None:
            delta = alpha_grad if alpha is None else alpha_grad * alpha.to(rows)
            by_row = -torch.exp(sink_by_row(sink.to(rows)) - lse) * delta
            by_head = by_row if sink.dim() == 3 else by_row.sum((0, 2), dtype=sum_dtype(rows))
            grads["sink"] = by_head.to(sink.dtype)
    if beta is not None and need.beta:
        sums = _value_sums(value, visibility)  # recomputed, since saving it would cost more
        grads["beta"] = _row_dot(_split_heads(inner, sums.shape[1]), sums[:, :, None]).flatten(1, 2).to(beta.dtype)
        del sums

    if need.query or need.key or need.value:
        from_beta = None if beta is None else _beta_to_value(inner, beta, value.shape[1], visibility)
        if alpha is not None:
            # The backward of the CPU kernel copies a gradient whose memory layout is not [B, T, H, D].
            laid_out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
            torch.mul(inner.transpose(1, 2), alpha.transpose(1, 2)[..., None], out=laid_out)
            inner = laid_out.transpose(1, 2)
        few = None if sink is None else find_few_rows(visibility, query.shape[1], query.dtype)
        softmax_grads: Any
        if few is not None and few.is_whole_call:
            softmax_grads = tuple(torch.zeros_like(x, dtype=rows) for x in (query, key, value))
        else:
            softmax_grads = softmax_backward(
                inner.to(query.dtype), query, key, value, softmax_out, lse if few is None else few.hidden(lse),
                visibility, softmax_scale, aux,
            )  # fmt: skip
        if few is not None and sink is not None:
            add_gradients(few, softmax_grads, inner, query, key, value, sink, softmax_scale)
        for name, grad in zip(("query", "key", "value"), softmax_grads, strict=True):
            grads[name] = grad.to(query.dtype)
        if from_beta is not None:
            grads["value"] = (from_beta + grads["value"]).to(value.dtype)
    return _Gradients(**grads)


def _without_rows(x: Any, empty_BHT: Tensor | None) -> Any:
    """Sets the rows of x [B, H, T] or [B, H, T, D] that see no key to 0, since 0 times NaN or infinity is NaN."""
    if x is None or empty_BHT is None:
        return x
    return x.masked_fill(empty_BHT if x.dim() == 3 else empty_BHT[..., None], 0)


def _scale_and_shift(
    softmax_out: Tensor, value: Tensor, alpha: Tensor | None, beta: Tensor | None, visibility: Visibility
) -> Tensor:
    """alpha O + beta * sum of visible v, in the row dtype if either is given."""
    out = softmax_out
    if alpha is not None:
        out = alpha.to(row_dtype(out.dtype))[..., None] * out
    if beta is None:
        return out
    sums = _value_sums(value, visibility)
    out = out.to(sums.dtype) if alpha is not None else out.to(sums.dtype, copy=True)
    heads = sums.shape[1]
    _split_heads(out, heads).addcmul_(_split_heads(beta.to(sums.dtype)[..., None], heads), sums[:, :, None])
    return out


def _value_sums(value: Tensor, visibility: Visibility) -> Tensor:
    """Sum of visible values [B, G, T, D], accumulated in sum_dtype; H for G if the mask differs between heads."""
    return visibility.sum_keys(value.to(sum_dtype(value.dtype))).to(row_dtype(value.dtype))


def _beta_to_value(inner: Tensor, beta: Tensor, groups: int, visibility: Visibility) -> Tensor:
    """Sum of beta E over the queries that see each key and over the query heads of its group: [B, G, S, D]."""
    shared = _split_heads(inner, groups)
    weight = _split_heads(beta.to(row_dtype(inner.dtype))[..., None], groups)
    if visibility.pair_mask is not None and visibility.pair_mask.shape[1] > 1:
        # With a mask per head, the heads cannot be added before the sum over queries.
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
