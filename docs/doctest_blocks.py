"""Fences the doctest examples of docstrings, so that the API reference shows them as code and not as quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^(>>> .*(?:\n(?!$).*)*)")  # from the prompt to the next empty line


class DoctestBlocks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and "```" not in obj.docstring.value:
            text = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
            obj.docstring.value = re.sub(r" +# doctest: \+SKIP", "", text)
