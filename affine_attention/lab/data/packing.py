"""Turns a row of token ids into sequences of one length, and puts them in an order.

Documents stand one after the other, each with the separator at its end; sequence i is tokens i*T .. (i+1)*T. No token
is lost or repeated, but the last few that do not fill a sequence are left out. Labels are the ids: the shift by one
happens inside the loss, so a sequence of T tokens asks for T - 1 predictions.

With document boundaries, `position_ids` restart at 0 at the start of every document, which is how transformers and
affine_attention.hf know packed documents, and the first token of a document is no label.
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
    """Sequences of ids in a fixed order; item i depends on i, the seed and the data, and on nothing else.

    So optimizer step s takes items s * global_batch .. (s + 1) * global_batch however these are split over
    micro-batches and ranks, as long as the sampler is sequential, and a run resumes by counting.

    Args:
        ids: all tokens, a memory map or an array.
        starts: where documents begin in ids, ascending, for `document_boundaries`; None for plain packing.
        sequence_length: T.
        num_sequences: how many items there are; epochs follow each other, each in its own order. None: one epoch.
        seed: of the order; None keeps that of the text.
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
        """A worker of a loader opens the files again, instead of being sent their content."""
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
        """Which sequence of the text is item `item`."""
        epoch, place = divmod(item, self.epoch_length)
        return place if self.seed is None else int(shuffled(self.epoch_length, self.seed, epoch)[place])


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
    """0..count in an order of these seeds. RandomState: its numbers never change with numpy's version."""
    return np.random.RandomState([seed % 2**32 for seed in seeds]).permutation(count)


def as_example(ids: np.ndarray, starts: Sequence[int] | np.ndarray | None = None) -> dict[str, Tensor]:
    """One sequence as a model takes it; `starts` are the places in it where a document begins."""
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
    """A batch. Adds no attention_mask: beside one, transformers does not look for packed documents."""
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}
