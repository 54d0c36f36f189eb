"""Converts the visibility of a call to the `Rule` that the kernels take as an argument."""

from __future__ import annotations

from collections.abc import Callable

from ...visibility import Visibility
from .launch import Slot
from .tile_functions import Rule


def make_rule(
    visibility: Visibility,
    tensors: tuple[Slot, Slot, Slot] | None = None,
    of_state: Callable[[str], Slot] | None = None,
) -> Rule:
    """The rule of a call, without limits that no pair of the call can exceed.

    Args:
        visibility: of the call.
        tensors: the slots of the segments of queries, of those of keys, and of the key mask; needed if there are any.
        of_state: the slot of an array of the forward's state, by its name; needed with segments or a key mask.
    """
    queries, keys, window = visibility.num_queries, visibility.num_keys, visibility.window
    reach = None if window is None or window >= max(queries, keys) else max(window, 0) - 1
    has_segments, has_mask = visibility.query_segments is not None, visibility.key_mask is not None
    has_limits = depends_on_data(visibility)
    assert not has_limits or (tensors and of_state)
    return Rule(
        num_queries=queries,
        num_keys=keys,
        back=reach,
        ahead=0 if visibility.is_causal and (reach is None or reach >= 0) else reach,
        query_segments=tensors[0] if tensors and has_segments else None,
        key_segments=tensors[1] if tensors and has_segments else None,
        key_mask=tensors[2] if tensors and has_mask else None,
        limits=of_state("limits") if of_state and has_limits else None,
        irregular=of_state("irregular") if of_state and has_limits else None,
    )


def depends_on_data(visibility: Visibility) -> bool:
    """True if the keys that a query sees depend on segments or padding."""
    return visibility.query_segments is not None or visibility.key_mask is not None


def can_have_empty_rows(rule: Rule) -> bool:
    """True if there may be queries that see no key: with padding or segments, or before the first key."""
    if rule.limits is not None:
        return True
    return rule.ahead is not None and bool(rule.num_keys - rule.num_queries + rule.ahead < 0)


def sums_are_prefixes(rule: Rule) -> bool:
    """True if the unmasked tiles of every row start at key 0."""
    return rule.back is None and rule.limits is None


def is_causal_only(rule: Rule) -> bool:
    """True if every query sees exactly the keys up to its own position."""
    return sums_are_prefixes(rule) and rule.ahead == 0
