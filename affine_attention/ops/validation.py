"""Validates the arguments of a call; every error names the argument, the rule, the value and a fix."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..messages import check_flag, did_you_mean, shown
from .visibility import Visibility
from .weights import NAMES, SOFTMAX

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SEGMENT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MAX_HEAD_DIM = 256
LARGEST_FLOAT = sys.float_info.max
SMALLEST_EPS = 2.0**-126  # the smallest normal number of fp32
# Windows of at least this size are clamped to T + S, which exceeds every distance. Smaller windows are not compared
# with the lengths, because a compiled graph would specialise on them.
LARGE_WINDOW = 2**30


def check_query(query: Any) -> None:
    """Checks that query is a dense floating-point tensor [B, H, T, D]."""
    _check_tensor("query", query, "[B, H, T, D]", 4)


def check_query_key(query: Any, key: Any) -> None:
    """Checks rank, dtype, device, batch, heads and head dim of query [B, H, T, D] and key [B, G, S, D]."""
    check_query(query)
    _check_tensor("key", key, "[B, G, S, D]", 4)
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be float64, float32, bfloat16 or float16, got {_name(query.dtype)}; convert it")
    _check_same("key", key, query)
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key must have shape [B, G, S, D] = [{query.shape[0]}, G, S, {query.shape[3]}] to fit query "
            f"{list(query.shape)}, got {list(key.shape)}; the layout is [batch, heads, length, head dim]"
        )
    heads, groups = query.shape[1], key.shape[1]
    if groups == 0 or heads % groups:
        raise ValueError(
            f"query heads must be a multiple of key heads, got query {list(query.shape)} with H = {heads} and key "
            f"{list(key.shape)} with G = {groups}; the layout is [batch, heads, length, head dim]"
        )
    if not 1 <= query.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"head dim D must be 1 to {MAX_HEAD_DIM}, got {query.shape[3]} in query {list(query.shape)}")


def check_value(value: Any, query: Tensor, key: Tensor) -> None:
    """Checks that value has the shape, dtype and device of key."""
    _check_tensor("value", value, "[B, G, S, D]", 4)
    _check_same("value", value, query)
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key {list(key.shape)}, got {list(value.shape)}")


def check_rows(query: Tensor, alpha: Any, beta: Any, sink: Any, gate: Any) -> None:
    """Checks alpha and beta [B, H, T], sink [H] or [B, H, T], and gate [B, H, T, D]."""
    batch, heads, queries, dim = query.shape
    by_row, by_head = ("[B, H, T]", (batch, heads, queries)), ("[H]", (heads,))
    for name, x, *known in (
        ("alpha", alpha, by_row),
        ("beta", beta, by_row),
        ("sink", sink, by_head, by_row),
        ("gate", gate, ("[B, H, T, D]", (batch, heads, queries, dim))),
    ):
        if x is not None:
            _check_coefficient(name, x, query, *known)


def _check_coefficient(name: str, x: Any, query: Tensor, *known: tuple[str, tuple[int, ...]]) -> None:
    """Checks that x is a tensor on the device of query with one of the known shapes, each with its letters."""
    _check_tensor(name, x, " or ".join(letters for letters, _ in known), *(len(shape) for _, shape in known))
    if tuple(x.shape) not in [shape for _, shape in known]:
        shapes = " or ".join(f"{letters} = {list(shape)}" for letters, shape in known)
        raise ValueError(f"{name} must have shape {shapes}, got {list(x.shape)}")
    if x.dtype not in (query.dtype, torch.float32, torch.float64):
        raise TypeError(
            f"{name} must be float32, float64 or the dtype of query ({_name(query.dtype)}), got {_name(x.dtype)}; "
            f"convert it with {name}.float()"
        )
    _check_device(name, x, query)


def check_finish(query: Tensor, exclusion: Any, norm_weight: Any, norm_eps: Any) -> None:
    """Checks exclusion (None, a number or [B, H, T]), norm_weight (None, [D] or [H, D]) and norm_eps."""
    batch, heads, queries, dim = query.shape
    if isinstance(exclusion, Tensor):
        _check_coefficient("exclusion", exclusion, query, ("[B, H, T]", (batch, heads, queries)))
    elif exclusion is not None:
        if isinstance(exclusion, bool) or not isinstance(exclusion, int | float):
            raise TypeError(f"exclusion must be a tensor [B, H, T], a number or None, got {shown(exclusion)}")
        if not -LARGEST_FLOAT <= exclusion <= LARGEST_FLOAT:
            raise ValueError(f"exclusion must be finite, got {shown(exclusion)}; 1.0 excludes the own value")
    if norm_weight is None:
        return
    _check_coefficient("norm_weight", norm_weight, query, ("[D]", (dim,)), ("[H, D]", (heads, dim)))
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, int | float):
        raise TypeError(f"norm_eps must be a number, got {shown(norm_eps)}")
    if not SMALLEST_EPS <= norm_eps <= LARGEST_FLOAT:
        raise ValueError(
            f"norm_eps must be at least {SMALLEST_EPS:.3g} and finite, since a row of zeros is divided by its square "
            f"root, got {shown(norm_eps)}; 1e-6 is usual"
        )


def check_weights(weights: Any, sink: Any) -> None:
    """Checks the name of the weight function, and that there is a sink for softmax only."""
    check_one_of("weights", weights, NAMES)
    if weights != SOFTMAX and sink is not None:
        raise ValueError(
            f"sink must be None with weights={weights!r}, got {shown(sink)}: a sink is a term of the softmax; use "
            'weights="softmax", or leave the sink out'
        )


def check_visibility(
    query: Tensor, key: Tensor, *, mask: Any, is_causal: Any, window: Any, segment_ids: Any
) -> Visibility:
    """Validates mask, is_causal, window and segment_ids and combines them into a Visibility."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    check_flag("is_causal", is_causal)
    check_window(window)
    if window is not None and window >= LARGE_WINDOW:
        window = min(window, queries + keys)
    key_mask, pair_mask = _check_mask(mask, query, keys)
    query_segments, key_segments = _check_segments(segment_ids, query, keys)
    return Visibility(
        batch, queries, keys, query.device, is_causal, window, query_segments, key_segments, key_mask, pair_mask
    )


def check_window(window: Any) -> None:
    """Checks that window is None or an integer of at least 1."""
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window must be an int or None, got {shown(window)}")
    if window < 1:
        raise ValueError(f"window must be at least 1 (1: a query sees only its own position), got {shown(window)}")


def check_one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """Checks that a value is one of the known names."""
    if not isinstance(value, str) or value not in known:
        hint = did_you_mean(value, known)
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {shown(value)}{hint}")


def check_softmax_scale(softmax_scale: Any, dim: int) -> float:
    """Returns the validated scale; None means 1/sqrt(D)."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(dim)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise TypeError(f"softmax_scale must be a number or None (1/sqrt(D)), got {shown(softmax_scale)}")
    # math.isfinite causes a graph break for a traced float, and fails for integers above the largest float.
    if not -LARGEST_FLOAT <= softmax_scale <= LARGEST_FLOAT:
        raise ValueError(f"softmax_scale must be finite, got {shown(softmax_scale)}; None means 1/sqrt(D)")
    return float(softmax_scale)


def _check_mask(mask: Any, query: Tensor, keys: int) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    batch, heads, queries = query.shape[:3]
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a boolean tensor [B, S] or [B, 1|H, T, S], got {type(mask).__name__}")
    check_layout("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean, True for visible keys, got {_name(mask.dtype)}; "
            "use mask.bool() for 0/1 masks and mask == 0 for additive ones"
        )
    _check_device("mask", mask, query)
    if tuple(mask.shape) == (batch, keys):
        return mask, None
    if mask.dim() == 4 and mask.shape[0] == batch and mask.shape[1] in (1, heads) and mask.shape[2:] == (queries, keys):
        return None, mask
    raise ValueError(
        f"mask must have shape [B, S] = [{batch}, {keys}] or [B, 1|H, T, S] = [{batch}, 1|{heads}, {queries}, {keys}], "
        f"got {list(mask.shape)}"
    )


def _check_segments(segment_ids: Any, query: Tensor, keys: int) -> tuple[Tensor | None, Tensor | None]:
    if segment_ids is None:
        return None, None
    batch, queries = query.shape[0], query.shape[2]
    if isinstance(segment_ids, Tensor):
        if queries != keys:
            raise ValueError(
                f"segment_ids must be a pair ([B, T], [B, S]) when T != S, got one tensor with T = {queries} and "
                f"S = {keys}"
            )
        segment_ids = (segment_ids, segment_ids)
    if not isinstance(segment_ids, tuple | list) or len(segment_ids) != 2:
        raise TypeError(f"segment_ids must be a tensor [B, T] or a pair of tensors, got {type(segment_ids).__name__}")
    for letters, x, length in (("[B, T]", segment_ids[0], queries), ("[B, S]", segment_ids[1], keys)):
        if not isinstance(x, Tensor):
            raise TypeError(f"segment_ids must hold tensors, got {type(x).__name__}")
        check_layout("segment_ids", x)
        if x.dtype not in SEGMENT_DTYPES:
            raise TypeError(
                f"segment_ids must be integers, one id per document, got {_name(x.dtype)}; convert them with .long()"
            )
        if tuple(x.shape) != (batch, length):
            raise ValueError(f"segment_ids must have shape {letters} = [{batch}, {length}], got {list(x.shape)}")
        _check_device("segment_ids", x, query)
    return segment_ids[0], segment_ids[1]


def _check_tensor(name: str, x: Any, letters: str, *ranks: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {letters}, got {type(x).__name__}")
    check_layout(name, x)
    if x.dim() not in ranks:
        rank = " or ".join(map(str, ranks))
        raise ValueError(f"{name} must have {rank} dimensions {letters}, got {x.dim()}: {list(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point tensor, got {_name(x.dtype)}; convert it with {name}.float()")


def check_layout(name: str, x: Tensor) -> None:
    """Checks that a tensor is dense: not sparse, nested or MKL-DNN."""
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else _name(x.layout).lstrip("_")
        way_out = "torch.nested.to_padded_tensor and a mask" if x.is_nested else f"{name}.to_dense()"
        raise TypeError(f"{name} must be a dense tensor, got a {kind} tensor; convert it with {way_out}")


def _check_same(name: str, x: Tensor, query: Tensor) -> None:
    if x.dtype != query.dtype:
        raise TypeError(
            f"{name} must have the dtype of query ({_name(query.dtype)}), got {_name(x.dtype)}; "
            f"convert one of them, for instance {name}.to(query.dtype)"
        )
    _check_device(name, x, query)


def _check_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(
            f"{name} must be on the device of query ({query.device}), got {x.device}; move it with "
            f"{name}.to(query.device)"
        )


def _name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def check_lengths(lengths: Any, query: Tensor) -> None:
    """Checks that lengths is None or a tensor [B] of integers on the device of query."""
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got = _name(lengths.dtype) if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be a tensor [B] of int32 or int64, one length per sequence, got {got}")
    check_layout("lengths", lengths)
    if tuple(lengths.shape) != (query.shape[0],):
        raise ValueError(f"lengths must have shape [B] = [{query.shape[0]}], got {list(lengths.shape)}")
    _check_device("lengths", lengths, query)


def check_pages(query: Any, key: Any, value: Any, block_table: Any, lengths: Tensor | None) -> None:
    """Checks key and value [pages, page_size, G, D] and block_table [B, n]; entries beyond a length are not checked."""
    for name, x in (("key", key), ("value", value)):
        _check_tensor(name, x, "[pages, page_size, G, D]", 4)
    if not isinstance(block_table, Tensor) or block_table.dtype not in (torch.int32, torch.int64):
        got = _name(block_table.dtype) if isinstance(block_table, Tensor) else type(block_table).__name__
        raise TypeError(
            f"block_table must be a tensor [B, n] of int32 or int64, the pages of each sequence in order, got {got}"
        )
    check_layout("block_table", block_table)
    if block_table.dim() != 2 or block_table.shape[0] != query.shape[0]:
        raise ValueError(f"block_table must have shape [B, n] with B = {query.shape[0]}, got {list(block_table.shape)}")
    _check_device("block_table", block_table, query)
    if block_table.device.type != "cpu":
        return  # reading values would synchronise
    used = block_table
    if lengths is not None:
        used = block_table[torch.arange(block_table.shape[1]) * key.shape[1] < lengths[:, None]]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < key.shape[0]:
        raise ValueError(
            f"block_table must hold pages 0 to {key.shape[0] - 1} within the lengths, got {int(used.min())} to "
            f"{int(used.max())}"
        )


def check_packed(query: Any, key: Any, value: Any, **rows: Any) -> None:
    """Checks the ranks of packed tensors: query [total, H, D], key and value [total_keys, G, D], alpha, beta and gate.

    `attention` checks the rest on views of them.
    """
    _check_tensor("query", query, "[total, H, D]", 3)
    for name, x in (("key", key), ("value", value)):
        _check_tensor(name, x, "[total_keys, G, D]", 3)
    if value.shape != key.shape:
        raise ValueError(f"value must have the shape of key {list(key.shape)}, got {list(value.shape)}")
    (_, heads, dim), groups = query.shape, key.shape[1]
    if key.shape[2] != dim or groups == 0 or heads % groups:
        raise ValueError(
            f"key must have shape [total_keys, G, D] with D = {dim} and G a divisor of the {heads} heads of query "
            f"{list(query.shape)}, got {list(key.shape)}; the layout is [tokens, heads, head dim]"
        )
    for name, x in rows.items():
        if x is None:
            continue
        letters, shape = ("[total, H, D]", query.shape) if name == "gate" else ("[total, H]", query.shape[:2])
        _check_tensor(name, x, letters, len(shape))
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {letters} = {list(shape)}, got {list(x.shape)}")


def check_cu_seqlens(name: str, cu_seqlens: Any, query: Tensor, total: int) -> None:
    """Checks cumulative lengths [documents + 1] of `total` tokens; their values only where reading them is free."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = _name(cu_seqlens.dtype) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name} must be a tensor [documents + 1] of int32 or int64, got {got}")
    check_layout(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must have shape [documents + 1], got {list(cu_seqlens.shape)}")
    _check_device(name, cu_seqlens, query)
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) > total or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(
            f"{name} must start with 0, not decrease, and end at most at the number of tokens, {total}, got "
            f"{shown(cu_seqlens.tolist())}; it holds where each document starts, and where the last one ends"
        )
