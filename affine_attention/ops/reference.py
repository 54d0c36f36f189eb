"""The equation written out with explicit weights: the oracle for every other implementation.

F1  s_ij  = q_i . k_j * softmax_scale
F2  p_ij  = exp(s_ij) / (sum over visible j of exp(s_ij) + exp(sink))
F3  w_ij  = alpha_i p_ij + beta_i on visible keys, 0 elsewhere; p_ij may come from a weight function of ops/weights
F4  out_i = gate_i * sum_j w_ij v_j, or with an exclusion or a norm per head gate_i * N(X(y_i)), y_i = sum_j w_ij v_j:
F9  X(y)  = y - gamma (y . d) d,  d the direction of the value at the query's own position, 0 if that key is invisible
F10 N(x)  = x / sqrt(mean(x^2) + norm_eps) * norm_weight

Gradients come from autograd. Half precision is computed in fp32, fp64 in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .call import AttentionCall, Rows, sink_by_row
from .dtypes import row_dtype
from .finish import Finish
from .nonfinite_keys import nan_where_seen, zero_nonfinite
from .visibility import Visibility
from .weights import FUNCTIONS, SOFTMAX


def reference_weights(call: AttentionCall) -> Tensor:
    """F1 to F3: the weights [B, H, T, S]."""
    dtype = row_dtype(call.query.dtype)
    visible = call.visibility.dense()
    query, (alpha, beta, sink, _) = _without_empty_rows(call, visible)
    scores_BHTS = query.to(dtype) @ _repeat_heads(call.key, query.shape[1]).to(dtype).mT * call.softmax_scale
    if call.weights == SOFTMAX:
        weights_BHTS = _softmax(scores_BHTS.masked_fill(~visible, -torch.inf), sink, dtype)
    else:
        counts = visible.sum(-1, keepdim=True).clamp(min=1).to(dtype)
        weights_BHTS = FUNCTIONS[call.weights].weigh(scores_BHTS.masked_fill(~visible, 0), visible, counts)
    if alpha is not None:
        weights_BHTS = weights_BHTS * alpha.to(dtype)[..., None]
    if beta is not None:
        weights_BHTS = weights_BHTS + beta.to(dtype)[..., None]
    return weights_BHTS.masked_fill(~visible, 0)


def _softmax(scores_BHTS: Tensor, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
    """F2, from scores that are -inf on invisible keys."""
    # Subtract the largest score (or the sink) so that exp cannot overflow; a row that sees no key subtracts 0.
    largest_BHT1 = _row_max(scores_BHTS)
    if sink is not None:
        sink_BHT1 = sink_by_row(sink.to(dtype))[..., None]
        largest_BHT1 = torch.maximum(largest_BHT1, sink_BHT1)
    largest_BHT1 = largest_BHT1.detach().masked_fill(largest_BHT1 == -torch.inf, 0)
    exp_BHTS = torch.exp(scores_BHTS - largest_BHT1)
    total_BHT1 = exp_BHTS.sum(-1, keepdim=True)
    if sink is not None:
        total_BHT1 = total_BHT1 + torch.exp(sink_BHT1 - largest_BHT1)
    return exp_BHTS / total_BHT1.masked_fill(total_BHT1 == 0, 1)


def reference_attention(call: AttentionCall) -> Tensor:
    """F1 to F4: the output [B, H, T, D] in the dtype of query."""
    dtype = row_dtype(call.query.dtype)
    heads, visible = call.query.shape[1], call.visibility.dense()
    gate = _without_empty_rows(call, visible)[1].gate
    key, value, nonfinite = zero_nonfinite(call.key, call.value)
    weights_BHTS = reference_weights(call._replace(key=key))
    out_BHTD = weights_BHTS @ _repeat_heads(value, heads).to(dtype)
    if gate is not None:
        out_BHTD = gate.to(dtype) * out_BHTD
    out_BHTD = out_BHTD.masked_fill(~visible.any(-1, keepdim=True), 0)
    nan_BHT1 = nan_where_seen(nonfinite, call.visibility, heads, dtype)
    if nan_BHT1 is not None:
        out_BHTD = out_BHTD + nan_BHT1
    return out_BHTD.to(call.query.dtype)


def reference_finish(y: Tensor, value: Tensor, visibility: Visibility, parts: Finish) -> Tensor:
    """F9, F10 and the gate, from the output y [B, H, T, D] without a gate."""
    dtype, heads, visible = row_dtype(y.dtype), y.shape[1], visibility.dense()
    sees_some = visible.any(-1, keepdim=True)
    out_BHTD = y.to(dtype)
    if parts.exclusion is not None:
        offset = visibility.offset
        own = pad(value, (0, 0, -offset, 0)) if offset < 0 else value[:, :, offset:]
        sees_own = pad(visible, (-offset, 0)).diagonal(0, -2, -1) if offset < 0 else visible.diagonal(offset, -2, -1)
        own_BHTD = _repeat_heads(own, heads).to(dtype).masked_fill(~sees_own[..., None], 0)
        length = torch.linalg.vector_norm(own_BHTD, dim=-1, keepdim=True)
        direction = own_BHTD / length.masked_fill(length == 0, 1)
        gamma = parts.exclusion
        if isinstance(gamma, Tensor):
            gamma = gamma.to(dtype).masked_fill(~sees_own, 0)[..., None]
        out_BHTD = out_BHTD - gamma * (out_BHTD * direction).sum(-1, keepdim=True) * direction
    if parts.norm_weight is not None:
        weight = parts.norm_weight.to(dtype)
        weight = weight if weight.dim() == 1 else weight[:, None]
        out_BHTD = out_BHTD / torch.sqrt(out_BHTD.square().mean(-1, keepdim=True) + parts.norm_eps) * weight
    if parts.gate is not None:
        out_BHTD = out_BHTD * parts.gate.to(dtype).masked_fill(~sees_some, 0)
    return out_BHTD.masked_fill(~sees_some, 0).to(y.dtype)


def _without_empty_rows(call: AttentionCall, visible: Tensor) -> tuple[Tensor, Rows]:
    """Sets query, alpha, beta, gate and row sinks of rows that see no key to 0: 0 times NaN or infinity is NaN."""
    query, (alpha, beta, sink, gate) = call.query, call.rows
    empty = ~visible.any(-1)
    alpha, beta = (None if x is None else x.masked_fill(empty, 0) for x in (alpha, beta))
    gate = None if gate is None else gate.masked_fill(empty[..., None], 0)
    if sink is not None and sink.dim() == 3:
        sink = sink.masked_fill(empty, 0)
    return query.masked_fill(empty[..., None], 0), Rows(alpha, beta, sink, gate)


def _repeat_heads(x_BGSD: Tensor, heads: int) -> Tensor:
    return x_BGSD.repeat_interleave(heads // x_BGSD.shape[1], dim=1)


def _row_max(scores: Tensor) -> Tensor:
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    return scores.amax(-1, keepdim=True)
