"""Prepares docstrings for the API reference: examples become code, and an entry for two arguments becomes two."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^(>>> .*(?:\n(?!$).*)*)")  # from the prompt to the next empty line
SHARED = re.compile(r"(?m)^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)")  # "key, value: [B, G, S, D]"


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None or "```" in obj.docstring.value:
            return
        text = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
        text = re.sub(r" +# doctest: \+SKIP", "", text)
        obj.docstring.value = SHARED.sub(one_for_each, text)


def one_for_each(found: re.Match[str]) -> str:
    indent, names, words = found.groups()
    return "\n".join(f"{indent}{name}: {words}" for name in names.split(", "))
