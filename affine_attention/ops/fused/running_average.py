"""Updates the running averages of alpha (Eq. 9) of many layers in one launch.

The same update takes about ten PyTorch operations on stacked tensors, and the host needs longer to launch them than the
GPU to run them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import on_device
from .shared.launch import ALIGNMENT, Launch, LaunchSet, Slot

MAX_LAYERS = 64  # of one launch: every layer is two pointers among the arguments, and a branch of the kernel
MAX_PLANS = 256

_plans: dict[tuple[Any, ...], LaunchSet] = {}


def update_running_alpha(targets: list[Tensor], collected: list[Tensor], momentum: float) -> bool:
    """running <- momentum * running + (1 - momentum) * mean, for layers of one size on one GPU.

    Args:
        targets: the running averages, [H] fp32 each, contiguous, updated in place.
        collected: for each, the sums of alpha and then the number of tokens, [H + 1] fp64, contiguous. A layer whose
            mean is not finite, or without a token, keeps its average.

    Returns:
        False where nothing was done, because an address is not a multiple of ALIGNMENT.
    """
    device, heads = targets[0].get_device(), targets[0].numel()
    bits = 0
    for x in (*targets, *collected):
        bits |= x.data_ptr()
    if bits % ALIGNMENT:
        return False
    for first in range(0, len(targets), MAX_LAYERS):
        tensors = targets[first : first + MAX_LAYERS] + collected[first : first + MAX_LAYERS]
        key = (device, heads, momentum, len(tensors))
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            plan = _plans[key] = _launch(len(tensors) // 2, heads, momentum)
        on_device(device, plan.run, "update", plan.values(tensors), device)
    return True


def _launch(layers: int, heads: int, momentum: float) -> LaunchSet:
    block = max(16, triton.next_power_of_2(heads))
    running, collected = (tuple(Slot(first + n) for n in range(layers)) for first in (0, layers))
    # Without fp fusion: the result is bitwise that of PyTorch's operations.
    launch = Launch(
        update_kernel, (layers,), (running, collected, momentum, 1 - momentum, layers, heads, block),
        num_warps=max(1, min(4, block // 32)), enable_fp_fusion=False,
    )  # fmt: skip
    return LaunchSet({"update": [launch]})


@triton.jit
def update_kernel(
    running, collected, momentum, rest, LAYERS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Eq. 9. One program owns one layer."""
    for layer in tl.static_range(LAYERS):
        if tl.program_id(0) == layer:
            _update_layer(running[layer], collected[layer], momentum, rest, HEADS, BLOCK)


@triton.jit
def _update_layer(running, collected, momentum, rest, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.arange(0, BLOCK)
    is_head = head < HEADS
    mean = tl.load(collected + head, mask=is_head, other=0.0) / tl.load(collected + HEADS)
    mean = tl.where(is_head, mean, 0.0).to(tl.float32)
    # A layer without a real token divides 0 by 0, which is not finite either.
    finite = tl.min((tl.abs(mean) < float("inf")).to(tl.int32), axis=0)
    before = tl.load(running + head, mask=is_head, other=0.0)
    tl.store(running + head, momentum * before + rest * mean, mask=is_head & (finite == 1))
