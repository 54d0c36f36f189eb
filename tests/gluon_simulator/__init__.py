"""Runs Gluon kernels for Hopper on the CPU, with their asynchronous operations in a random order.

Triton's interpreter does not run Gluon. This simulator executes the Python source of a kernel: a tile is a tensor, a
partition of warps is a thread, and one thread runs at a time. Copies by TMA and MMAs complete at a random later time
or when the kernel waits for them, whichever comes first. An access that such a completion could change is an error, so
a missing wait, fence or barrier is found and not only its effect on the result.

What it does not model: layouts and registers (the compiler checks them, tests/ops/fused/flash/test_compile.py), single
warps inside of a partition, and time.
"""

from .launch import simulate
from .scheduler import DeadlockError, HazardError

__all__ = ["DeadlockError", "HazardError", "simulate"]
