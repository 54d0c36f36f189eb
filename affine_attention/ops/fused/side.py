"""Runs small work on a second stream, beside what the current stream does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

# Elements of query from which the GPU's time for a call outlasts the host's, and a microsecond there is worth several
# here: a second stream, and kernels with many descriptors (measured on an H200 and its host). 0: every call, for tests.
LARGE = 2**23


def is_large(query: torch.Tensor, shortest: int = 0) -> bool:
    """Whether a call has many elements, and `shortest` queries or more in a sequence."""
    return LARGE == 0 or (query.numel() >= LARGE and query.shape[2] >= shortest)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Side:
    """Runs work beside what the current stream does between the making of a Side and its `join`.

    The passes are bound by memory and cuDNN by arithmetic: side by side they cost little more than cuDNN alone. Tensors
    are made before the fork and die after the join, so the allocator sees one stream only.
    """

    def __init__(self, query: torch.Tensor):
        """For a call that is not LARGE work runs on the current stream."""
        device = query.device
        self.stream = _side_stream(device) if device.type == "cuda" and is_large(query) else None
        self.fork = torch.cuda.current_stream(device).record_event() if self.stream is not None else None
        self.used = False

    def run(self, work: Callable[[], None], pause: int = 0) -> None:
        """`pause`: clock cycles that the work waits, so that the long kernel of the current stream begins before it.

        Of two kernels that are ready, the first to begin gets all processors: a short one that fills them runs before
        the long one, not beside it. Behind it, the short one fills what the long one's end leaves empty.
        """
        if self.stream is None or self.fork is None:
            work()
            return
        self.stream.wait_event(self.fork)
        with torch.cuda.stream(self.stream):
            if pause:
                torch.cuda._sleep(pause)
            work()
        self.used = True

    def join(self) -> None:
        if self.stream is not None and self.used:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
