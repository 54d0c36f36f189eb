"""Turns tokenized text into the datasets of a run: training sequences in their final order, and held-out sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .heldout import Split
from .packing import PackedDataset
from .sources import Layout, Source
from .store import TokenPart
from .streaming import StreamedDataset
from .tokenizer import DocumentEncoder


@dataclass(frozen=True)
class Corpus:
    """Tokenized, packed text in a training and a held-out part. Created by `prepare`.

    `manifest` is JSON: the fingerprint and everything it depends on; `check_same_data` compares two manifests. `train`
    is None for a stream, `heldout` is None if nothing is held out.
    """

    tokenizer: PreTrainedTokenizerBase
    sequence_length: int
    document_boundaries: bool
    manifest: dict[str, Any]
    train: TokenPart | None
    heldout: TokenPart | None
    seed: int
    encoder: DocumentEncoder
    sources: list[Source]
    layout: Layout
    split: Split
    shuffle_window: int

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def streaming(self) -> bool:
        return self.train is None

    @property
    def vocabulary_size(self) -> int:
        """The smallest model vocabulary that includes every token of the tokenizer."""
        return self.encoder.largest_id + 1

    @property
    def largest_id(self) -> int:
        """The largest id in the data; for a stream, the largest id that the tokenizer can produce."""
        if self.train is None:
            return self.encoder.largest_id
        return max(part.stats.largest_id for part in (self.train, self.heldout) if part is not None)

    @property
    def stats(self) -> dict[str, int | None]:
        """Documents, tokens, sequences and characters of both parts; None for the training part of a stream."""
        found: dict[str, int | None] = {}
        for name, part in (("", self.train), ("heldout_", self.heldout)):
            unknown = None if name == "" else 0
            found[f"{name}documents"] = unknown if part is None else part.stats.documents
            found[f"{name}tokens"] = unknown if part is None else part.stats.tokens
            found[f"{name}sequences"] = unknown if part is None else part.stats.tokens // self.sequence_length
            found[f"{name}characters"] = unknown if part is None else part.stats.characters
        return found

    def epochs(self, num_sequences: int) -> float | None:
        """The number of passes over the training part in `num_sequences` sequences; None for a stream."""
        sequences = self.stats["sequences"]
        return None if sequences is None else num_sequences / sequences

    def train_dataset(
        self, num_sequences: int, seed: int | None = None, *, rank: int = 0, ranks: int = 1
    ) -> PackedDataset | StreamedDataset:
        """The training sequences of a run in their final order, to be read with a sequential sampler.

        Args:
            num_sequences: steps * global batch; each epoch has its own order.
            seed: of the order; by default the seed of `prepare`.
            rank: for streams only, if the loader does not distribute sequences over ranks: the index of this rank.
            ranks: number of ranks that share the documents of a stream; num_sequences is then per rank.
        """
        seed = self.seed if seed is None else seed
        if num_sequences < 1:
            raise ValueError(f"num_sequences must be at least 1, got {num_sequences}")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be from 0 to ranks - 1 = {ranks - 1}, got {rank}")
        if self.train is None:
            streams = [source.stream(self.layout, seed, rank, ranks) for source in self.sources]
            return StreamedDataset(
                streams, self.encoder, self.split, self.sequence_length, self.document_boundaries, num_sequences, seed,
                self.shuffle_window,
            )  # fmt: skip
        if ranks > 1:
            raise ValueError("rank and ranks are for streams only; a sampler distributes packed sequences over ranks")
        starts = self.train.starts if self.document_boundaries else None
        return PackedDataset(self.train.ids, starts, self.sequence_length, num_sequences, seed)

    def heldout_dataset(self, num_sequences: int | None = None) -> PackedDataset | None:
        """The held-out sequences in the order of the text, at most `num_sequences`; None if nothing is held out."""
        if self.heldout is None:
            return None
        starts = self.heldout.starts if self.document_boundaries else None
        available = self.heldout.stats.tokens // self.sequence_length
        count = available if num_sequences is None else min(num_sequences, available)
        return PackedDataset(self.heldout.ids, starts, self.sequence_length, count)

    def describe(self, num_sequences: int | None = None) -> str:
        """A summary of the text, with the number of epochs for a run of `num_sequences` sequences."""
        stats = self.stats
        names = [source.name for source in self.sources]
        lines = ["data: " + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")]
        if self.streaming:
            lines.append(f"train: a stream, shuffled over {self.shuffle_window} sequences")
        else:
            seen = ""
            if num_sequences is not None:
                seen = f", {self.epochs(num_sequences):.3g} epochs"
            lines.append(
                f"train: {stats['documents']:,} documents, {stats['tokens']:,} tokens, {stats['sequences']:,} sequences"
                f"{seen}"
            )
        lines.append(
            f"held out: {stats['heldout_documents']:,} documents, {stats['heldout_tokens']:,} tokens"
            if self.heldout is not None
            else "held out: nothing"
        )
        packing = "attention within documents" if self.document_boundaries else "plain"
        lines.append(f"packing: sequences of {self.sequence_length}, {packing}, separator {self.encoder.separator!r}")
        lines.append(f"tokenizer: {self.vocabulary_size:,} tokens")
        lines.append(f"fingerprint: {self.fingerprint}")
        return "\n".join(lines)


def check_vocabulary(corpus: Corpus, model_vocabulary: int) -> None:
    """Raises ValueError if the data has token ids outside of the model's vocabulary."""
    if corpus.largest_id >= model_vocabulary:
        raise ValueError(
            f"the data has token id {corpus.largest_id}, but the model's vocabulary has ids 0 to "
            f"{model_vocabulary - 1}; set vocab_size to at least {corpus.vocabulary_size}, or use the model's own "
            "tokenizer"
        )


def check_same_data(recorded: Mapping[str, Any], corpus: Corpus) -> None:
    """Raises ValueError with the differences if the data changed since the manifest `recorded` was written."""
    if recorded.get("fingerprint") == corpus.fingerprint:
        return
    now = corpus.manifest
    changes: list[str] = []
    for key in sorted((recorded.keys() | now.keys()) - {"fingerprint"}):
        before, after = recorded.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            changes += _file_changes(before, after)
        elif key == "tokenizer":
            changes.append("the tokenizer changed")
        else:
            changes.append(f"{key}: {before!r} -> {after!r}")
    raise ValueError(
        "the data changed since the run started: " + "; ".join(changes or ["its fingerprint"]) + ". Restore the old "
        "data to resume, or start a new run"
    )


def _file_changes(before: list[Any], after: list[Any]) -> list[str]:
    old, new = ({entry["name"]: entry for entry in _flat(entries)} for entries in (before, after))
    gone = [f"{name} was removed" for name in old if name not in new]
    added = [f"{name} was added" for name in new if name not in old]
    changed = [f"{name} changed" for name in old if name in new and old[name] != new[name]]
    return gone + added + changed or ["the order of the files changed"]


def _flat(entries: list[Any]) -> list[dict[str, Any]]:
    """One entry per file; a source with several files gives several entries."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        inner = entry.get("files", [])
        found += inner if inner and isinstance(inner[0], dict) else [entry]
    return found
