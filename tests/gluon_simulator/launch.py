"""Runs the Python source of a Gluon kernel with the simulated language in the place of the real one."""

from __future__ import annotations

import types
from typing import Any

import torch
import triton.language
from triton.experimental.gluon import language as real_language
from triton.experimental.gluon.language.nvidia import hopper as real_hopper
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from . import language
from .memory import Cta
from .scheduler import Partition, Scheduler, bind
from .values import Pointer, value

GLUON = language.Language()
REPLACED = [
    (real_language, GLUON),
    (triton.language, GLUON),  # scalar functions of Triton that are compiled for Gluon
    (real_hopper.mbarrier, language.Mbarrier),
    (real_hopper.tma, language.Tma),
    (real_hopper.fence_async_shared, language.fence_async_shared),
    (real_hopper.warpgroup_mma, language.warpgroup_mma),
    (real_hopper.warpgroup_mma_wait, language.warpgroup_mma_wait),
    (getattr(real_language, "barrier", None), language.barrier),
    (getattr(real_language, "thread_barrier", None), language.barrier),
]
BY_NAME = {
    "async_add": language.async_add, "wait_for_turn": language.wait_for_turn, "end_turn": language.end_turn,
    "range": language.simulated_range,
}  # fmt: skip


class SimulatedFunction:
    """A function of a kernel whose globals are those of the simulation."""

    _known: dict[int, SimulatedFunction] = {}  # noqa: RUF012

    def __init__(self, function: JITFunction):
        self.name, self.function = function.fn.__name__, function  # kept, because it is found by its id
        self._known[id(function)] = self
        self.globals: dict[str, Any] = dict(BY_NAME)
        self.call = types.FunctionType(
            function.fn.__code__, self.globals, self.name, function.fn.__defaults__, function.fn.__closure__
        )
        for name, x in function.fn.__globals__.items():
            if name not in BY_NAME:
                self.globals[name] = self._replaced(x)

    @classmethod
    def of(cls, function: JITFunction) -> SimulatedFunction:
        return cls._known.get(id(function)) or cls(function)

    @classmethod
    def _replaced(cls, x: Any) -> Any:
        for real, simulated in REPLACED:
            if x is real and real is not None:
                return simulated
        if isinstance(x, JITFunction | InterpretedFunction):
            return cls.of(x)
        if isinstance(x, ConstexprFunction):
            return x.fn
        if isinstance(x, real_language.constexpr):
            return x.value
        return x

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.call(*arguments, **named)


def simulate(
    kernel: Any, grid: int, *arguments: Any, num_warps: int = 4, seed: int = 0, resident: int = 2, **_: Any
) -> None:
    """Runs kernel[(grid,)](*arguments, num_warps=num_warps) on CPU tensors.

    Args:
        kernel: a Gluon kernel.
        grid: number of CTAs.
        arguments: tensors, Gluon tensor descriptors, numbers and constants, in the kernel's order.
        num_warps: warps of the default partition.
        seed: of the order in which partitions run and asynchronous operations complete.
        resident: CTAs that run at the same time; they start in the order of their index.

    Raises:
        HazardError: an access is not ordered with an asynchronous or unsynchronised one.
        DeadlockError: every partition waits.
    """
    function = SimulatedFunction.of(kernel)
    prepared = [x if param.is_constexpr else _prepared(x) for param, x in zip(kernel.params, arguments, strict=True)]

    def start(scheduler: Scheduler, index: int) -> Partition:
        cta = Cta(index, num_warps)

        def body() -> None:
            bind(partition)
            function(*prepared)
            cta.check_end()

        partition = Partition(scheduler, cta, f"CTA {index}", num_warps, body)
        return partition

    Scheduler(start, grid, resident, seed).run()


def _prepared(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if hasattr(x, "block_shape"):
        return language.Descriptor(x)
    if isinstance(x, tuple):
        parts = [_prepared(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return value(x) if isinstance(x, int | float) else x
