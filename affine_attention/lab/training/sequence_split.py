"""Splits the sequences of a run over ranks (`sequence_parallel` of a recipe): loaders, batches and the student.

The ranks form a grid of data ranks x sequence ranks. The ranks of one sequence group load the same batch. The teacher,
if there is one, runs on whole sequences on each rank; then every rank keeps its part of the batch, of the labels
(shifted before the cut) and of the teacher's hidden states, and the student exchanges parts for heads around its
attention (hf/sequence.py). Loss sums of the parts add up to those of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from ...hf import sequence_parallel, shard_batch
from ...nn import shard_sequence
from ..distill.lm_head import TEACHER_HIDDEN, unwrapped
from ..distill.loss import DistillLoss


class SequenceSplit:
    """The sequence groups of a run, with a student that works on parts. Every rank must create one.

    Args:
        student: an attached model; it works on parts from now on.
        size: ranks per sequence.
        ranks: all ranks.
        device: of the run.
    """

    def __init__(self, student: nn.Module, size: int, ranks: int, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("data", "sequence"))
        self.size, self.group = size, mesh["sequence"]
        self.data_rank, self.data_ranks = mesh.get_local_rank("data"), ranks // size
        self._student = student
        self._handle = sequence_parallel(student, self.group)  # type: ignore[arg-type]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the student takes whole sequences on each rank."""
        self._handle.remove()
        try:
            yield
        finally:
            self._handle = sequence_parallel(unwrapped(self._student), self.group)

    def loader(self, loader: DataLoader[Any], device: torch.device) -> Any:
        """The loader with the batches of this rank's sequence group."""
        from accelerate.data_loader import prepare_data_loader

        return prepare_data_loader(
            loader, device, num_processes=self.data_ranks, process_index=self.data_rank, put_on_device=True,
            dispatch_batches=False,
        )  # fmt: skip

    def part(self, inputs: Mapping[str, Any], loss: DistillLoss, teacher: Any) -> dict[str, Tensor]:
        """This rank's part of a batch, with `shift_labels`, and with the teacher's states where the loss needs them."""
        inputs = dict(inputs)
        states = inputs.pop(TEACHER_HIDDEN, None)
        if states is None and loss.terms.kd_weight and teacher is not None:
            states = loss.teacher_states(teacher, inputs)
        part = shard_batch(inputs, self.group)
        if states is not None:
            part[TEACHER_HIDDEN] = shard_sequence(states, self.group)
        return part
