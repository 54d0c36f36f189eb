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
from affine_attention.testing import MAX_ERROR_RATIO, MAX_ROW_ERROR_RATIO, Case, accuracy, grid_cases

from .results_file import table, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of the grid (default 1000)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--impl", default="auto", help="implementation to measure (default: auto)")
    parser.add_argument("--workers", type=int, default=1, help="number of processes (default 1)")
    options = parser.parse_args()

    norms: dict[tuple[str, str], list[float]] = defaultdict(list)
    worst_rows: dict[tuple[str, str], list[float]] = defaultdict(list)
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
        for name, norm, worst_row in found:
            key = str(case.dtype).removeprefix("torch."), name
            norms[key].append(norm)
            worst_rows[key].append(worst_row)
            if not norm <= MAX_ERROR_RATIO:
                above.append(f"- {norm:.2f}: {name} of {case}")
            if not worst_row <= MAX_ROW_ERROR_RATIO:
                above.append(f"- {worst_row:.2f}: worst row of {name} of {case}")

    rows = [[*key, str(len(norms[key])), *quantiles(norms[key]), *quantiles(worst_rows[key])] for key in sorted(norms)]
    every_norm, every_row = ([x for each in found.values() for x in each] for found in (norms, worst_rows))
    rows.append(["all", "all", str(len(every_norm)), *quantiles(every_norm), *quantiles(every_row)])
    twice = ", each also run with the kernels of large calls" if options.device == "cuda" else ""
    lines = [
        f"{len(cases)} cases of the grid in `affine_attention.testing` (mechanisms, dtypes, lengths, head dims, "
        f'grouped heads, visibilities, layouts), impl="{options.impl}"{twice}. A ratio is the error of a tensor '
        f"against the fp64 reference over that of plain PyTorch in the same dtype: of the L2 norm of the tensor (bar "
        f"{MAX_ERROR_RATIO:g}), and of the row with the largest error (bar {MAX_ROW_ERROR_RATIO:g}).",
        "",
        *table(["dtype", "tensor", "tensors", "p50", "p99", "max", "row p50", "row p99", "row max"], rows),
        "",
        f"Above a bar: {len(above)} of {2 * len(every_norm)} ratios.",
        *sorted(above, reverse=True),
    ]
    write("accuracy", options.device, "Accuracy against fp64", lines)


def ratios_of(case: Case, impl: str) -> list[tuple[str, float, float]]:
    """Name and both ratios of every tensor of a case; on a GPU also with the kernels of large calls."""
    found = [accuracy(case, impl)]
    if case.device == "cuda":
        with mock.patch("affine_attention.ops.fused.plan.LARGE", 0):
            forget_plans()
            found.append(accuracy(case, impl))
        forget_plans()
    return [(name, norm, worst_row[name]) for norms, worst_row in found for name, norm in norms.items()]


def quantiles(values: list[float]) -> list[str]:
    x = torch.tensor(values, dtype=torch.float64)
    return [f"{torch.quantile(x, q).item():.2f}" for q in (0.5, 0.99, 1.0)]


if __name__ == "__main__":
    main()
