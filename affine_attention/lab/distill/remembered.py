"""Runs a teacher once over packed text and keeps on disk what goes into its head, for every student of that text.

A teacher says the same of a sequence in every run and epoch. A study of thirty students would run it thirty times, and
a teacher is larger than its students. Its logits would be too much to keep (the vocabulary's width for each token); the
hidden states before its head are a few hundred numbers, and the head makes the logits of them again, in the loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

from ...cache import default_cache
from ...files import expanded
from ..data.packing import PackedDataset, collate
from ..data.store import cached
from ..fingerprint import fingerprint_model
from .heads import TEACHER_HIDDEN, run_headless

FORMAT = 2  # of the file; a change invalidates every cached one
FILE = "hidden.bin"  # [sequences, T, M] in the dtype of the head's input, one after the other


class RememberedTeacher(Dataset):
    """Sequences of a `PackedDataset`, each with what its teacher said of it."""

    def __init__(self, sequences: PackedDataset, states: np.ndarray, dtype: torch.dtype) -> None:
        self.sequences, self.states, self.dtype = sequences, states, dtype

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        example = self.sequences[item]
        # A copy: the map is read-only, which torch does not know of.
        states_TM = np.array(self.states[self.sequences.block(item)])
        return example | {TEACHER_HIDDEN: torch.from_numpy(states_TM).view(self.dtype)}


def remember(
    teacher: Any,
    sequences: PackedDataset,
    fingerprint: str,
    *,
    dtype: torch.dtype,
    batch: int,
    cache: Path | str | None = None,
    before: Callable[[], None] = lambda: None,
) -> RememberedTeacher:
    """The sequences with their teacher's hidden states, found in the cache or made now in one pass over the text.

    Args:
        teacher: a loaded teacher, on its device.
        sequences: what a run trains on; its order does not matter here.
        fingerprint: of the text and its packing.
        dtype: of the training's computation: float32, or that of autocast.
        batch: sequences in one forward.
        cache: the folder in which states are kept; by default the user's cache.
        before: called once before the pass, when there is one (to compile the teacher, say).
    """
    folder = default_cache() if cache is None else expanded(cache, "cache")
    width = teacher.config.get_text_config().hidden_size
    count, length = sequences.epoch_length, sequences.sequence_length
    shape = (count, length, width)
    key = f"teacher-{_digest(teacher, fingerprint, dtype)[:24]}"

    def write(part: Path) -> None:
        needed = int(np.prod(shape)) * dtype.itemsize
        free = shutil.disk_usage(part).free
        if needed > free:
            raise ValueError(
                f"remember_teacher=true needs {needed / 2**30:.1f} GiB for {count:,} sequences in {folder}, and "
                f"{free / 2**30:.1f} GiB are free; name another cache, or run the teacher in each step "
                "(remember_teacher=false)"
            )
        before()
        _write_states(part / FILE, teacher, sequences, dtype, batch)

    file = cached(folder, key, write) / FILE
    return RememberedTeacher(sequences, np.memmap(file, _plain(dtype), "r", shape=shape), dtype)


@torch.no_grad()
def _write_states(file: Path, teacher: Any, sequences: PackedDataset, dtype: torch.dtype, batch: int) -> None:
    device = next(teacher.parameters()).device
    in_order = PackedDataset(sequences.ids, sequences.starts, sequences.sequence_length)
    checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    total, show = len(in_order), sys.stderr.isatty()
    with (
        file.open("wb") as out,
        ThreadPoolExecutor(1) as disk,
        tqdm(desc="teacher", unit="seq", total=total, disable=not show, leave=False) as bar,
    ):
        written: deque[Future[None]] = deque()
        for first in range(0, total, batch):
            # A compiled teacher knows one size: the last batch is filled up with its last sequence.
            items = [min(item, total - 1) for item in range(first, first + batch)]
            inputs = {key: x.to(device) for key, x in collate([in_order[item] for item in items]).items()}
            with _autocast(device, dtype):
                hidden_BTM = run_headless(teacher, inputs, checked).hidden_BTM
            if hidden_BTM.dtype != dtype:
                raise TypeError(f"the teacher's head is given {hidden_BTM.dtype}, where the run computes in {dtype}")
            # Beside the next forward; two batches may wait for the disk.
            written.append(disk.submit(_append, hidden_BTM[: total - first], out))
            while len(written) > 2:
                written.popleft().result()
            bar.update(min(batch, total - first))
        for rest in written:
            rest.result()


def _append(hidden_BTM: Tensor, out: BinaryIO) -> None:
    hidden_BTM.contiguous().cpu().view(_signed(hidden_BTM.dtype)).numpy().tofile(out)


def _autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def _digest(teacher: Any, fingerprint: str, dtype: torch.dtype) -> str:
    """Of all that decides the states: the weights themselves, not the name of the folder that they came from."""
    digest = hashlib.sha256(f"{FORMAT} {fingerprint} {dtype} {type(teacher).__name__}".encode())
    settings = teacher.config.get_text_config().to_diff_dict()
    told = sorted((key, repr(value)) for key, value in settings.items() if key != "_name_or_path")
    digest.update(repr(told).encode())
    digest.update(fingerprint_model(teacher).encode())
    return digest.hexdigest()


def _plain(dtype: torch.dtype) -> np.dtype:
    """numpy has no bfloat16: its bytes travel as whole numbers."""
    return np.dtype(f"<i{dtype.itemsize}")


def _signed(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]
