"""Makes any text safe to read and to embed: names and tokens come from outside and may hold anything."""

from __future__ import annotations

import html
import json
from typing import Any

from ...visible import visible

__all__ = ["embedded_json", "escaped", "short", "visible"]

LONGEST = 120


def short(text: object, longest: int = LONGEST) -> str:
    """Visible text, cut where it is too long, with the number of characters that it had."""
    given = str(text)
    whole = visible(given[: longest + 1])  # no more of it than can be shown: a name may have megabytes
    if len(given) <= longest and len(whole) <= longest:
        return whole
    return f"{whole[: longest - 1]}… ({len(given):,} characters)"


def escaped(text: object) -> str:
    """Visible text for HTML, between tags or in a quoted attribute."""
    return html.escape(visible(text), quote=True)


def embedded_json(value: Any) -> str:
    """JSON that no HTML parser can end early or take for markup."""
    packed = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
