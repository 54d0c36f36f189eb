"""Launches a kernel that was launched before with arguments of the same kind, without asking Triton which one it is.

For every launch Triton looks at each argument, to find the variant that was compiled for such arguments. The passes
beside attention have up to fifty, and the host's time for a short call is mostly that. In training the same numbers
come back in every layer and step: they are the key under which the compiled variant is found again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import INTERPRETED

ALIGNED = 15  # Triton compiles apart for pointers at multiples of 16 bytes: they can be read 16 bytes at a time
LIMIT = 4096  # kinds of arguments to remember: evaluation meets many lengths

_known: dict[tuple[Any, ...], Any] = {}


def relaunch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], numbers: tuple[Any, ...], **options: Any
) -> None:
    """kernel[grid](*tensors, *numbers, **options).

    `tensors` are tensors, descriptors and None; `numbers` are all else that the kernel takes, constants included.
    """
    if INTERPRETED:
        kernel[grid](*tensors, *numbers, **options)
        return
    key = (id(kernel), numbers, *map(_kind, tensors), *options.items())
    compiled = _known.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*tensors, *numbers)
        return
    compiled = kernel[grid](*tensors, *numbers, **options)
    if compiled is not None:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[key] = compiled


def _kind(x: Any) -> Any:
    """As much of an argument as decides which variant of a kernel takes it."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & ALIGNED == 0, x.get_device()
    if x is not None and hasattr(x, "block_shape"):  # a descriptor of Triton's or of Gluon's, which has a layout
        return x.base.dtype, *x.block_shape
    return x
