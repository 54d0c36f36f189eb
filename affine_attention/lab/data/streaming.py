"""Packs streamed documents into sequences, in an order that can be resumed exactly.

The stream is read one *window* at a time: enough documents to fill a number of sequences, which are then shuffled. The
stream position is the start of the current window and the number of its sequences that were used: a few numbers, no
buffer to store. Resuming reads at most one window again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from .heldout import Split
from .packing import as_example, shuffled
from .sources import DocumentStream
from .tokenizer import BATCH_CHARACTERS, DocumentEncoder, batched

CHARACTERS_PER_TOKEN = 4  # estimate of how much text fills a window; it only affects the window's size


class StreamedDataset(IterableDataset):
    """Packed sequences of streamed documents over several epochs; `state_dict` and `load_state_dict` hold the position.

    All ranks can read the same stream: accelerate gives each rank its part of a batch, so the batches of a step are the
    same for any number of ranks.

    Args:
        streams: the sources, read one after the other.
        encoder: converts text to ids.
        split: selects the held-out documents, which are skipped.
        sequence_length: T.
        document_boundaries: whether position_ids restart with each document.
        num_sequences: total number of sequences.
        seed: of the order within windows.
        window: number of sequences that are shuffled together.
    """

    def __init__(
        self,
        streams: Sequence[DocumentStream],
        encoder: DocumentEncoder,
        split: Split,
        sequence_length: int,
        document_boundaries: bool,
        num_sequences: int,
        seed: int,
        window: int,
    ) -> None:
        self.streams, self.encoder, self.split = streams, encoder, split
        self.sequence_length, self.document_boundaries = sequence_length, document_boundaries
        self.num_sequences, self.seed, self.window = num_sequences, seed, window
        self._documents: Iterator[str] | None = None
        self._start = _beginning()
        self._given = 0  # of the window
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """The position of the next sequence; JSON."""
        return {"start": dict(self._start), "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration continues from this position. Raises ValueError if this stream cannot have it."""
        self.check(state)
        self._start, self._given, self._resumed = dict(state["start"]), state["given"], True

    def check(self, state: Any) -> None:
        """Checks every key, type and range: a checkpoint may come from an untrusted source."""
        start = state.get("start") if isinstance(state, dict) else None
        if not isinstance(start, dict) or set(state) != {"start", "given"} or set(start) != set(_beginning()):
            raise ValueError(f"a stream position must have start (with {', '.join(_beginning())}) and given")
        counts = {"given": state["given"], **{key: start[key] for key in ("epoch", "source", "window", "sequences")}}
        for key, value in counts.items():
            if type(value) is not int or not 0 <= value < 2**53:
                raise ValueError(f"a stream position must have {key} as an integer of at least 0, got {value!r}")
        if start["source"] >= len(self.streams):
            raise ValueError(f"a stream position must be in source 0 to {len(self.streams) - 1}, got {start['source']}")
        for key, high in (("rest", self.encoder.largest_id), ("rest_starts", self.sequence_length)):
            values = start[key]
            if not isinstance(values, list) or not all(type(v) is int and 0 <= v <= high for v in values):
                raise ValueError(f"a stream position must have {key} as a list of integers from 0 to {high}")
        if len(start["rest"]) >= self.sequence_length or len(start["rest_starts"]) > self.sequence_length:
            raise ValueError(f"a stream position must hold fewer than {self.sequence_length} remaining tokens")
        if start["place"] is not None:
            self.streams[start["source"]].check_position(start["place"])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise ValueError(
                f"a stream needs a single worker, got {workers.num_workers}, each of which would read all of it; set "
                "dataloader_num_workers to 0 or 1"
            )
        if not self._resumed:
            self._start, self._given = _beginning(), 0
        self._resumed, self._documents = False, None
        while self._start["sequences"] + self._given < self.num_sequences:
            ids, starts, following = self._read_window(self._start)
            count = len(ids) // self.sequence_length
            order = shuffled(count, self.seed, self._start["window"])
            while self._given < count and self._start["sequences"] + self._given < self.num_sequences:
                block = order[self._given]
                self._given += 1
                yield self._example(ids, starts, int(block))
            if self._given == count:
                self._start, self._given = following, 0

    def _example(self, ids: np.ndarray, starts: np.ndarray, block: int) -> dict[str, Tensor]:
        first = block * self.sequence_length
        piece = ids[first : first + self.sequence_length]
        if not self.document_boundaries:
            return as_example(piece)
        low, high = np.searchsorted(starts, [first, first + self.sequence_length])
        return as_example(piece, starts[low:high] - first)

    def _read_window(self, start: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """(ids, document starts, start of the next window) of the window that begins at `start`."""
        place = {key: start[key] for key in ("epoch", "source", "place")}
        documents = [np.asarray(start["rest"], self.encoder.dtype)]
        starts = [*start["rest_starts"]]
        tokens = len(start["rest"])
        while tokens < self.window * self.sequence_length:
            missing = self.window * self.sequence_length - tokens
            characters = min(BATCH_CHARACTERS, missing * CHARACTERS_PER_TOKEN)
            texts = self._take(place, characters)
            for ids in self.encoder.encode(texts):
                starts.append(tokens)
                documents.append(ids)
                tokens += len(ids)
        everything, cut = np.concatenate(documents), tokens - tokens % self.sequence_length
        following = place | {
            "rest": everything[cut:].tolist(),
            "rest_starts": [begin - cut for begin in starts if begin >= cut],
            "window": start["window"] + 1,
            "sequences": start["sequences"] + cut // self.sequence_length,
        }
        return everything, np.asarray(starts, np.int64), following

    def _take(self, place: dict[str, Any], characters: int) -> list[str]:
        """The next documents, about `characters` characters; advances `place`, also into the next epoch."""
        turned = False
        while True:
            stream = self.streams[place["source"]]
            if self._documents is None:
                self._documents = stream.start(place["epoch"], place["place"])
            texts = next(batched((t for t in self._documents if not self.split.holds(t)), characters), [])
            if texts:
                place["place"] = stream.position()
                return texts
            self._documents = None
            place |= {"source": place["source"] + 1, "place": None}
            if place["source"] == len(self.streams):
                if turned:
                    raise ValueError("the stream has no document to train on: all are empty or held out")
                turned = True
                place |= {"epoch": place["epoch"] + 1, "source": 0}


def _beginning() -> dict[str, Any]:
    return {"epoch": 0, "source": 0, "place": None, "rest": [], "rest_starts": [], "window": 0, "sequences": 0}
