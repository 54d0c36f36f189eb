"""Turns a file, documents or token ids into the few sequences on which a model is inspected."""

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

SHORTEST = 2  # tokens: a single query sees only itself


@dataclass
class Sequences:
    """Token sequences, their source, and sentences about what is missing compared with the request."""

    source: str
    inputs: list[dict[str, Tensor]] = field(default_factory=list)  # input_ids [1, T], position_ids [1, T] if packed
    missing: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """A hash of all tokens."""
        digest = hashlib.sha256()
        for each in self.inputs:
            for name in sorted(each):
                digest.update(f"{name} {each[name].shape[1]}\n".encode())
                digest.update(each[name].cpu().to(torch.int64).numpy().astype("<i8").tobytes())
        return digest.hexdigest()


def find_sequences(text: Any, tokenizer: Any, sequences: int, length: int, recipe: Recipe | None = None) -> Sequences:
    """The first `sequences` sequences of `length` tokens.

    Documents are concatenated as in training: the tokenizer's prefix (BOS), their tokens, the separator. They are split
    into sequences of `length`; positions restart at each document if the recipe trains with `document_boundaries`. A
    text that is shorter than one sequence gives one shorter sequence.

    Args:
        text: a file or folder (`lab.data.read_documents`); documents (strings); or sequences: ids [T], or
            mappings of input_ids and optionally position_ids [T], like those of `Corpus.heldout_dataset()`. None: the
            held-out text of the recipe.
        tokenizer: needed for text, not for ids.
        recipe: of the inspected run, if it is one.
    """
    for name, value, least in (("sequences", sequences, 0), ("length", length, SHORTEST)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    source, items = _items(text, recipe)
    found = Sequences(source)
    first = next(items, None)
    if first is not None and isinstance(first, str):
        if tokenizer is None:
            raise ValueError("tokenizer is missing: pass one to convert text to ids, or pass sequences of ids")
        encoder = DocumentEncoder(tokenizer, special_tokens=bool(recipe and recipe.special_tokens))
        _add_documents(found, first, items, encoder, sequences, length, bool(recipe and recipe.document_boundaries))
    elif first is not None:
        _add_ids(found, first, items, sequences, length)
    if not found.inputs and sequences:
        found.missing.append(f"{source} has no sequence of at least {SHORTEST} tokens: nothing was measured")
    elif len(found.inputs) < sequences:
        found.missing.append(f"{source} has {len(found.inputs)} of the {sequences} requested sequences")
    short = [each["input_ids"].shape[1] for each in found.inputs if each["input_ids"].shape[1] < length]
    if short:
        found.missing.append(
            f"{len(short)} of {len(found.inputs)} sequences are shorter than {length} tokens; the shortest has "
            f"{min(short)}"
        )
    if sequences == 0:
        found.missing.append("0 sequences were requested: nothing was measured")
    return found


def _items(text: Any, recipe: Recipe | None) -> tuple[str, Iterator[Any]]:
    column = "text" if recipe is None else recipe.text_column
    if text is None:
        return _held_out(recipe)
    if isinstance(text, str | Path):
        path = expanded(text, "text")
        if not path.exists():
            raise FileNotFoundError(
                f"text must be a file or folder that exists, got {str(text)!r}; pass text itself as a list of documents"
            )
        return str(text), iter(read_documents(path, text_column=column))
    if isinstance(text, Tensor):
        rows = text if text.dim() == 2 else text[None]
        return "token ids", iter(rows)
    # A torch Dataset has __getitem__ and __len__, but no __iter__.
    if isinstance(text, Mapping) or not (isinstance(text, Iterable) or hasattr(text, "__getitem__")):
        raise TypeError(f"text must be a file, documents, or sequences of token ids, got {type(text).__name__}")
    return "the text given", iter(text)


def _held_out(recipe: Recipe | None) -> tuple[str, Iterator[str]]:
    if recipe is None:
        raise ValueError("text is missing: only a run folder has held-out text; pass a file or documents")
    found = heldout_documents(recipe)
    if found is None:
        raise ValueError("text is missing: the run has no held-out text (heldout = 0); pass a file")
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
        found.missing.append(f"{left_out} sequences with fewer than {SHORTEST} tokens were skipped")
