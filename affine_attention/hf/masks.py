"""Converts the masks of transformers into the operator's arguments, without a T x S mask.

Transformers calls a registered *mask function* once per forward and passes its result to every attention layer. Two
constraints of the library shape that result: it must be None or a 4-dimensional tensor (`generate` treats anything else
as a padding mask), and the layers do not receive the sliding window, only the mask. The mask function here therefore
returns a small *code*, which `read_mask` decodes:

| code | meaning |
|---|---|
| None | causal over the first T keys (T = 1: over all keys): transformers' convention for "no mask needed" |
| uint8 [B or 1, W + 1, 1, n] | causal over the first n keys, bottom-right; 0 is padding; W is the window, 0 if none |
| uint8 [1, W + 1, 1, 0] | the same over all keys, without padding |
| int64 [B, W + 1, 1, n] | the same; the values are the segment ids of packed documents |
| bool [B, 1 or H, T, S] | the dense mask: passed by the user, or a pattern that is none of the above |

The second dimension is an expanded view: a code stores n values per row of the batch, whatever the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, packed_sequence_mask_function, sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function as sliding_mask_function

MaskFunction = Callable[..., Any]
KEY_CODE = torch.uint8
SEGMENT_CODE = torch.int64
SEQUENCE_RANKS = "_affine_sequence_ranks"  # in a configuration: how many ranks hold the parts of a sequence


class Visible(NamedTuple):
    """A decoded mask: the operator's visibility arguments and the number of keys that are filled.

    `token_mask` [B, T] marks the queries that are real tokens; None if a [B, S] mask in `arguments` already does.
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
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **rest: Any,
) -> Tensor | None:
    """The mask function registered with transformers; the table above lists what it returns."""
    pattern = _pattern(mask_function, local_size, config, use_vmap)
    growing = not isinstance(q_offset, Tensor)  # a preallocated cache stores its length in a tensor
    known_end = growing and q_offset + q_length - kv_offset <= kv_length
    if pattern is None or not (known_end or q_length == 1):
        dense: Tensor = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, use_vmap=use_vmap,
            device=device, allow_is_causal_skip=False,
        )  # fmt: skip
        return dense
    window, segments = pattern
    if not known_end or (q_length == 1 and q_offset + 1 - kv_offset < kv_length):
        # One query with a preallocated cache: shapes must not change from step to step, or decoding recompiles.
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
    # Layers with this setting say is_causal=False (PaliGemma's), so that None would mean all keys.
    explicit = getattr(config, "use_bidirectional_attention", False)
    if (num_keys == q_length and not explicit) or q_length == 1:
        return None
    return _code(None if num_keys == kv_length else _all_kept(None, num_keys, device), None, device)


def read_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, segments: Tensor | None) -> Visible:
    """Decodes the result of `compact_mask`; `segments` [B, T] are the segment ids of packed `position_ids`, if any."""
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    causal = bool(is_causal and queries > 1)  # a symbolic length makes the comparison symbolic in torch.export
    if mask is None:
        num_keys = queries if causal and keys > queries else keys
        return _with_segments(Visible({"is_causal": causal}, num_keys, None), segments, queries)
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask passed to the model must have 2 dimensions [B, S] or 4 [B, 1 or H, T, S], got "
            f"{mask.dim()}: {list(mask.shape)}"
        )
    if mask.dtype not in (KEY_CODE, SEGMENT_CODE):
        return _with_segments(_read_dense(mask, batch, queries, keys), segments, queries)
    arguments: dict[str, Any] = {"is_causal": bool(queries > 1)}  # every code is causal, whatever the module says
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
    """True while tensor values cannot be read: during tracing by torch.compile and during CUDA graph capture."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def packed_segments(position_ids: Tensor, batch: int) -> Tensor:
    """Segment ids of packed rows: a new document starts wherever a position is not the previous one plus 1."""
    steps = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1)
    return (steps != 1).long().cumsum(-1).expand(batch, -1)


def _with_segments(visible: Visible, segments: Tensor | None, queries: int) -> Visible:
    if segments is None:
        return visible
    if visible.num_keys != queries:
        raise ValueError(
            f"packed position_ids cannot be used with cached keys, got {queries} tokens and {visible.num_keys} keys; "
            "pass packed rows in one call, without past_key_values"
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
    # In the masks of transformers a padding token does not see itself. It must not enter the running average.
    token_mask = None
    if queries > 1 and keys >= queries:
        token_mask = seen[:, :, :, keys - queries :].diagonal(dim1=2, dim2=3).any(1)
    return Visible({"mask": seen}, keys, token_mask)


def _as_boolean(mask: Tensor) -> Tensor:
    """Converts an additive mask of zeros and very large negative numbers to a boolean mask; raises for a real bias."""
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
            "attention_mask must only mark visible keys (True / False, or 0 / the lowest number of its dtype), got "
            "other values: no mechanism supports a bias on the scores"
        )
    return ~hidden


def _pattern(
    mask_function: MaskFunction, local_size: int | None, config: Any, use_vmap: bool
) -> tuple[int | None, Tensor | None] | None:
    """Returns (window, segments) for a causal pattern, or None for a pattern that needs the dense mask."""
    if use_vmap:
        return None  # a custom pattern of the user
    window = None
    if local_size is not None:
        if local_size != getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
            return None
        window = local_size
    if values_are_unknown():
        if mask_function.__name__ not in _TRACED_NAMES:
            return None  # a prefix or block that sees in both directions
        # Transformers cannot read position_ids here and always adds a packing term. The pre-hook of the decoder
        # (interface.py) detects packing and passes the segments to the layers itself.
        return window, None
    segments = None
    for part in _parts(mask_function):
        if part.__code__ is _PACKED_CODE:
            segments = _closed_over(part)
        elif part.__code__ not in _KNOWN_CODES:
            return None
    return window, segments


def _parts(mask_function: MaskFunction) -> list[MaskFunction]:
    """Returns the functions that a pattern of transformers combines with `and`."""
    code = getattr(mask_function, "__code__", None)
    if code is _REMAP_CODE:
        return _parts(_closed_over(mask_function))
    if code is not _AND_CODE:
        return [mask_function]
    return [leaf for part in _closed_over(mask_function) for leaf in _parts(part)]


def _closed_over(function: Any) -> Any:
    """The first variable of an enclosing function, in the order of their names."""
    return function.__closure__[0].cell_contents


# Patterns are recognised by the code objects of their functions. If another version of transformers builds a pattern
# differently, it is not recognised and gets the dense mask, which is slower but correct.
_SLIDING = sliding_mask_function(1)
_AND_CODE = _SLIDING.__code__
# Newer versions count positions from the start of each document, where documents are packed. The difference of two
# positions of one document is that of their places in the row, so causality and windows stay as they are.
_REMAP: Any = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAP_CODE = _REMAP(causal_mask_function, torch.zeros(1, 1)).__code__ if _REMAP is not None else object()
_PACKED_CODE = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
# The closures of a function that is traced cannot be read, its name can: plain causal, or parts joined with `and`.
_TRACED_NAMES = (causal_mask_function.__name__, _SLIDING.__name__)
_KNOWN_CODES = {causal_mask_function.__code__, *(part.__code__ for part in _parts(_SLIDING))}


def _padding(attention_mask: Tensor | None, first: int, count: int) -> Tensor | None:
    """Columns first..first+count of a [B, S] mask; missing columns count as padding, as in transformers."""
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
