"""Packs token ids into sequences of equal length, in a fixed or shuffled order.

Documents are concatenated, each followed by the separator; sequence i is tokens i*T .. (i+1)*T. Every token is used
exactly once per epoch, except for the last ones that do not fill a sequence. Labels equal the ids: the loss shifts them
by one, so a sequence of T tokens has T - 1 predictions.

With document boundaries, `position_ids` restart at 0 with every document, which is how transformers and
affine_attention.hf recognise packed documents, and the first token of a document is an ignored label.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED_LABEL = -100


class PackedDataset(Dataset):
    """Sequences of ids in a fixed order; item i depends only on i, the seed and the data.

    With a sequential sampler, optimizer step s uses items s * global_batch .. (s + 1) * global_batch for any split over
    micro-batches and ranks, and a run resumes by skipping items.

    Args:
        ids: all tokens, a memory map or an array.
        starts: start indices of documents in ids, ascending, for `document_boundaries`; None for plain packing.
        sequence_length: T.
        num_sequences: number of items; each epoch has its own order. None: one epoch.
        seed: of the order; None keeps the order of the text.
    """

    def __init__(
        self,
        ids: np.ndarray,
        starts: np.ndarray | None,
        sequence_length: int,
        num_sequences: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.ids, self.starts, self.sequence_length, self.seed = ids, starts, sequence_length, seed
        self.epoch_length = len(ids) // sequence_length
        if self.epoch_length == 0:
            raise ValueError(f"{len(ids)} tokens do not fill one sequence of {sequence_length}")
        self.num_sequences = self.epoch_length if num_sequences is None else num_sequences

    def __len__(self) -> int:
        return self.num_sequences

    def __getstate__(self) -> dict[str, Any]:
        """Pickles file names instead of memory-mapped data: a loader's worker process opens the files again."""
        return {key: _unmapped(value) for key, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {key: value.open() if isinstance(value, _File) else value for key, value in state.items()}

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        if item < 0:
            item += self.num_sequences
        if not 0 <= item < self.num_sequences:
            raise IndexError(f"item {item} of {self.num_sequences}")
        block = self.block(item)
        first = block * self.sequence_length
        ids = self.ids[first : first + self.sequence_length]
        if self.starts is None:
            return as_example(ids)
        low, high = np.searchsorted(self.starts, [first, first + self.sequence_length])
        return as_example(ids, self.starts[low:high] - first)

    def block(self, item: int) -> int:
        """The index in the text of the sequence with this item number."""
        epoch, index = divmod(item, self.epoch_length)
        return index if self.seed is None else int(shuffled(self.epoch_length, self.seed, epoch)[index])


class _File(NamedTuple):
    path: str
    dtype: np.dtype

    def open(self) -> np.memmap:
        return np.memmap(self.path, self.dtype, "r")


def _unmapped(value: Any) -> Any:
    if isinstance(value, np.memmap) and value.filename and os.path.getsize(value.filename) == value.nbytes:
        return _File(str(value.filename), value.dtype)
    return value  # an array, or a part of a file


@lru_cache(maxsize=4)
def shuffled(count: int, *seeds: int) -> np.ndarray:
    """A permutation of 0..count for these seeds. RandomState: its stream is stable across numpy versions."""
    return np.random.RandomState([seed % 2**32 for seed in seeds]).permutation(count)


def as_example(ids: np.ndarray, starts: Sequence[int] | np.ndarray | None = None) -> dict[str, Tensor]:
    """One sequence as model inputs; `starts` are the indices in it where documents begin."""
    input_ids = torch.from_numpy(np.asarray(ids).astype(np.int64))
    labels = input_ids.clone()
    if starts is None:
        return {"input_ids": input_ids, "labels": labels}
    positions = np.arange(len(ids))
    begins = np.zeros(len(ids), np.int64)
    begins[starts] = positions[starts]
    labels[torch.as_tensor(np.asarray(starts, np.int64))] = IGNORED_LABEL
    position_ids = torch.from_numpy(positions - np.maximum.accumulate(begins))
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def collate(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch. No attention_mask: with one, transformers does not recognise packed documents."""
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
