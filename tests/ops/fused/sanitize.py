"""Runs the fused kernels over many small cases, forward and backward, under NVIDIA's compute-sanitizer.

    make sanitize        # memcheck, racecheck and initcheck, one after the other; needs a GPU and compute-sanitizer

Without PyTorch's caching allocator every tensor is an allocation of its own, so that a read past its end or of memory
that nothing wrote is seen. Prints the number of cases, and fails when a result is wrong.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratios, grid_cases, make_inputs, run

SERVED = ("mask", "head_mask")


def cases() -> list[Case]:
    """Cases of the grid that the fused kernels serve, cut to lengths that a sanitizer can bear."""
    chosen = []
    for case in grid_cases(200, seed=2, device="cuda"):
        if any(kind in SERVED for kind in case.visibility.split("+")):
            continue
        length = min(case.queries, 150)
        chosen.append(replace(case, batch=1, queries=length, keys=length))
    return chosen


def main() -> None:
    ran = 0
    for case in cases():
        if "--check" in sys.argv:
            worst = max(error_ratios(case, "fused").values(), default=0.0)
            assert worst <= MAX_ERROR_RATIO, f"{case}: {worst}"
        else:
            run(make_inputs(case), "fused")
        torch.cuda.synchronize()
        ran += 1
    print(f"{ran} cases ran, forward and backward")


if __name__ == "__main__":
    main()
