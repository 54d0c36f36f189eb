"""Prints the error of the operator against fp64, as a multiple of plain PyTorch's error in the same dtype.

make accuracy                                                # on this machine's CPU
python -m benchmarks.accuracy --device cuda --workers 8      # on a GPU
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections import defaultdict
from unittest import mock

import torch

from affine_attention.ops.api import forget_plans
from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratios, grid_cases

from .results_file import table, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of the grid (default 1000)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--impl", default="auto", help="implementation to measure (default: auto)")
    parser.add_argument("--workers", type=int, default=1, help="number of processes (default 1)")
    options = parser.parse_args()

    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    above = []
    cases = grid_cases(options.cases, device=options.device)
    measure = functools.partial(ratios_of, impl=options.impl)
    if options.workers == 1:
        results = [measure(case) for case in cases]
    else:
        # On a GPU most of the time is spent compiling kernels, which one process does sequentially.
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            results = pool.map(measure, cases, chunksize=1)
    for case, found in zip(cases, results, strict=True):
        for name, ratio in found:
            ratios[str(case.dtype).removeprefix("torch."), name].append(ratio)
            if not ratio <= MAX_ERROR_RATIO:
                above.append(f"- {ratio:.2f}: {name} of {case}")

    everything = [ratio for each in ratios.values() for ratio in each]
    rows = [[dtype, name, *quantiles(each)] for (dtype, name), each in sorted(ratios.items())]
    rows.append(["all", "all", *quantiles(everything)])
    twice = ", each also run with the kernels of large calls" if options.device == "cuda" else ""
    lines = [
        f"{len(cases)} cases of the grid in `affine_attention.testing` (mechanisms, dtypes, lengths, head dims, "
        f'grouped heads, visibilities, layouts), impl="{options.impl}"{twice}. A ratio is the error of a tensor '
        f"against the fp64 reference over that of plain PyTorch in the same dtype; the bar is {MAX_ERROR_RATIO:g}.",
        "",
        *table(["dtype", "tensor", "tensors", "p50", "p99", "max"], rows),
        "",
        f"Above the bar: {len(above)} of {len(everything)} tensors.",
        *sorted(above, reverse=True),
    ]
    write("accuracy", options.device, "Accuracy against fp64", lines)


def ratios_of(case: Case, impl: str) -> list[tuple[str, float]]:
    """The ratios of every tensor of a case; on a GPU also with the kernels of large calls."""
    found = list(error_ratios(case, impl).items())
    if case.device == "cuda":
        with mock.patch("affine_attention.ops.fused.plan.LARGE", 0):
            forget_plans()
            found += error_ratios(case, impl).items()
        forget_plans()
    return found


def quantiles(values: list[float]) -> list[str]:
    x = torch.tensor(values, dtype=torch.float64)
    return [str(len(values)), *(f"{torch.quantile(x, q).item():.2f}" for q in (0.5, 0.99, 1.0))]


if __name__ == "__main__":
    main()
