"""Escapes and shortens text for the page: names and tokens are untrusted."""

from __future__ import annotations

import html
import json
from typing import Any

from ...visible import visible

__all__ = ["embedded_json", "escaped", "short", "visible"]

LONGEST = 120


def short(text: object, longest: int = LONGEST) -> str:
    """Visible text, cut to `longest` characters, with the original length."""
    given = str(text)
    whole = visible(given[: longest + 1])  # only the shown part: a name may have megabytes
    if len(given) <= longest and len(whole) <= longest:
        return whole
    return f"{whole[: longest - 1]}… ({len(given):,} characters)"


def escaped(text: object) -> str:
    """Visible text for HTML, between tags or in a quoted attribute."""
    return html.escape(visible(text), quote=True)


def embedded_json(value: Any) -> str:
    """JSON without characters that could end the script element or be parsed as markup."""
    packed = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
