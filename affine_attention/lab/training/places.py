"""Keeps the place of a stream at every optimizer step, so that a resumed run reads on instead of reading all again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

AHEAD = 4  # steps whose places are kept: loaders fetch a batch or two before it is used


class KeptPlaces(IterableDataset):
    """A stream that remembers where each optimizer step ended.

    A loader reads ahead, so the stream's own place is beyond that of the step which is being saved.

    Args:
        stream: an iterable with `state_dict`, the place of its next item, and `load_state_dict`.
        global_batch: items of one optimizer step, over all micro-batches and ranks.
    """

    def __init__(self, stream: Any, global_batch: int) -> None:
        self.stream, self.global_batch = stream, global_batch
        self._first = 0  # the step that the next iteration begins after
        self._places: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[Any]:
        first = self._first
        for given, item in enumerate(self.stream, start=1):
            if given % self.global_batch == 0:
                step = first + given // self.global_batch
                self._places[step] = self.stream.state_dict()
                self._places.pop(step - AHEAD, None)
            yield item

    def place(self, step: int) -> dict[str, Any] | None:
        """Where the stream was after a step; None on a rank that does not read it."""
        return self._places.get(step)

    def check(self, place: Any) -> None:
        """Raises ValueError for a position that the stream cannot have."""
        self.stream.check(place)

    def go_to(self, step: int, place: dict[str, Any]) -> None:
        """The next iteration begins after this step."""
        self.stream.load_state_dict(place)
        self._first, self._places = step, {step: place}
