"""Decides which documents are held out: by a hash of their text, so that order and added data change nothing."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..recipe import Recipe
from .sources import read_documents


class Split(Protocol):
    """Says of a document whether it must not be trained on."""

    def holds(self, text: str) -> bool: ...


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that a document's words decide; copies with other spaces or line ends have the same."""
    digest, between = hashlib.blake2b(digest_size=8), b""
    for word in re.finditer(r"\S+", text):  # a list of all words takes ten times the text
        digest.update(between + word[0].encode())
        between = b" "
    return int.from_bytes(digest.digest()) / 2.0**64


class FractionSplit:
    """Holds out a share of documents; remembers enough to say what share would hold out one at all."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.lowest = 1.0

    def holds(self, text: str) -> bool:
        place = hash_fraction(text)
        self.lowest = min(self.lowest, place)
        return place < self.fraction

    def smallest_fraction(self) -> float:
        """A share, rounded up to two digits, that holds out at least one of the documents seen."""
        digits = 1 - math.floor(math.log10(max(self.lowest, 1e-12)))
        return (math.floor(self.lowest * 10**digits) + 1) / 10**digits


class CopySplit:
    """Holds out copies of documents that are held out already."""

    def __init__(self, documents: Iterable[str] = ()) -> None:
        self.places = {hash_fraction(text) for text in documents}
        self.copies = 0

    def holds(self, text: str) -> bool:
        copy = hash_fraction(text) in self.places
        self.copies += copy
        return copy


def heldout_documents(recipe: Recipe) -> tuple[str, Iterator[str]] | None:
    """(where they come from, the documents that a run of this recipe never trains on); None where there are none."""
    if not isinstance(recipe.heldout, float):
        return ", ".join(recipe.heldout), read_documents(recipe.heldout, text_column=recipe.text_column)
    if recipe.heldout == 0:
        return None
    split = FractionSplit(recipe.heldout)
    documents = (each for each in read_documents(recipe.data, text_column=recipe.text_column) if split.holds(each))
    return f"documents held out of {', '.join(recipe.data)} ({recipe.heldout:g})", documents
