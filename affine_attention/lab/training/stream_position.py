"""Records the stream position after each optimizer step, so that a resumed run continues reading from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

KEPT_STEPS = 4  # positions of the last steps that are kept: a data loader prefetches one or two batches


class ResumableStream(IterableDataset):
    """A stream that records its position after every optimizer step.

    A data loader prefetches, so the current position of the stream is ahead of the step that is being saved.

    Args:
        stream: an iterable with `state_dict` (the position of its next item) and `load_state_dict`.
        global_batch: items of one optimizer step, over all micro-batches and ranks.
    """

    def __init__(self, stream: Any, global_batch: int) -> None:
        self.stream, self.global_batch = stream, global_batch
        self._first = 0  # the last step before the next iteration
        self._positions: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[Any]:
        first = self._first
        for given, item in enumerate(self.stream, start=1):
            if given % self.global_batch == 0:
                step = first + given // self.global_batch
                self._positions[step] = self.stream.state_dict()
                self._positions.pop(step - KEPT_STEPS, None)
            yield item

    def position_after(self, step: int) -> dict[str, Any] | None:
        """The stream position after a step; None on a rank that does not read the stream."""
        return self._positions.get(step)

    def check(self, position: Any) -> None:
        """Raises ValueError for a position that this stream cannot have."""
        self.stream.check(position)

    def resume_after(self, step: int, position: dict[str, Any]) -> None:
        """The next iteration continues after this step."""
        self.stream.load_state_dict(position)
        self._first, self._positions = step, {step: position}
