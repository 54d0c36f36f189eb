"""Helpers for error messages: values cut to a readable length, and suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

LONGEST = 80  # characters of a value in an error message


def did_you_mean(value: Any, known: Iterable[str], text: str = "; did you mean {!r}?") -> str:
    """`; did you mean 'affine'?` for the known name that is closest to `value`, or "" if none is close."""
    near = get_close_matches(value[:100], list(dict.fromkeys(known)), n=1) if isinstance(value, str) else []
    return text.format(near[0]) if near else ""


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def shown(value: Any, longest: int = LONGEST) -> str:
    """A value for an error message, cut to `longest` characters."""
    if hasattr(value, "is_nested") and hasattr(value, "shape"):  # a tensor, without importing torch
        return "a nested tensor" if value.is_nested else f"a tensor of shape {list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print thousands of digits
    try:
        text = repr(value)
    except Exception:  # repr may raise, for example for a list that holds such an integer
        text = f"a {type(value).__name__}"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
