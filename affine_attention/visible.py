"""Escapes control characters and invisible characters in untrusted text, so that it is safe to display."""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "↵", "\t": "⇥", "\r": "␍"}
# Unicode categories: control, format, surrogate, private use, unassigned, line and paragraph separators.
_ESCAPED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def visible(text: object) -> str:
    """The text with control and invisible characters escaped: `a\\x00b` becomes `a⟨U+0000⟩b`.

    Control characters, bidi marks, zero-width characters and lone surrogates can reverse a line, hide text, move the
    cursor or break a file. A zero-width joiner between two symbols is kept, because emoji need it.
    """
    given = str(text)
    if given.isascii() and given.isprintable():
        return given
    shown = []
    for index, letter in enumerate(given):
        if letter in _NAMED:
            shown.append(_NAMED[letter])
        elif letter == "\u200d" and 0 < index < len(given) - 1 and ord(given[index + 1]) > 0x2000:
            shown.append(letter)
        elif unicodedata.category(letter) in _ESCAPED:
            shown.append(f"⟨U+{ord(letter):04X}⟩")
        else:
            shown.append(letter)
    return "".join(shown)


def printable(text: object, longest: int = 20_000) -> str:
    """Text for a terminal: line breaks are kept, other characters are escaped as in `visible`, long text is cut."""
    given = str(text)
    rest = f" … ({len(given):,} characters)" if len(given) > longest else ""
    return "\n".join(visible(line) for line in given[:longest].split("\n")) + rest
