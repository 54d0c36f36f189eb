"""The functions of Gluon's language for Hopper, on simulated values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as real_mbarrier

from .memory import WARPS_OF_A_GROUP, BarrierArray, SharedTile, the_barrier
from .scheduler import HazardError, Partition, bind, current
from .values import Pointer, Value, plain, value

DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64")
} | {"int1": torch.bool}  # fmt: skip


class Descriptor:
    """A tensor descriptor of a simulated kernel."""

    def __init__(self, given: Any):
        self.base, self.shape, self.strides = given.base.detach(), list(given.shape), list(given.strides)
        self.block_shape, self.layout = list(given.block_shape), given.layout
        self.dtype = self.base.dtype
        size = 1
        for extent in self.block_shape:
            size *= extent
        self.block_type = SimpleNamespace(nbytes=size * self.base.element_size(), shape=self.block_shape)
        self.whole = torch.as_strided(self.base, self.shape, self.strides, self.base.storage_offset())

    def box(self, coord: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that is inside of the tensor, in coordinates of the tensor and of the block."""
        outer, inner = [], []
        for at, extent, size in zip(coord, self.block_shape, self.shape, strict=True):
            begin, end = int(at), int(at) + extent
            first, last = min(max(begin, 0), size), min(max(end, 0), size)
            outer.append(slice(first, last))
            inner.append(slice(first - begin, max(last, first) - begin))
        return tuple(outer), tuple(inner)

    def read(self, coord: list[Any]) -> Tensor:
        outer, inner = self.box(coord)
        block = torch.zeros(self.block_shape, dtype=self.dtype)
        block[inner] = self.whole[outer]
        return block

    def write(self, coord: list[Any], block: Tensor, adds: bool) -> None:
        outer, inner = self.box(coord)
        block = block.reshape(self.block_shape)[inner]
        self.whole[outer] = self.whole[outer] + block if adds else block


class PendingMma:
    """An MMA that the kernel has not waited for; it becomes a value when `warpgroup_mma_wait` returns it."""

    def __init__(self, partition: Partition, a: Any, b: SharedTile, acc: Any, use_acc: bool):
        self.partition, self.a, self.b, self.acc, self.use_acc = partition, a, b, acc, use_acc
        self.result: Value | None = None
        self.reads, partition.reads = partition.reads, []
        for operand in (a, b):
            if isinstance(operand, SharedTile):
                operand.begin_async_read("an MMA")

    def complete(self) -> None:
        acc = self.acc.result if isinstance(self.acc, PendingMma) else self.acc
        assert acc is not None, "MMAs complete in order"
        left = self.a.views["data"] if isinstance(self.a, SharedTile) else plain(self.a)
        right = self.b.views["data"]
        if left.dtype != right.dtype:
            raise TypeError(f"an MMA of {left.dtype} and {right.dtype}")
        product = left.double() @ right.double()
        if self.use_acc:
            product = product + plain(acc).double()
        if product.shape != acc.shape:
            raise ValueError(f"an MMA of shape {tuple(product.shape)} is added to {tuple(acc.shape)}")
        self.result = value(product.to(acc.dtype))
        for operand in (self.a, self.b):
            if isinstance(operand, SharedTile):
                operand.end_async_read(self.partition, by_mma=True)
        if self.partition.num_warps == WARPS_OF_A_GROUP:
            # All warps of the group had reached this MMA, so their earlier loads are complete.
            for tile in self.reads:
                tile.end_reads(self.partition)
            for tile in self.partition.reads:
                tile.begin_read(self.partition)

    def as_subclass(self, cls: type) -> Any:
        """What `value` calls."""
        raise HazardError("the result of an MMA is used before it was waited for")

    def __getattr__(self, name: str) -> Any:
        raise HazardError(f"the result of an MMA is used before it was waited for ({name})")


for _name in ("add", "radd", "mul", "rmul", "sub", "rsub", "getitem", "lt", "gt", "ge", "le"):
    setattr(PendingMma, f"__{_name}__", lambda self, *_: self.__getattr__("arithmetic"))


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    partition = current()
    if isinstance(a, PendingMma):
        raise HazardError("an operand of an MMA is the result of one that was not waited for")
    if partition.num_warps % 4:
        raise HazardError(f"{partition.name} has {partition.num_warps} warps: an MMA takes warp groups of 4")
    mma = PendingMma(partition, a, b, acc, bool(use_acc))
    partition.mmas.append(mma)
    partition.pause()
    if is_async:
        return mma
    return warpgroup_mma_wait(0, deps=[mma, *([a] if isinstance(a, Value) else [])], single=True)


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None, single: bool = False) -> Any:
    partition = current()
    partition.pause()
    while len(partition.mmas) > num_outstanding:
        mma = partition.mmas.pop(0)
        mma.complete()
        kept = any(dep is mma.a for dep in deps)
        if isinstance(mma.a, Value) and not kept:
            raise HazardError("the register operand of an MMA is not among the deps of the wait that completes it")
    results = [dep.result if isinstance(dep, PendingMma) and dep.result is not None else dep for dep in deps]
    return results[0] if single or len(results) == 1 else tuple(results)


def fence_async_shared(cluster: bool = False) -> None:
    current().cta.fence(current())


def barrier(*, cluster: bool = False) -> None:
    partition = current()
    partition.pause()
    partition.cta.barrier(partition)


class Mbarrier:
    """`mbarrier` of the language."""

    MBarrierLayout = real_mbarrier.MBarrierLayout

    @staticmethod
    def init(x: Any, count: int) -> None:
        the_barrier(x).init(int(count))

    @staticmethod
    def expect(x: Any, num_bytes: Any, pred: Any = True) -> None:
        if bool(pred):
            the_barrier(x).arrive(1, int(num_bytes))

    @staticmethod
    def arrive(x: Any, *, count: int = 1, pred: Any = True) -> None:
        if bool(pred):
            the_barrier(x).arrive(int(count))
        current().pause()

    @staticmethod
    def wait(x: Any, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        barrier_, parity = the_barrier(x), int(phase)
        if bool(pred):
            current().pause(lambda: barrier_.has_passed(parity), f"parity {parity} of {barrier_.name}")


class Tma:
    """`tma` of the language."""

    @staticmethod
    def async_copy_global_to_shared(
        descriptor: Descriptor, coord: Any, ready: Any, result: SharedTile, pred: Any = True
    ) -> None:
        if not bool(pred):
            return
        signal, coord = the_barrier(ready), [int(at) for at in coord]
        if result.dtype != descriptor.dtype or result.views["data"].numel() != descriptor.read(coord).numel():
            raise ValueError(f"{result.buffer.name} does not fit a block {descriptor.block_shape}")
        result.begin_async_write()

        def complete() -> None:
            result.end_async_write(descriptor.read(coord))
            signal.deliver(descriptor.block_type.nbytes)

        partition = current()
        partition.scheduler.issue(complete)
        partition.pause()

    @staticmethod
    def async_copy_shared_to_global(descriptor: Descriptor, coord: Any, source: SharedTile) -> None:
        _store(descriptor, coord, source, adds=False)

    @staticmethod
    def store_wait(pendings: int) -> None:
        partition = current()
        kept = int(pendings)
        old = partition.stores[: len(partition.stores) - kept]
        partition.pause(lambda: all(event.done for event in old), "its copies to global memory")
        partition.stores = partition.stores[len(partition.stores) - kept :]


def _store(descriptor: Descriptor, coord: Any, source: SharedTile, adds: bool) -> None:
    partition, coord = current(), [int(at) for at in coord]
    source.begin_async_read("TMA")

    def read() -> None:
        # `store_wait` returns after this. The tile reaches global memory later.
        tile = source.views["data"].clone()
        source.end_async_read(partition, by_mma=False)
        partition.writes.append(partition.scheduler.issue(lambda: descriptor.write(coord, tile, adds)))

    partition.stores.append(partition.scheduler.issue(read))
    partition.pause()


def async_add(descriptor: Descriptor, coord: Any, source: SharedTile) -> None:
    """The counterpart of `async_add` of hopper/backward_kernels.py."""
    _store(descriptor, coord, source, adds=True)


def wait_for_turn(counter: Pointer, turn: Any) -> None:
    """The counterpart of `wait_for_turn` of hopper/backward_kernels.py."""
    current().pause(lambda: bool(counter.load(None, None) >= turn), f"turn {float(turn):g} of a tile of dQ")


def end_turn(counter: Pointer) -> None:
    """The counterpart of `end_turn` of hopper/backward_kernels.py."""
    partition = current()
    Tma.store_wait(0)
    partition.pause(lambda: all(event.done for event in partition.writes), "its writes to global memory")
    partition.writes = []
    counter.store(counter.load(None, None) + 1, None)


def simulated_range(*limits: Any) -> Any:
    """`range` with loop variables that are values."""
    return (value(n) for n in range(*(int(limit) for limit in limits)))


class Language:
    """`gl` of a kernel: the functions below, dtypes of torch, and the layouts of the real language."""

    def __getattr__(self, name: str) -> Any:
        return DTYPES[name] if name in DTYPES else getattr(real, name)

    static_range = staticmethod(range)
    barrier = staticmethod(barrier)
    exp2 = staticmethod(lambda x: torch.exp2(value(x)))
    exp = staticmethod(lambda x: torch.exp(value(x)))
    log2 = staticmethod(lambda x: torch.log2(value(x)))
    log = staticmethod(lambda x: torch.log(value(x)))
    abs = staticmethod(lambda x: torch.abs(value(x)))
    cdiv = staticmethod(lambda x, y: (x + y - 1) // y)
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    permute = staticmethod(lambda x, order: x.permute(*order))
    reshape = staticmethod(lambda x, shape: x.reshape(shape))
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    program_id = staticmethod(lambda axis: value(current().cta.index if axis == 0 else 0))
    num_programs = staticmethod(lambda axis: value(current().scheduler.num_ctas if axis == 0 else 1))

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> Value:
        return torch.where(value(condition), value(x), value(y))

    @staticmethod
    def maximum(x: Any, y: Any) -> Value:
        return torch.maximum(*torch.broadcast_tensors(*_same_dtype(x, y)))

    @staticmethod
    def minimum(x: Any, y: Any) -> Value:
        return torch.minimum(*torch.broadcast_tensors(*_same_dtype(x, y)))

    @staticmethod
    def max(x: Value, axis: int) -> Value:
        return torch.amax(value(x), axis)

    @staticmethod
    def min(x: Value, axis: int) -> Value:
        return torch.amin(value(x), axis)

    @staticmethod
    def sum(x: Value, axis: int) -> Value:
        x = value(x)
        return torch.sum(x.double(), axis).to(x.dtype) if x.is_floating_point() else torch.sum(x, axis, dtype=x.dtype)

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Value:
        return value(torch.arange(start, end, dtype=torch.int32))

    @staticmethod
    def zeros(shape: Any, dtype: torch.dtype, layout: Any = None) -> Value:
        return value(torch.zeros(list(shape), dtype=dtype))

    @staticmethod
    def full(shape: Any, fill: Any, dtype: torch.dtype, layout: Any = None) -> Value:
        return value(torch.full(list(shape), fill, dtype=dtype))

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
        return pointer.load(mask, other)

    @staticmethod
    def store(pointer: Pointer, x: Any, mask: Any = None, **_: Any) -> None:
        pointer.store(x, mask)

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: Any, layout: Any) -> Any:
        cta = current().cta
        if isinstance(layout, Mbarrier.MBarrierLayout):
            return BarrierArray(f"mbarrier of shape {list(shape)} of CTA {cta.index},", int(shape[0]))
        return cta.allocate(tuple(int(size) for size in shape), dtype)

    @staticmethod
    def warp_specialize(functions: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
        """Runs the first function in this partition and each other one in a partition of its own."""
        main = current()
        cta, scheduler = main.cta, main.scheduler
        workers = []
        for (function, arguments), num_warps in zip(functions[1:], worker_num_warps, strict=True):
            worker = Partition(
                scheduler, cta, f"{function.name} of CTA {cta.index}", int(num_warps),
                lambda f=function, a=arguments: f(*a),
            )  # fmt: skip
            body = worker.body

            def bound(worker: Partition = worker, body: Any = body) -> Any:
                bind(worker)
                return body()

            worker.body = bound
            workers.append(worker)
            scheduler.add(worker)
        function, arguments = functions[0]
        main.name = f"{function.name} of CTA {cta.index}"
        result = function(*arguments)
        main.pause(lambda: all(worker.ended for worker in workers), "the other partitions")
        return result


def _same_dtype(x: Any, y: Any) -> tuple[Value, Value]:
    x, y = value(x), value(y)
    dtype = torch.result_type(x, y)
    return x.to(dtype), y.to(dtype)
