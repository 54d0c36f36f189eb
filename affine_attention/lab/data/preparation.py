"""Turns sources and a tokenizer into a `Corpus`: reads, splits and tokenizes text once, and caches the ids."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...cache import default_cache
from ...files import expanded
from .corpus import Corpus
from .heldout import CopySplit, FractionSplit, Split
from .readers import DocumentRule
from .sources import Layout, Source, find_sources
from .store import PartWriter, TokenPart, cached
from .tokenizer import DocumentEncoder, batched, check_vocabulary_size, load_tokenizer, train_tokenizer

FORMAT = 1  # of the cache and the fingerprint; changing it invalidates the cache
Names = str | Path | Sequence[str | Path]


def prepare(
    sources: Names,
    *,
    sequence_length: int,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    vocabulary_size: int | None = None,
    document_boundaries: bool = False,
    heldout: float | Names = 0.01,
    text_column: str = "text",
    documents: DocumentRule = "blank_line",
    separator: str | None = None,
    special_tokens: bool = False,
    streaming: bool = False,
    shuffle_window: int = 1024,
    heldout_sequences: int = 64,
    cache: str | Path | None = None,
    seed: int = 0,
) -> Corpus:
    """Reads, splits and tokenizes text once, caches the ids, and packs them into sequences.

    >>> corpus = prepare("corpus/*.train.txt.xz", vocabulary_size=8192, sequence_length=512)  # doctest: +SKIP

    Args:
        sources: files, folders, patterns or `hf:NAME[:CONFIG][@SPLIT]`; one or several (see `sources.py`).
        sequence_length: tokens per sequence.
        tokenizer: a hub name, a folder, a tokenizer.json or a tokenizer; None trains a byte-level BPE on the training
            part.
        vocabulary_size: of that BPE; ignored if a tokenizer is given.
        document_boundaries: position_ids restart with each document, so that attention is restricted to it, and its
            first token is an ignored label. Otherwise documents are concatenated and attend to each other.
        heldout: a share of documents, selected by a hash of their text, or separate sources; 0 holds nothing out.
            Held-out documents and copies of them are not trained on.
        text_column: the text column of json lines, parquet and datasets.
        documents: what ends a document in a text file: "blank_line", "line" or "file".
        separator: the token between documents; by default the tokenizer's end-of-text token.
        special_tokens: True parses special tokens in the text as tokens; False treats them as plain text.
        streaming: read documents while training instead of tokenizing them first; needs a tokenizer.
        shuffle_window: sequences of a stream that are shuffled together.
        heldout_sequences: minimum number of held-out sequences of a stream, if heldout is a share.
        cache: folder for ids and trained tokenizers; by default the user's cache folder.
        seed: of the order of the training sequences; `train_dataset` can override it.
    """
    _check_count("sequence_length", sequence_length, 2)
    _check_count("shuffle_window", shuffle_window, 1)
    _check_count("heldout_sequences", heldout_sequences, 1)
    layout = Layout(text_column, documents)
    text = _Text(find_sources(sources), *_read_heldout(heldout), layout)
    folder = default_cache() if cache is None else expanded(cache, "cache")
    content = text.identity() | {"text_column": text_column, "documents": documents, "streaming": streaming}

    tokenizer = _tokenizer(tokenizer, vocabulary_size, separator, text, content, folder, streaming)
    encoder = DocumentEncoder(tokenizer, separator, special_tokens)
    content |= {"tokenizer": encoder.fingerprint(), "separator": encoder.separator}

    # Tokens do not depend on the packing, so they are cached once for all packings.
    limit = heldout_sequences * sequence_length if streaming else None
    key = f"tokens-{_hash(content | {'limit': limit})[:24]}"
    parts = cached(folder, key, lambda part: text.write_tokens(part, encoder, limit))

    content |= {"sequence_length": sequence_length, "document_boundaries": document_boundaries}
    corpus = Corpus(
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        document_boundaries=document_boundaries,
        manifest={"fingerprint": _hash(content)} | content,
        train=None if streaming else TokenPart(parts, "train"),
        heldout=TokenPart(parts, "heldout") if text.holds_out else None,
        seed=seed,
        encoder=encoder,
        sources=text.sources,
        layout=layout,
        split=text.split() if streaming else CopySplit(),
        shuffle_window=shuffle_window,
    )
    _check_length(corpus, text.fraction)
    return corpus


@dataclass(frozen=True)
class _Text:
    """The documents of both parts: `sources` without a held-out share, or without copies of the `heldout` documents."""

    sources: list[Source]
    fraction: float
    heldout: list[Source]
    layout: Layout

    @property
    def holds_out(self) -> bool:
        return bool(self.fraction or self.heldout)

    def identity(self) -> dict[str, Any]:
        held = [source.identity() for source in self.heldout]
        sources = [source.identity() for source in self.sources]
        return {"sources": sources, "heldout": held or self.fraction}

    def split(self) -> Split:
        return FractionSplit(self.fraction) if self.fraction else CopySplit(self.read(self.heldout))

    def read(self, sources: list[Source]) -> Iterator[str]:
        """The documents of the sources; raises if a source is empty."""
        for source in sources:
            empty = True
            for document in source.read(self.layout):
                empty = False
                yield document
            if empty:
                raise ValueError(f"{source.name} contains no text")

    def write_tokenizer(self, folder: Path, vocabulary_size: int) -> None:
        split = self.split()
        documents = (
            document for document in _progress(self.read(self.sources), "reading") if not split.holds(document)
        )
        train_tokenizer(documents, vocabulary_size).save_pretrained(str(folder))

    def write_tokens(self, folder: Path, encoder: DocumentEncoder, limit: int | None) -> None:
        """Writes both parts; for a stream only the held-out part, about `limit` tokens."""
        split = self.split()
        with PartWriter(folder, "train", encoder.dtype) as train, PartWriter(folder, "heldout", encoder.dtype) as held:
            for texts in batched(self.read(self.heldout)):
                held.add(encoder.encode(texts), sum(map(len, texts)))
            if limit is None:
                for texts in batched(_progress(self.read(self.sources), "tokenizing")):
                    sides = [split.holds(document) for document in texts]
                    kept = [document for document, out in zip(texts, sides, strict=True) if not out]
                    train.add(encoder.encode(kept), sum(map(len, kept)))
                    if self.fraction:  # otherwise the excluded documents are copies of held-out ones
                        out_texts = [document for document, out in zip(texts, sides, strict=True) if out]
                        held.add(encoder.encode(out_texts), sum(map(len, out_texts)))
            elif self.fraction:
                stream = (document for source in self.sources for document in self._begin(source))
                for document in _progress(stream, "looking for held-out documents"):
                    if split.holds(document):
                        held.add(encoder.encode([document]), len(document))
                    if held.stats.tokens >= limit:
                        break
            if isinstance(split, FractionSplit):
                _check_split(split, train.stats.documents, held.stats.documents, streaming=limit is not None)
            elif limit is None and not train.stats.documents:
                raise ValueError("no document is left to train on: all of them are also in heldout; use other files")

    def _begin(self, source: Source) -> Iterator[str]:
        return source.stream(self.layout, seed=0, rank=0, ranks=1).start(epoch=0)


def _tokenizer(
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
    vocabulary_size: int | None,
    separator: str | None,
    text: _Text,
    content: dict[str, Any],
    folder: Path,
    streaming: bool,
) -> PreTrainedTokenizerBase:
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        if loaded.eos_token is None:  # a bare tokenizer.json; generation needs an end-of-text token
            loaded = copy.deepcopy(loaded)
            loaded.eos_token = DocumentEncoder(loaded, separator).separator
        return loaded
    check_vocabulary_size(vocabulary_size)
    if streaming:
        raise ValueError("a tokenizer cannot be trained on a stream; pass tokenizer=, or set streaming=False")
    assert vocabulary_size is not None
    size = vocabulary_size
    key = f"tokenizer-{_hash(content | {'vocabulary_size': size})[:24]}"
    return PreTrainedTokenizerFast.from_pretrained(cached(folder, key, lambda part: text.write_tokenizer(part, size)))


def _read_heldout(heldout: float | Names) -> tuple[float, list[Source]]:
    if isinstance(heldout, bool) or heldout is None:
        raise TypeError(f"heldout must be a share of documents or sources, got {heldout!r}; 0 holds nothing out")
    if isinstance(heldout, int | float):
        if not 0 <= heldout < 1:
            raise ValueError(f"heldout must be a share from 0 to below 1, or sources, got {heldout}")
        return float(heldout), []
    return 0.0, find_sources(heldout)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_split(split: FractionSplit, trained: int, held: int, streaming: bool) -> None:
    others = "pass held-out files with heldout=, or hold nothing out with heldout=0"
    if not streaming and trained + held == 1:
        raise ValueError(
            "the data is a single document, so no document can be held out; split it (documents='line', or an empty "
            f"line between documents), {others}"
        )
    if not held:
        share = split.smallest_fraction()
        way = f"heldout={share:g} holds out one, or " if share < 1 else ""
        many = "documents of the stream" if streaming else f"{trained} documents"
        raise ValueError(f"heldout={split.fraction:g} holds out none of the {many}; {way}{others}")
    if not streaming and not trained:
        raise ValueError(f"heldout={split.fraction:g} leaves no document to train on; lower it, or {others}")


def _check_length(corpus: Corpus, fraction: float) -> None:
    """Raises ValueError unless each part fills at least one sequence."""
    for what, part in (("training", corpus.train), ("held-out", corpus.heldout)):
        if part is not None and part.stats.tokens < corpus.sequence_length:
            way = "lower sequence_length or add text"
            if part is corpus.heldout:
                way += ", raise heldout" if fraction else ", add held-out files"
                way += ", or hold nothing out with heldout=0"
            raise ValueError(
                f"the {what} part has {part.stats.tokens} tokens in {part.stats.documents} documents, fewer than one "
                f"sequence of {corpus.sequence_length}; {way}"
            )


def _progress(documents: Iterator[str], what: str) -> Iterator[str]:
    """A progress bar over characters, on a terminal."""
    with tqdm(desc=what, unit="char", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:
        for document in documents:
            yield document
            bar.update(len(document))


def _hash(content: dict[str, Any]) -> str:
    """A hash of the content of the data, independent of the names and locations of its files."""
    return hashlib.sha256(json.dumps([FORMAT, _nameless(content)], sort_keys=True).encode()).hexdigest()


def _nameless(content: Any) -> Any:
    if isinstance(content, list):
        return [_nameless(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    named = "sha256" in content or all(isinstance(file, dict) for file in content.get("files", [None]))
    return {key: _nameless(value) for key, value in content.items() if not (named and key == "name")}
