"""Runs memory-bound kernels on a side stream while the current stream runs a compute-bound kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

# From this many elements of query on, a side stream saves more GPU time than it costs host time (measured on an H200).
WORTH_A_STREAM = 2**23

# A pause covers the start of a kernel, plus a multiple of the memory traffic of the kernel before it.
START_CYCLES, PAUSE_PER_TRANSFER = 10_000, 5


@functools.cache
def cycles_to_move(num_bytes: int, device: torch.device) -> int:
    """Clock cycles that a GPU needs to transfer `num_bytes`, from its clock rates and memory bus width."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    width, memory_clock, clock = (
        getattr(properties, name, 0) for name in ("memory_bus_width", "memory_clock_rate", "clock_rate")
    )
    # Bits, kHz and kHz; two transfers per cycle. The default is that of an H200, 2,500 bytes per cycle.
    per_cycle = 2 * memory_clock * width / 8 / clock if width and memory_clock and clock else 2500
    return int(num_bytes / per_cycle)


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SideStream:
    """Overlaps work with the kernels that the current stream runs between the creation of this object and `join`.

    Tensors are allocated before the fork and freed after the join, so the caching allocator only sees one stream.
    """

    def __init__(self, device: torch.device, is_used: bool = True):
        """On the CPU, or if `is_used` is False, work runs on the current stream."""
        self.stream = _stream_of(device) if device.type == "cuda" and is_used else None
        self.fork = torch.cuda.current_stream(device).record_event() if self.stream is not None else None
        self.has_work = False

    def run(self, work: Callable[[], None], pause: int = 0) -> None:
        """Runs `work` after `pause` clock cycles, so that the long kernel of the current stream starts first.

        A short kernel that fills all SMs and starts first delays the long kernel. If it starts later, it uses the SMs
        that the last wave of the long kernel leaves idle.
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
