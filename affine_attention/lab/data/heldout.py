"""Selects held-out documents by a hash of their text, independent of their order and of other data."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..recipe import Recipe
from .sources import read_documents


class Split(Protocol):
    """Decides whether a document is held out from training."""

    def holds(self, text: str) -> bool: ...


def hash_fraction(text: str) -> float:
    """A hash of a document's words as a number in [0, 1); copies with other white space have the same hash."""
    digest, between = hashlib.blake2b(digest_size=8), b""
    for word in re.finditer(r"\S+", text):  # a list of all words would need ten times the memory of the text
        digest.update(between + word[0].encode())
        between = b" "
    return int.from_bytes(digest.digest()) / 2.0**64


class FractionSplit:
    """Holds out a share of the documents, and records the smallest share that would hold out at least one."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.lowest = 1.0

    def holds(self, text: str) -> bool:
        fraction = hash_fraction(text)
        self.lowest = min(self.lowest, fraction)
        return fraction < self.fraction

    def smallest_fraction(self) -> float:
        """A share, rounded up to two digits, that holds out at least one of the documents so far."""
        digits = 1 - math.floor(math.log10(max(self.lowest, 1e-12)))
        return (math.floor(self.lowest * 10**digits) + 1) / 10**digits


class CopySplit:
    """Holds out copies of documents that are already held out."""

    def __init__(self, documents: Iterable[str] = ()) -> None:
        self.hashes = {hash_fraction(text) for text in documents}
        self.copies = 0

    def holds(self, text: str) -> bool:
        copy = hash_fraction(text) in self.hashes
        self.copies += copy
        return copy


def heldout_documents(recipe: Recipe) -> tuple[str, Iterator[str]] | None:
    """(description of the source, held-out documents) of a recipe; None if nothing is held out."""
    if not isinstance(recipe.heldout, float):
        return ", ".join(recipe.heldout), read_documents(recipe.heldout, text_column=recipe.text_column)
    if recipe.heldout == 0:
        return None
    split = FractionSplit(recipe.heldout)
    documents = (each for each in read_documents(recipe.data, text_column=recipe.text_column) if split.holds(each))
    return f"documents held out of {', '.join(recipe.data)} ({recipe.heldout:g})", documents
