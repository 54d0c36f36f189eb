"""Finds the value at each query's own position where queries are not the last keys: in a preallocated cache.

The operator takes key i + S - T for the own key of query i. A preallocated cache has free slots behind it, and the mask
tells which keys are filled: a token is then the last key that it sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.finish import EMPTY, Finish, finish, uses_kernels
from .masks import values_are_unknown


class OwnKeys(NamedTuple):
    """The own keys of the queries of a call."""

    keys: Tensor  # [B, T]
    sees: Tensor  # [B, T]: whether the query sees any key
    is_unknown: Tensor | None  # [B]: sequences whose mask sees ahead; None: there are none


def own_keys(arguments: dict[str, Any], queries: int, num_keys: int) -> OwnKeys | None:
    """The own keys by the mask; None where the operator finds them itself.

    A mask that sees ahead does not tell them. Eager code raises. Compiled and captured graphs cannot read the mask:
    there `finish_with` sets the sequences concerned to NaN.
    """
    mask = arguments.get("mask")
    if mask is None or queries == num_keys:
        return None
    if mask.dim() == 2:
        if queries > 1:
            return None  # causal and bottom-right: the keys of these queries are the last ones
        seen = mask[:, None]
    else:
        seen = mask.any(1)
    # argmax returns the first of the largest values.
    last, sees = num_keys - 1 - seen.flip(-1).to(torch.uint8).argmax(-1), seen.any(-1)
    if queries == 1:
        return OwnKeys(last, sees, None)
    ahead = _sees_ahead(last, sees)
    if values_are_unknown():
        return OwnKeys(last, sees, ahead)
    if ahead.any():
        raise ValueError(
            "exclusion needs the position of each token, which a mask that sees ahead (image tokens see each other) "
            "does not tell where the cache holds other keys; prefill the whole prompt in one call with a growing cache"
        )
    return OwnKeys(last, sees, None)


def _sees_ahead(last: Tensor, sees: Tensor) -> Tensor:
    """[B]: whether a query sees a key after its own, from the last key [B, T] that each query sees.

    In a causal mask each query sees one key more than the one before it, until padding on the right, if any, adds no
    more. A block that sees ahead jumps to its end first, and stays there until the queries arrive.
    """
    steps = torch.where(sees[:, 1:] & sees[:, :-1], last.diff(dim=-1), 1)
    stayed = (steps == 0).cummax(-1).values
    return ((steps > 1) | ((steps > 0) & stayed)).any(-1)


def finish_with(y: Tensor, value: Tensor, own: OwnKeys, parts: Finish, impl: str) -> Tensor:
    """Exclusion, norm and gate of attention without them, for own keys that `own_keys` found."""
    keys, sees, is_unknown = own
    index = keys[:, None, :, None].expand(y.shape[0], value.shape[1], -1, value.shape[3])
    marks = (~sees).to(torch.uint8)[:, None] * EMPTY
    out = finish(y, value.gather(2, index), marks, parts, kernels=uses_kernels(y, impl))
    return out if is_unknown is None else out.masked_fill(is_unknown[:, None, None, None], torch.nan)
