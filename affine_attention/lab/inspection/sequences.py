"""Turns a file, documents or token ids into the few sequences on which a model is looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...files import expanded
from ..data import heldout_documents, read_documents
from ..data.packing import as_example
from ..data.tokenizer import DocumentEncoder
from ..recipe import Recipe

SHORTEST = 2  # tokens: a lone query sees itself alone


@dataclass
class Sequences:
    """Token sequences, where they come from, and what is missing of what was asked for, in sentences."""

    source: str
    inputs: list[dict[str, Tensor]] = field(default_factory=list)  # input_ids [1, T], position_ids [1, T] if packed
    missing: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """Changes when any token does."""
        digest = hashlib.sha256()
        for each in self.inputs:
            for name in sorted(each):
                digest.update(f"{name} {each[name].shape[1]}\n".encode())
                digest.update(each[name].cpu().to(torch.int64).numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def find_sequences(text: Any, tokenizer: Any, sequences: int, length: int, recipe: Recipe | None = None) -> Sequences:
    """The first `sequences` sequences of `length` tokens.

    Documents stand one after the other as in training: what the tokenizer puts first, their tokens, the separator. They
    are cut into pieces of `length`; positions start again at each document if the recipe trains with
    `document_boundaries`. A text that is shorter than one piece is one shorter sequence.

    Args:
        text: a file or folder (`lab.data.read_documents`); documents (strings); or sequences: ids [T], or
            mappings of input_ids and perhaps position_ids [T], as those of `Corpus.heldout_dataset()`. None: what
            the recipe held out.
        tokenizer: needed for text, not for ids.
        recipe: of the run that is looked at, if it is one.
    """
    for name, value, least in (("sequences", sequences, 0), ("length", length, SHORTEST)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    source, items = _items(text, recipe)
    found = Sequences(source)
    first = next(items, None)
    if first is not None and isinstance(first, str):
        if tokenizer is None:
            raise ValueError("tokenizer is missing: text has to be turned into ids; pass one, or sequences of ids")
        encoder = DocumentEncoder(tokenizer, special_tokens=bool(recipe and recipe.special_tokens))
        _add_documents(found, first, items, encoder, sequences, length, bool(recipe and recipe.document_boundaries))
    elif first is not None:
        _add_ids(found, first, items, sequences, length)
    if not found.inputs and sequences:
        found.missing.append(f"{source} has no sequence of at least {SHORTEST} tokens: nothing was looked at")
    elif len(found.inputs) < sequences:
        found.missing.append(f"{source} has {len(found.inputs)} of the {sequences} sequences that were asked for")
    short = [each["input_ids"].shape[1] for each in found.inputs if each["input_ids"].shape[1] < length]
    if short:
        found.missing.append(
            f"{len(short)} of {len(found.inputs)} sequences are shorter than {length} tokens; the shortest has "
            f"{min(short)}"
        )
    if sequences == 0:
        found.missing.append("0 sequences were asked for: nothing was looked at")
    return found


def _items(text: Any, recipe: Recipe | None) -> tuple[str, Iterator[Any]]:
    column = "text" if recipe is None else recipe.text_column
    if text is None:
        return _held_out(recipe)
    if isinstance(text, str | Path):
        path = expanded(text, "text")
        if not path.exists():
            raise FileNotFoundError(
                f"text must be a file or folder that exists, got {str(text)!r}; give words as a list of documents"
            )
        return str(text), iter(read_documents(path, text_column=column))
    if isinstance(text, Tensor):
        rows = text if text.dim() == 2 else text[None]
        return "token ids", iter(rows)
    # A dataset of torch has items and a length, and no __iter__.
    if isinstance(text, Mapping) or not (isinstance(text, Iterable) or hasattr(text, "__getitem__")):
        raise TypeError(f"text must be a file, documents, or sequences of token ids, got {type(text).__name__}")
    return "the text given", iter(text)


def _held_out(recipe: Recipe | None) -> tuple[str, Iterator[str]]:
    if recipe is None:
        raise ValueError("text is missing: only the folder of a run names text that its model has not seen")
    found = heldout_documents(recipe)
    if found is None:
        raise ValueError("text is missing: the run held nothing out (heldout = 0), so name a file")
    return found


def _add_documents(
    found: Sequences,
    first: str,
    rest: Iterator[Any],
    encoder: DocumentEncoder,
    sequences: int,
    length: int,
    boundaries: bool,
) -> None:
    ids: list[int] = []
    starts: list[int] = []
    document: Any = first
    while document is not None and len(found.inputs) < sequences:
        if not isinstance(document, str):
            raise TypeError(
                f"text must hold documents or ids, not both, got {type(document).__name__} after a document"
            )
        starts.append(len(ids))
        ids += encoder.encode([document])[0].tolist()
        while len(ids) >= length and len(found.inputs) < sequences:
            _add(found, ids[:length], [each for each in starts if each < length] if boundaries else None)
            ids, starts = ids[length:], [each - length for each in starts if each >= length]
        document = next(rest, None)
    if not found.inputs and sequences and len(ids) >= SHORTEST:
        _add(found, ids, starts if boundaries else None)


def _add(found: Sequences, ids: list[int], starts: list[int] | None) -> None:
    example = as_example(torch.tensor(ids).numpy(), starts)
    found.inputs.append({name: x[None] for name, x in example.items() if name != "labels"})


def _add_ids(found: Sequences, first: Any, rest: Iterator[Any], sequences: int, length: int) -> None:
    item, left_out = first, 0
    while item is not None and len(found.inputs) < sequences:
        parts = item if isinstance(item, Mapping) else {"input_ids": item}
        if "input_ids" not in parts:
            raise ValueError(f"a sequence given as a mapping must have input_ids, got {', '.join(map(repr, parts))}")
        tensors = {}
        for name in ("input_ids", "position_ids"):
            if parts.get(name) is not None:
                ids = torch.as_tensor(parts[name])
                if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
                    raise ValueError(f"{name} must be integers [T], got {ids.dtype} {list(ids.shape)}")
                tensors[name] = ids[:length].long()[None]
        if tensors["input_ids"].shape[1] >= SHORTEST:
            found.inputs.append(tensors)
        else:
            left_out += 1
        item = next(rest, None)
    if left_out:
        found.missing.append(f"{left_out} sequences of fewer than {SHORTEST} tokens were left out")
