"""Makes any text safe to read and to embed: names and tokens come from outside and may hold anything."""

from __future__ import annotations

import html
import json
import unicodedata
from typing import Any

LONGEST = 120
_NAMED = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(text: object) -> str:
    """The text with every character that acts instead of showing spelled out: `a\\x00b` becomes `a⟨U+0000⟩b`.

    Controls, bidi marks, zero-width characters and lone surrogates can turn a line around, hide a word or break a
    file. A zero-width joiner between two symbols stays, since emoji are made with it.
    """
    given = str(text)
    shown = []
    for index, letter in enumerate(given):
        if letter in _NAMED:
            shown.append(_NAMED[letter])
        elif letter == "\u200d" and 0 < index < len(given) - 1 and ord(given[index + 1]) > 0x2000:
            shown.append(letter)
        elif unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            shown.append(f"⟨U+{ord(letter):04X}⟩")
        else:
            shown.append(letter)
    return "".join(shown)


def short(text: object, longest: int = LONGEST) -> str:
    """Visible text, cut where it is too long, with the number of characters that it had."""
    whole = visible(text)
    if len(whole) <= longest:
        return whole
    return f"{whole[: longest - 1]}… ({len(str(text)):,} characters)"


def escaped(text: object) -> str:
    """Visible text for HTML, between tags or in a quoted attribute."""
    return html.escape(visible(text), quote=True)


def embedded_json(value: Any) -> str:
    """JSON that no HTML parser can end early or take for markup."""
    packed = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
