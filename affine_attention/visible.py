"""Turns text from outside into text that is safe to show: what acts instead of showing is spelled out."""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_ACTING = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # controls, bidi and zero-width marks, surrogates, line separators


def visible(text: object) -> str:
    """The text with every character that acts instead of showing spelled out: `a\\x00b` becomes `a⟨U+0000⟩b`.

    Controls, bidi marks, zero-width characters and lone surrogates can turn a line around, hide a word, move a cursor
    or break a file. A zero-width joiner between two symbols stays, since emoji are made with it.
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
        elif unicodedata.category(letter) in _ACTING:
            shown.append(f"⟨U+{ord(letter):04X}⟩")
        else:
            shown.append(letter)
    return "".join(shown)


def printable(text: object, longest: int = 20_000) -> str:
    """Text for a terminal: its lines stay lines, all else as `visible` shows it, and a very long one is cut."""
    given = str(text)
    rest = f" … ({len(given):,} characters)" if len(given) > longest else ""
    return "\n".join(visible(line) for line in given[:longest].split("\n")) + rest
