"""Shared memory that knows which of its elements an unfinished operation reads or writes, and mbarriers.

Rules, each with an error:
- A copy by TMA writes its elements between its issue and its completion: nobody else may touch them.
- An MMA or a copy to global memory reads its elements until the kernel has waited for it: nobody may write them.
  `tma.store_wait` waits for the reading of a copy, not for its writing.
- Elements that a partition has stored need `fence_async_shared`, then `barrier`, before an MMA or TMA reads them.
- Elements that a partition has loaded need `barrier` before they are overwritten: a warp may be late. The same holds
  for elements read by MMAs of several warp groups. A partition of one warp group waits for its MMA as a whole, which
  also orders the loads before that MMA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .scheduler import HazardError, Partition, current
from .values import Value, plain, value

CLEAN, STORED, FENCED, UNFENCED = range(4)  # UNFENCED: a barrier came without a fence before it
WARPS_OF_A_GROUP = 4


class Buffer:
    """One allocation: which of its elements are in use, by element."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype):
        self.name = name
        poison = float("nan") if dtype.is_floating_point else 77
        self.data = torch.full(shape, poison, dtype=dtype)
        self.writing = torch.zeros(shape, dtype=torch.bool)  # by TMA
        self.reading = torch.zeros(shape, dtype=torch.int16)  # MMAs and copies that are not complete
        self.stored = torch.zeros(shape, dtype=torch.int8)
        self.read_by = torch.zeros(shape, dtype=torch.int32)  # bits of partitions whose loads need a barrier


class SharedTile:
    """A view of a buffer."""

    def __init__(self, buffer: Buffer, views: dict[str, Tensor] | None = None):
        self.buffer = buffer
        self.views = views or {
            name: getattr(buffer, name) for name in ("data", "writing", "reading", "stored", "read_by")
        }

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.views["data"].shape

    def _view(self, change: Any) -> SharedTile:
        return SharedTile(self.buffer, {name: change(x) for name, x in self.views.items()})

    def index(self, n: Any) -> SharedTile:
        if not 0 <= int(n) < self.shape[0]:
            raise IndexError(f"{self.buffer.name}: index {int(n)} of {self.shape[0]}")
        return self._view(lambda x: x[int(n)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> SharedTile:
        return self._view(lambda x: x.narrow(dim, int(start), int(length)))

    def reshape(self, shape: Any) -> SharedTile:
        return self._view(lambda x: x.view([int(size) for size in shape]))

    def _reinterpret(self, dtype: torch.dtype, shape: Any, layout: Any) -> SharedTile:
        """The same memory with another shape. The order of the elements is not that of a GPU."""
        if dtype != self.dtype:
            raise NotImplementedError(f"{self.buffer.name} as {dtype}")
        return self.reshape(shape)

    def permute(self, order: Any) -> SharedTile:
        return self._view(lambda x: x.permute(*order))

    def load(self, layout: Any = None) -> Value:
        partition = current()
        self.fail_if(self.views["writing"], "is loaded while a copy by TMA writes it")
        if partition.num_warps > 1:
            fresh = (self.views["stored"] == STORED) | (self.views["stored"] == FENCED)
            self.fail_if(fresh, "is loaded without a barrier after it was stored")
            self.begin_read(partition)
            partition.reads.append(self)
        return value(self.views["data"].clone())

    def begin_read(self, partition: Partition) -> None:
        self.views["read_by"].bitwise_or_(partition.cta.bit(partition))

    def end_reads(self, partition: Partition) -> None:
        self.views["read_by"].bitwise_and_(~partition.cta.bit(partition))

    def store(self, x: Value) -> None:
        partition = current()
        self.fail_if(self.views["writing"], "is stored while a copy by TMA writes it")
        self.fail_if(self.views["reading"] > 0, "is stored while an MMA or TMA reads it")
        self.fail_if(self.views["read_by"] != 0, "is stored without a barrier after it was read")
        if tuple(x.shape) != tuple(self.shape):
            raise ValueError(f"{self.buffer.name}: a tile {tuple(x.shape)} is stored into {tuple(self.shape)}")
        if x.dtype != self.dtype:
            raise TypeError(f"{self.buffer.name}: {x.dtype} is stored into {self.dtype}")
        self.views["data"].copy_(plain(x))
        self.views["stored"].fill_(STORED)
        partition.cta.stores.setdefault(id(partition), []).append(self)

    def begin_async_read(self, who: str) -> None:
        self.fail_if(self.views["writing"], f"is read by {who} while a copy by TMA writes it")
        self.fail_if(self.views["stored"] == STORED, f"is read by {who} without a fence and a barrier")
        self.fail_if(self.views["stored"] == FENCED, f"is read by {who} without a barrier after the fence")
        self.fail_if(self.views["stored"] == UNFENCED, f"is read by {who} without a fence before the barrier")
        self.views["reading"] += 1

    def end_async_read(self, partition: Partition, by_mma: bool) -> None:
        self.views["reading"] -= 1
        if by_mma and partition.num_warps > WARPS_OF_A_GROUP:
            self.begin_read(partition)

    def begin_async_write(self) -> None:
        self.fail_if(self.views["writing"], "is written by two copies by TMA at the same time")
        self.fail_if(self.views["reading"] > 0, "is overwritten by TMA while an MMA or TMA reads it")
        self.fail_if(self.views["read_by"] != 0, "is overwritten by TMA without a barrier after it was read")
        self.fail_if(self.views["stored"] != CLEAN, "is overwritten by TMA without a fence after it was stored")
        self.views["writing"].fill_(True)
        if self.dtype.is_floating_point:
            self.views["data"].fill_(float("nan"))

    def end_async_write(self, x: Tensor) -> None:
        self.views["data"].copy_(x.reshape(self.shape))
        self.views["writing"].fill_(False)

    def fail_if(self, elements: Tensor, what: str) -> None:
        if bool(elements.any()):
            raise HazardError(f"{self.buffer.name} {what} ({current().name})")


class Barrier:
    """An mbarrier: phases that end when all arrivals and all bytes have come."""

    def __init__(self, name: str):
        self.name, self.count = name, 0
        self.phase = self.missing = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        if self.count == 0:
            raise HazardError(f"{self.name} is used before its init")
        self.bytes += num_bytes
        self.missing -= count
        if self.missing < 0:
            raise HazardError(f"{self.name}: more arrivals than its count of {self.count}")
        self._end_phase()

    def deliver(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self._end_phase()

    def _end_phase(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count

    def has_passed(self, parity: int) -> bool:
        return (self.phase & 1) != parity


class BarrierArray:
    """Mbarriers that are allocated together; an array of one is a barrier itself."""

    def __init__(self, name: str, size: int):
        self.barriers = [Barrier(f"{name} {n}") for n in range(size)]

    def index(self, n: Any) -> Barrier:
        return self.barriers[int(n)]


def the_barrier(x: Any) -> Barrier:
    if isinstance(x, BarrierArray):
        assert len(x.barriers) == 1
        return x.barriers[0]
    return x


class Cta:
    """One CTA: its shared memory and partitions."""

    def __init__(self, index: int, num_warps: int):
        self.index, self.num_warps = index, num_warps
        self.buffers: list[Buffer] = []
        self.stores: dict[int, list[SharedTile]] = {}  # tiles that a partition has stored without fence and barrier
        self.bits: dict[int, int] = {}

    def bit(self, partition: Partition) -> int:
        return self.bits.setdefault(id(partition), 1 << len(self.bits))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> SharedTile:
        self.buffers.append(
            Buffer(f"shared memory {len(self.buffers)} {list(shape)} of CTA {self.index}", shape, dtype)
        )
        return SharedTile(self.buffers[-1])

    def fence(self, partition: Partition) -> None:
        for tile in self.stores.get(id(partition), ()):
            state = tile.views["stored"]
            state[state != CLEAN] = CLEAN if partition.num_warps == 1 else FENCED

    def barrier(self, partition: Partition) -> None:
        stored = self.stores.get(id(partition), [])
        for tile in stored:
            state = tile.views["stored"]
            state[state == FENCED] = CLEAN
            state[state == STORED] = UNFENCED
        self.stores[id(partition)] = [tile for tile in stored if bool((tile.views["stored"] != CLEAN).any())]
        partition.reads = []
        for buffer in self.buffers:
            buffer.read_by &= ~self.bit(partition)

    def check_end(self) -> None:
        for buffer in self.buffers:
            if bool(buffer.writing.any()):
                raise HazardError(f"{buffer.name}: the CTA ends while a copy by TMA writes it")
            if bool(buffer.reading.any()):
                raise HazardError(f"{buffer.name}: the CTA ends while an MMA or TMA reads it")
