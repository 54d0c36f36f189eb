"""Runs memory-bound work on a second stream, while the current stream runs a kernel that is bound by arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

# Elements of query from which a second stream costs the host less than it saves on the GPU (measured on an H200).
WORTH_A_STREAM = 2**23


# A pause lasts until a kernel has started, and several times as long as the transfers of the kernel before it.
START_CYCLES, PAUSE_PER_TRANSFER = 10_000, 5


@functools.cache
def cycles_to_move(num_bytes: int, device: torch.device) -> int:
    """Clock cycles in which a GPU moves so many bytes, from its clocks and the width of its memory."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    width, memory_clock, clock = (
        getattr(properties, name, 0) for name in ("memory_bus_width", "memory_clock_rate", "clock_rate")
    )
    # Bits, kHz and kHz; two transfers a cycle. An H200 moves 2,500 bytes in a cycle, which stands for unknown GPUs.
    per_cycle = 2 * memory_clock * width / 8 / clock if width and memory_clock and clock else 2500
    return int(num_bytes / per_cycle)


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SideStream:
    """Work that overlaps with what the current stream runs between the creation of this object and `join`.

    Tensors are allocated before the fork and freed after the join, so the caching allocator sees one stream only.
    """

    def __init__(self, device: torch.device, is_used: bool = True):
        """On a CPU, or where `is_used` is False, work runs on the current stream."""
        self.stream = _stream_of(device) if device.type == "cuda" and is_used else None
        self.fork = torch.cuda.current_stream(device).record_event() if self.stream is not None else None
        self.has_work = False

    def run(self, work: Callable[[], None], pause: int = 0) -> None:
        """`pause`: clock cycles that the work waits, so that the long kernel of the current stream starts before it.

        A short kernel that fills all SMs and starts first delays the long one. Behind it, the short kernel uses the SMs
        that the last wave of the long one leaves idle.
        """
        if self.stream is None or self.fork is None:
            work()
            return
        self.stream.wait_event(self.fork)
        with torch.cuda.stream(self.stream):
            if pause:
                torch.cuda._sleep(pause)
            work()
        self.has_work = True

    def join(self) -> None:
        """Makes the current stream wait for the work."""
        if self.stream is not None and self.has_work:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
