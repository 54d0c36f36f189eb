"""A stream goes on after any step, however far its loader has read ahead."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader

from affine_attention.lab.training.places import KeptPlaces


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
def test_the_place_of_a_step_is_not_that_of_the_loader(ahead):
    text = KeptPlaces(Counting(40), global_batch=4)
    batches = iter(DataLoader(text, batch_size=2))
    for _ in range(2 * 3 + ahead):  # three steps of two micro-batches
        next(batches)
    place = json.loads(json.dumps(text.place(3)))
    other = KeptPlaces(Counting(40), global_batch=4)
    other.go_to(3, place)
    assert torch.cat(list(DataLoader(other, batch_size=2))).tolist() == list(range(12, 40))
    assert other.stream.read == 28, "nothing is read again"
    assert other.place(10) == {"next": 40}


def test_only_a_few_places_are_kept():
    text = KeptPlaces(Counting(400), global_batch=4)
    assert len(list(text)) == 400
    assert text.place(100) == {"next": 400}
    assert text.place(97) is not None
    assert text.place(96) is None
