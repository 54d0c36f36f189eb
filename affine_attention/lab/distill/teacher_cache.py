"""Runs a teacher once over packed text and caches its last hidden states on disk, for every student of that text.

A frozen teacher computes the same for a sequence in every run and epoch, and it is larger than its students: a study of
thirty students would run it thirty times. Its logits are too large to store (one number per token and vocabulary
entry). Its last hidden states have a few hundred numbers per token, and the loss recomputes the logits from them.
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
from .lm_head import TEACHER_HIDDEN, run_to_head

FORMAT = 2  # of the cached file; changing it invalidates the cache
FILE = "hidden.bin"  # [sequences, T, M] in the dtype of the head's input


class CachedTeacherDataset(Dataset):
    """Sequences of a `PackedDataset`, each with the teacher's last hidden states."""

    def __init__(self, sequences: PackedDataset, states: np.ndarray, dtype: torch.dtype) -> None:
        self.sequences, self.states, self.dtype = sequences, states, dtype

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        example = self.sequences[item]
        # A copy: the memory map is read-only, and torch has no read-only tensors.
        states_TM = np.array(self.states[self.sequences.block(item)])
        return example | {TEACHER_HIDDEN: torch.from_numpy(states_TM).view(self.dtype)}


def cache_teacher_states(
    teacher: Any,
    sequences: PackedDataset,
    fingerprint: str,
    *,
    dtype: torch.dtype,
    batch: int,
    cache: Path | str | None = None,
    before: Callable[[], None] = lambda: None,
) -> CachedTeacherDataset:
    """The sequences with the teacher's hidden states, read from the cache or computed now in one pass over the text.

    Args:
        teacher: a loaded teacher, on its device.
        sequences: the training sequences of a run, in any order.
        fingerprint: of the text and its packing.
        dtype: of the computation in training: float32, or the autocast dtype.
        batch: sequences per forward.
        cache: the cache folder; by default the user's cache.
        before: called once before the pass over the text, if one is needed (to compile the teacher, for example).
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
                f"remember_teacher=true needs {needed / 2**30:.1f} GiB for {count:,} sequences in {folder}, but only "
                f"{free / 2**30:.1f} GiB are free; choose another cache folder, or run the teacher in each step "
                "(remember_teacher=false)"
            )
        before()
        _write_states(part / FILE, teacher, sequences, dtype, batch)

    file = cached(folder, key, write) / FILE
    return CachedTeacherDataset(sequences, np.memmap(file, _plain(dtype), "r", shape=shape), dtype)


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
            # A compiled teacher has a fixed batch size: the last batch is padded by repeating its last sequence.
            items = [min(item, total - 1) for item in range(first, first + batch)]
            inputs = {key: x.to(device) for key, x in collate([in_order[item] for item in items]).items()}
            with _autocast(device, dtype):
                hidden_BTM = run_to_head(teacher, inputs, checked).hidden_BTM
            if hidden_BTM.dtype != dtype:
                raise TypeError(f"the teacher's hidden states are {hidden_BTM.dtype}, but the run computes in {dtype}")
            # Written in a thread while the next forward runs; at most two batches are queued.
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
    """Hash of everything that determines the states: the weights themselves, not the name of their folder."""
    digest = hashlib.sha256(f"{FORMAT} {fingerprint} {dtype} {type(teacher).__name__}".encode())
    settings = teacher.config.get_text_config().to_diff_dict()
    listed = sorted((key, repr(value)) for key, value in settings.items() if key != "_name_or_path")
    digest.update(repr(listed).encode())
    digest.update(fingerprint_model(teacher).encode())
    return digest.hexdigest()


def _plain(dtype: torch.dtype) -> np.dtype:
    """numpy has no bfloat16, so the bytes are stored as integers."""
    return np.dtype(f"<i{dtype.itemsize}")


def _signed(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]
