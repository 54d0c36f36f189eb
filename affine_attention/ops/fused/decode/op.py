"""Runs the decode kernels with a plan per signature; in compiled graphs as a torch.library operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call import AttentionCall, CallSpec, Rows, TensorSpec
from ...validation import check_query_key, check_rows, check_value, check_visibility
from ...visibility import Visibility
from .. import on_device
from ..op import MAX_PLANS
from .attention import Decode

_plans: dict[tuple[Any, ...], Decode] = {}
_library = torch.library.Library("affine_attention", "FRAGMENT")
_library.define(
    "decode(Tensor query, Tensor key, Tensor value, Tensor? alpha, Tensor? beta, Tensor? sink, Tensor? gate, "
    "Tensor? key_mask, Tensor? lengths, Tensor? block_table, bool is_causal, int? window, int num_keys, "
    "float softmax_scale, str weights) -> Tensor"
)


def decode(call: AttentionCall, lengths: Tensor | None = None, block_table: Tensor | None = None) -> Tensor:
    """Returns the output [B, H, T, D] in the dtype of query. kernels.py describes the layout of caches.

    `visibility.num_keys` is the capacity of the cache (S, or pages times page_size). With `lengths`, queries are
    aligned to them instead of S. Entries of `block_table` within a length must be pages of the cache; this is not
    checked, because the check would synchronise.
    """
    if call.needs_gradient:
        raise ValueError("decode has no gradient, and an input requires one; call it under torch.no_grad()")
    seen = call.visibility
    arguments: Any = (
        *call.tensors, seen.key_mask, lengths, block_table, seen.is_causal, seen.window, seen.num_keys,
        call.softmax_scale, call.weights,
    )  # fmt: skip
    if torch.compiler.is_compiling() or type(call.query) not in (Tensor, torch.nn.Parameter):
        return torch.ops.affine_attention.decode(*arguments)
    return _decode(*arguments)


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    block_table: Tensor | None,
    is_causal: bool,
    window: int | None,
    num_keys: int,
    softmax_scale: float,
    weights: str,
) -> Tensor:
    inputs = [
        packed(query), packed(key), packed(value), alpha, beta,
        sink if sink is None or sink.dim() == 3 else sink.contiguous(), packed(gate),
        None if key_mask is None else key_mask.view(torch.int8), lengths, packed(block_table),
    ]  # fmt: skip
    address = 0
    for x in inputs:
        if x is not None:
            address |= x.data_ptr()
    # Triton specialises on 16-byte aligned addresses; masks and lengths may be unaligned.
    aligned = tuple(x is None or x.data_ptr() & 15 == 0 for x in inputs) if address & 15 else True
    signature = (*(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in inputs), aligned, is_causal,
            window, num_keys, softmax_scale, weights)  # fmt: skip
    plan = _plans.get(signature)
    if plan is None:
        plan = _new_plan(signature, inputs, is_causal, window, num_keys, softmax_scale, weights)
    return on_device(plan.device, plan, *inputs)


def _new_plan(
    signature: tuple[Any, ...], inputs: list[Any], is_causal, window, num_keys, softmax_scale, weights
) -> Decode:
    query, key, value, alpha, beta, sink, gate, key_mask, lengths, block_table = inputs
    seen = Visibility(
        query.shape[0], query.shape[2], num_keys, query.device, is_causal, window, key_mask=key_mask
    )  # fmt: skip
    call = AttentionCall(query, key, value, Rows(alpha, beta, sink, gate), seen, softmax_scale, weights=weights)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    specs = (None if x is None else TensorSpec.of(x) for x in (lengths, block_table))
    plan = _plans[signature] = Decode(CallSpec.of(call), *specs)
    return plan


def packed(x: Any) -> Any:
    """Copies a tensor whose last dimension is strided: the kernels read contiguous rows."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


_library.impl("decode", _decode, "CUDA")
_library.impl("decode", _decode, "CPU")  # in Triton's interpreter


def _fake(query, key, value, alpha, beta, sink, gate, key_mask, lengths, block_table, *_) -> Tensor:
    check_rows(query, alpha, beta, sink, gate)
    if block_table is None:
        check_query_key(query, key)
        check_value(value, query, key)
        check_visibility(query, key, mask=key_mask, is_causal=True, window=None, segment_ids=None)
    return torch.empty_like(query)


torch.library.register_fake("affine_attention::decode", _fake, lib=_library)
