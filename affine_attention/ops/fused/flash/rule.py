"""Converts the visibility of a call to the `Rule` that the kernels take as an argument."""

from __future__ import annotations

from ...visibility import Visibility
from ..shared.launch import Slot
from ..shared.tile_functions import Rule


def make_rule(visibility: Visibility, query_segments: Slot, key_segments: Slot, key_mask: Slot) -> Rule:
    """The rule of a call, without limits that no pair of the call can exceed."""
    queries, keys, window = visibility.num_queries, visibility.num_keys, visibility.window
    reach = None if window is None or window >= max(queries, keys) else max(window, 0) - 1
    has_segments = visibility.query_segments is not None
    return Rule(
        num_queries=queries,
        num_keys=keys,
        back=reach,
        ahead=0 if visibility.is_causal and (reach is None or reach >= 0) else reach,
        query_segments=query_segments if has_segments else None,
        key_segments=key_segments if has_segments else None,
        key_mask=None if visibility.key_mask is None else key_mask,
    )


def sums_are_prefixes(rule: Rule) -> bool:
    """True if the unmasked tiles of every row start at key 0."""
    return rule.back is None and rule.query_segments is None and rule.key_mask is None


def is_causal_only(rule: Rule) -> bool:
    """True if every query sees exactly the keys up to its own position."""
    return sums_are_prefixes(rule) and rule.ahead == 0
