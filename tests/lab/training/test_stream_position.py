"""A stream resumes after any step, however far its loader has prefetched."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from affine_attention.lab.training.stream_position import ResumableStream


class Counting(torch.utils.data.IterableDataset):
    """0, 1, 2, .. to an end."""

    def __init__(self, end: int) -> None:
        self.end, self.next, self.read = end, 0, 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def __iter__(self):
        while self.next < self.end:
            self.next += 1
            self.read += 1
            yield self.next - 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_position_of_a_step_is_not_that_of_the_loader(ahead):
    text = ResumableStream(Counting(40), global_batch=4)
    batches = iter(DataLoader(text, batch_size=2))
    for _ in range(2 * 3 + ahead):  # three steps of two micro-batches
        next(batches)
    position = json.loads(json.dumps(text.position_after(3)))
    other = ResumableStream(Counting(40), global_batch=4)
    other.resume_after(3, position)
    assert torch.cat(list(DataLoader(other, batch_size=2))).tolist() == list(range(12, 40))
    assert other.stream.read == 28, "no item is read twice"
    assert other.position_after(10) == {"next": 40}


def test_only_a_few_positions_are_kept():
    text = ResumableStream(Counting(400), global_batch=4)
    assert len(list(text)) == 400
    assert text.position_after(100) == {"next": 400}
    assert text.position_after(97) is not None
    assert text.position_after(96) is None
