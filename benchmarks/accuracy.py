"""Prints how far the operator is from fp64, as a multiple of plain PyTorch's distance in the same dtype.

make accuracy                                    # on this machine's CPU
python -m benchmarks.accuracy --device cuda      # on a GPU
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch

from affine_attention.testing import MAX_ERROR_RATIO, error_ratios, grid_cases

from .results_file import table, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of the grid (default 1000)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--impl", default="auto", help="implementation to measure (default: auto)")
    options = parser.parse_args()

    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    above = []
    cases = grid_cases(options.cases, device=options.device)
    for case in cases:
        for name, ratio in error_ratios(case, options.impl).items():
            ratios[str(case.dtype).removeprefix("torch."), name].append(ratio)
            if not ratio <= MAX_ERROR_RATIO:
                above.append(f"- {ratio:.2f}: {name} of {case}")

    everything = [ratio for each in ratios.values() for ratio in each]
    rows = [[dtype, name, *quantiles(each)] for (dtype, name), each in sorted(ratios.items())]
    rows.append(["all", "all", *quantiles(everything)])
    lines = [
        f"{len(cases)} cases of the grid in `affine_attention.testing` (mechanisms, dtypes, lengths, head dims, "
        f'grouped heads, visibilities, layouts), impl="{options.impl}". A ratio is the error of a tensor against '
        f"the fp64 reference over the error of plain PyTorch in the same dtype; the bar is {MAX_ERROR_RATIO:g}.",
        "",
        *table(["dtype", "tensor", "tensors", "p50", "p99", "max"], rows),
        "",
        f"Above the bar: {len(above)} of {len(everything)} tensors.",
        *sorted(above, reverse=True),
    ]
    write("accuracy", options.device, "Accuracy against fp64", lines)


def quantiles(values: list[float]) -> list[str]:
    x = torch.tensor(values, dtype=torch.float64)
    return [str(len(values)), *(f"{torch.quantile(x, q).item():.2f}" for q in (0.5, 0.99, 1.0))]


if __name__ == "__main__":
    main()
