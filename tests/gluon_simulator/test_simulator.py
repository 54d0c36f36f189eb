"""The simulator finds what is missing: every wait, fence and barrier of the Hopper kernels is removed once.

The unchanged kernels must run without an error in the same orders of operations.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused.hopper import backward_kernels, gluon_forward, gluon_forward_kernels

from ..interpreter import run_in_the_interpreter
from ..ops.fused.cudnn.test_cudnn import AFFINE, make, results
from ..ops.fused.routes import by_route
from . import DeadlockError, HazardError, simulate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
outside = pytest.mark.skipif(INTERPRETED, reason="starts its own process")
SEEDS = range(6)  # 0 and 3 complete asynchronous operations as late as possible

# What is removed from the backward, or changed: (text, replacement).
BACKWARD = {
    "wait for a free stage": ("        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)\n", ""),
    "wait for a loaded tile": (
        "    mbarrier.wait(full.index(later), ((n + 1) // STAGES) & 1, pred=n + 1 < total)\n",
        "",
    ),
    "wait for the copy of dQ": ("    mbarrier.wait(dq_empty, (n & 1) ^ 1)\n", ""),
    "wait for a tile of dQ": ("        mbarrier.wait(dq_full, n & 1)\n", ""),
    "wait for the end of a copy": ("        tma.store_wait(0)\n        mbarrier.arrive", "        mbarrier.arrive"),
    "wait for dP": ("    dp = warpgroup_mma_wait(1, deps=[dp])\n", ""),
    "registers of P in use": (
        "    dv, p_left = warpgroup_mma_wait(1, deps=[dv, p_left])",
        "    dv = warpgroup_mma_wait(1, deps=[dv])",
    ),
    "fence after dS": ("    ds_tile.store(ds)\n    fence_async_shared()\n", "    ds_tile.store(ds)\n"),
    "barrier after dS": (
        "    fence_async_shared()\n    barrier()\n    # After",
        "    fence_async_shared()\n    # After",
    ),
    "barrier after dQ": (
        "    fence_async_shared()\n    barrier()\n    mbarrier.arrive(dq_full",
        "    fence_async_shared()\n    mbarrier.arrive(dq_full",
    ),
    "barrier before the keys are overwritten": (
        "    barrier()  # wait until the last MMAs of all warps have read the keys\n",
        "",
    ),
    "stage freed too early": (
        "empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0",
        "empty.index(n % STAGES), count=1",
    ),
    "bytes of a stage": (
        "2 * q_desc.block_type.nbytes + rows_desc.block_type.nbytes",
        "2 * q_desc.block_type.nbytes",
    ),
}
FORWARD = {
    "wait for free queries": ("        mbarrier.wait(q_empty, (nth & 1) ^ 1)\n", ""),
    "wait for a free stage of K": ("            mbarrier.wait(k_empty.index(stage), phase)\n", ""),
    "wait for a free stage of V": ("            mbarrier.wait(v_empty.index(stage), phase)\n", ""),
    "wait for the queries": ("        mbarrier.wait(q_full, nth & 1)\n", ""),
    "wait for K": ("    mbarrier.wait(k_full.index(stage), phase)\n", ""),
    "wait for V": ("    mbarrier.wait(v_full.index(before), ((n + t - 1) // STAGES) & 1)\n", ""),
    "wait for the scores": ("    scores = warpgroup_mma_wait(1, deps=[scores])\n", ""),
    "registers of P in use": (
        "    acc, p = warpgroup_mma_wait(0, deps=[acc, p])\n    mbarrier",
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n    mbarrier",
    ),
    "V freed too early": (
        "    acc = warpgroup_mma(p, v, acc, is_async=True)\n    scores",
        "    acc = warpgroup_mma(p, v, acc, is_async=True)\n    mbarrier.arrive(v_empty.index(before), count=1)\n"
        "    scores",
    ),
    "wait for the values of the sums": ("                mbarrier.wait(own_full, num_loaded & 1)\n", ""),
    "wait for the staging tile": ("        tma.store_wait(0)\n        barrier()  # the staging tile is free\n", ""),
    "fence in the staging tile": (
        "    fence_async_shared()\n    barrier()\n    tma.async",
        "    barrier()\n    tma.async",
    ),
    "barrier in the staging tile": (
        "    fence_async_shared()\n    barrier()\n    tma.async",
        "    fence_async_shared()\n    tma.async",
    ),
    "last copy": ("first_row)\n    tma.store_wait(0)\n", "first_row)\n"),
}


def changed_kernel(module, name: str, change: tuple[str, str], folder: Path):
    """The kernel of a module whose source has one change."""
    source = Path(module.__file__).read_text()
    assert source.count(change[0]) == 1, change[0]
    file = folder / "changed.py"
    file.write_text(source.replace(*change))
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.changed", file)
    changed = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = changed  # inspect reads the source through it
    try:
        spec.loader.exec_module(changed)
    finally:
        del sys.modules[spec.name]
    return getattr(changed, name)


def recorded(**options):
    """The launches of the forward and of the backward of a causal call: (kernel, grid, arguments, options) by name."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    found = {}

    def record(self, *arguments, grid, warmup, **options):
        found[self.fn.__name__] = (self, grid[0], arguments, options)
        simulate(self, grid[0], *arguments, **options)

    inputs, grad = make(1, 2, 1, 400, 400, 64, AFFINE, torch.float16, nonnegative=True)
    visibility = Visibility(1, 400, 400, "cpu", is_causal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GluonJITFunction, "run", record)
        patch.setattr(gluon_forward, "num_sms", lambda device: 2)
        results(by_route("gluon", "hopper", **options), inputs, grad, visibility, nonnegative_alpha=True)
    return found


@pytest.fixture(scope="module")
def launches():
    return recorded()


@inside
@pytest.mark.parametrize("name", ["attend_kernel", "gradients_kernel"])
def test_the_kernels_run_in_every_order(name, launches):
    kernel, grid, arguments, options = launches[name]
    for seed in range(20):
        simulate(kernel, grid, *arguments, **options, seed=seed, resident=1 + seed % 3)


@inside
@pytest.mark.parametrize(
    ("name", "what"),
    [("gradients_kernel", what) for what in BACKWARD] + [("attend_kernel", what) for what in FORWARD],
)
def test_what_is_missing_is_found(name, what, launches, tmp_path):
    module, changes = (backward_kernels, BACKWARD) if what in BACKWARD and name == "gradients_kernel" else (
        gluon_forward_kernels, FORWARD,
    )  # fmt: skip
    kernel = changed_kernel(module, name, changes[what], tmp_path)
    _, grid, arguments, options = launches[name]

    def run():
        for seed in SEEDS:
            simulate(kernel, grid, *arguments, **options, seed=seed)

    with pytest.raises((HazardError, DeadlockError)):
        run()


def sums_of_dq(kernel, launch, seed, resident):
    """The sums of dQ after a run of the kernel from zeros."""
    _, grid, arguments, options = launch
    sums = arguments[7].base
    sums.zero_()
    simulate(kernel, grid, *arguments, **options, seed=seed, resident=resident)
    return sums[: arguments[0].base.numel() // sums.shape[1]].clone()


@inside
def test_dq_has_a_fixed_order_with_turns_and_none_without(tmp_path):
    launch = recorded(ordered=True)["gradients_kernel"]
    orders = [(seed, 1 + seed % 4) for seed in range(8)]
    first, *others = (sums_of_dq(launch[0], launch, *order) for order in orders)
    assert all(torch.equal(first, each) for each in others)
    change = "            wait_for_turn(turns + of_dq, (tile // (BLOCK_N // BLOCK_M)).to(gl.float32))\n"
    without = changed_kernel(backward_kernels, "gradients_kernel", (change, "            pass\n"), tmp_path)
    assert not all(torch.equal(first, sums_of_dq(without, launch, *order)) for order in orders)
    forwards = ("        block = num_blocks - 1 - block\n", "        block = block\n")
    stuck = changed_kernel(backward_kernels, "gradients_kernel", forwards, tmp_path)
    with pytest.raises(DeadlockError, match="turn 1 of a tile of dQ"):
        sums_of_dq(stuck, launch, 0, 2)


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
