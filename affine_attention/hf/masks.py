"""Turns what transformers knows about visible keys into the operator's arguments, without a T x S mask.

Transformers asks a registered *mask function* once per forward and hands its answer to every attention layer. Two
rules of the library shape the answer: it must be None or a tensor of four dimensions (anything else is taken for a
padding mask by `generate`), and the layers are not told the sliding window (only the mask is). So the answer here is
a small *code*, and `read_mask` turns it back:

| answer | means |
|---|---|
| None | causal over the first T keys (T = 1: over all): transformers' own convention for "no mask needed" |
| uint8 [B or 1, W + 1, 1, n] | causal over the first n keys, bottom-right; 0 is padding; W a window, 0: none |
| uint8 [1, W + 1, 1, 0] | the same over all keys, none of them padding |
| int64 [B, W + 1, 1, n] | the same, the numbers are the segments of packed documents |
| bool [B, 1 or H, T, S] | the whole mask: a user's own, or a pattern that is none of the above |

The second dimension is an expanded view: a code holds n numbers for each row of the batch, whatever the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, packed_sequence_mask_function, sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function as sliding_mask_function

KEY_CODE = torch.uint8
SEGMENT_CODE = torch.int64
SEQUENCE_RANKS = "_affine_sequence_ranks"  # in a configuration: how many ranks hold the parts of a sequence


class Visible(NamedTuple):
    """What a layer sees in one call: arguments of the operator, and the keys that exist.

    `token_mask` [B, T] says which queries are tokens where the arguments do not: a mask [B, S] does.
    """

    arguments: dict[str, Any]
    num_keys: int
    token_mask: Tensor | None


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **rest: Any,
) -> Tensor | None:
    """The mask function that is registered with transformers; see the table above."""
    pattern = _pattern(mask_function, local_size, config, use_vmap)
    growing = not isinstance(q_offset, Tensor)  # a preallocated cache keeps its length in a tensor
    known_end = growing and q_offset + q_length - kv_offset <= kv_length
    if pattern is None or not (known_end or q_length == 1):
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, use_vmap=use_vmap,
            device=device, allow_is_causal_skip=False,
        )  # fmt: skip
    window, segments = pattern
    if not known_end or (q_length == 1 and q_offset + 1 - kv_offset < kv_length):
        # One query before a preallocated cache: shapes must not change from step to step, or decoding recompiles.
        position_S = torch.arange(kv_length, device=device) + kv_offset
        seen_S = position_S <= q_offset
        if window is not None:
            seen_S = seen_S & (position_S > q_offset - window)
        padding = _padding(attention_mask, kv_offset, kv_length)
        return _code(seen_S[None] if padding is None else seen_S & padding)

    num_keys: Any = q_offset + q_length - kv_offset
    keep = _padding(attention_mask, kv_offset, num_keys)
    if keep is not None and not values_are_unknown() and bool(keep.all()):
        keep = None
    if window is not None and num_keys * getattr(config, SEQUENCE_RANKS, 1) <= window:
        window = None
    if segments is not None:
        return _code(segments, window)
    if keep is not None or window is not None:
        whole = keep is None and num_keys == kv_length
        return _code(None if whole else _all_kept(keep, num_keys, device), window, device)
    if num_keys == q_length or q_length == 1:
        return None
    return _code(None if num_keys == kv_length else _all_kept(None, num_keys, device), None, device)


def read_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, segments: Tensor | None) -> Visible:
    """The inverse of `compact_mask`; `segments` [B, T] are those of packed `position_ids`, if any."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = is_causal and queries > 1
    if mask is None:
        num_keys = queries if causal and keys > queries else keys
        return _with_segments(Visible({"is_causal": causal}, num_keys, None), segments, queries)
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask must have 2 dimensions [B, S] or 4 [B, 1 or H, T, S] when it reaches the model, got "
            f"{mask.dim()}: {list(mask.shape)}"
        )
    if mask.dtype not in (KEY_CODE, SEGMENT_CODE):
        return _with_segments(_read_dense(mask, batch, queries, keys), segments, queries)
    arguments: dict[str, Any] = {"is_causal": causal}
    if mask.shape[1] > 1:
        arguments["window"] = mask.shape[1] - 1
    columns = mask[:, 0, 0].expand(batch, -1)
    if columns.shape[1] == 0:
        return _with_segments(Visible(arguments, keys, None), segments, queries)
    if mask.dtype == SEGMENT_CODE:
        arguments["segment_ids"] = columns
        return Visible(arguments, columns.shape[1], None)
    arguments["mask"] = columns.bool()
    return _with_segments(Visible(arguments, columns.shape[1], None), segments, queries)


def values_are_unknown() -> bool:
    """Whether the values of tensors cannot be read: while a graph is compiled, or captured as a CUDA graph."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def packed_segments(position_ids: Tensor, batch: int) -> Tensor:
    """Numbers the documents of packed rows: a new one starts wherever a position does not follow the last."""
    steps = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1)
    return (steps != 1).long().cumsum(-1).expand(batch, -1)


def _with_segments(visible: Visible, segments: Tensor | None, queries: int) -> Visible:
    if segments is None:
        return visible
    if visible.num_keys != queries:
        raise ValueError(
            f"packed position_ids cannot be used with cached keys: {queries} tokens met {visible.num_keys} keys; "
            "pass a packed row whole and without past_key_values"
        )
    return visible._replace(arguments=visible.arguments | {"segment_ids": segments})


def _read_dense(mask: Tensor, batch: int, queries: int, keys: int) -> Visible:
    if mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, queries) or mask.shape[3] < keys:
        raise ValueError(
            f"attention_mask must have shape [B, 1 or H, T, S] = [{batch}, 1 or H, {queries}, {keys}], got "
            f"{list(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        mask = _as_boolean(mask)
    seen = mask[..., :keys].expand(batch, -1, queries, -1)
    # Padding neither sees itself in a mask of transformers nor is a token of the running average.
    token_mask = None
    if queries > 1 and keys >= queries:
        token_mask = seen[:, :, :, keys - queries :].diagonal(dim1=2, dim2=3).any(1)
    return Visible({"mask": seen}, keys, token_mask)


def _as_boolean(mask: Tensor) -> Tensor:
    """An additive mask of zeros and very large negative numbers as a boolean one; a real bias is refused."""
    lowest = torch.finfo(mask.dtype).min if mask.dtype.is_floating_point else None
    if lowest is None:
        raise TypeError(f"attention_mask of 4 dimensions must be boolean, got {mask.dtype}; convert it with .bool()")
    if torch.compiler.is_compiling():
        raise TypeError(
            f"attention_mask of 4 dimensions must be boolean under torch.compile, got {mask.dtype}; pass mask == 0"
        )
    hidden = mask <= lowest / 2
    if not bool((hidden | (mask == 0)).all()):
        raise ValueError(
            "attention_mask must only say which keys are visible (True / False, or 0 / the lowest number of its "
            "dtype), got other numbers: a bias on the scores is not part of any mechanism"
        )
    return ~hidden


def _pattern(
    mask_function: Callable, local_size: int | None, config: Any, use_vmap: bool
) -> tuple[int | None, Tensor | None] | None:
    """(window, segments) where the pattern is causal with nothing else, None where only the dense mask will do."""
    if use_vmap:
        return None  # a pattern of the user's own
    window = None
    if local_size is not None:
        if local_size != getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
            return None
        window = local_size
    if values_are_unknown():
        # Transformers cannot read position_ids then and always adds a packing term. Whether a call is packed is known
        # to the model's pre-hook (interface.py), which passes the segments to the layers itself.
        return window, None
    segments = None
    for part in _parts(mask_function):
        if part.__code__ is _PACKED_CODE:
            segments = _closed_over(part)
        elif part.__code__ not in _KNOWN_CODES:
            return None
    return window, segments


def _parts(mask_function: Callable) -> list[Callable]:
    """The functions that a pattern of transformers joins with `and`."""
    if getattr(mask_function, "__code__", None) is not _AND_CODE:
        return [mask_function]
    return [leaf for part in _closed_over(mask_function) for leaf in _parts(part)]


def _closed_over(function: Any) -> Any:
    return function.__closure__[0].cell_contents


# A pattern is known by the code of its functions: another version of transformers that builds it in another way is not
# recognised and gets the dense mask, which is slower and never wrong.
_SLIDING = sliding_mask_function(1)
_AND_CODE = _SLIDING.__code__
_PACKED_CODE = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_KNOWN_CODES = {causal_mask_function.__code__, *(part.__code__ for part in _parts(_SLIDING))}


def _padding(attention_mask: Tensor | None, first: int, count: int) -> Tensor | None:
    """The columns first..first+count of a [B, S] mask; what it does not cover is padding, as in transformers."""
    if attention_mask is None:
        return None
    missing = first + count - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, first : first + count].bool()


def _all_kept(keep: Tensor | None, num_keys: int, device: torch.device | str) -> Tensor:
    return torch.ones(1, num_keys, dtype=torch.bool, device=device) if keep is None else keep


def _code(columns: Tensor | None, window: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    if columns is None:
        columns = torch.ones(1, 0, dtype=KEY_CODE, device=device)
    elif columns.dtype == torch.bool:
        columns = columns.to(KEY_CODE)
    else:
        columns = columns.to(SEGMENT_CODE)
    return columns[:, None, None].expand(-1, (window or 0) + 1, -1, -1)
