"""Measures the error of the worst row at the benchmark's own sizes against fp64, beside that of plain SDPA.

    python -m benchmarks.worst_row                                  # the six shapes on a GPU, one batch entry each
    python -m benchmarks.worst_row --shapes llama1b-2k --repeats 1000

The truth is computed in fp64 in blocks of queries, forward and backward. Plain SDPA is the composition that a user
would write: F.scaled_dot_product_attention, times alpha, plus beta times a cumulative sum of the values in fp32.
Repeats run the same call again and count the runs whose worst row is above the bar.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_attention import attention
from affine_attention.testing import MAX_ROW_ERROR_RATIO

from .attention import CPU_SHAPES, CUDA_SHAPES, MECHANISMS, Bench, Shape
from .results_file import table, write

QUERY_BLOCK = 1024


def truth(given: dict[str, Tensor], grad_out: Tensor, block: int = QUERY_BLOCK) -> dict[str, Tensor]:
    """The output and every gradient of a causal call with one batch entry, in fp64: F1 to F4 and B1 to B6."""
    x = {name: each.detach().double()[0 if each.dim() > 1 else slice(None)] for name, each in given.items()}
    query, key, value, grad = x["query"], x["key"], x["value"], grad_out.double()[0]
    (heads, length, dim), repeats = query.shape, query.shape[0] // key.shape[0]
    found = {name: torch.zeros_like(each) for name, each in x.items()} | {"out": torch.empty_like(query)}
    scale = dim**-0.5
    for head in range(heads):
        k, v = key[head // repeats], value[head // repeats]
        sums = v.cumsum(0)
        for first in range(0, length, block):
            rows = slice(first, min(first + block, length))
            keys = slice(0, rows.stop)
            hidden = torch.arange(rows.stop, device=k.device) > torch.arange(first, rows.stop, device=k.device)[:, None]
            scores = (query[head, rows] @ k[keys].mT * scale).masked_fill(hidden, -torch.inf)
            lse = torch.logsumexp(scores, -1)
            if "sink" in x:
                lse = torch.logaddexp(lse, x["sink"][head])
            weights = torch.exp(scores - lse[:, None])
            softmax_out = weights @ v[keys]
            alpha = x["alpha"][head, rows] if "alpha" in x else torch.ones_like(lse)
            beta = x["beta"][head, rows] if "beta" in x else torch.zeros_like(lse)
            inner = alpha[:, None] * softmax_out + beta[:, None] * sums[rows]
            outer = grad[head, rows]
            found["out"][head, rows] = inner
            if "gate" in x:
                found["out"][head, rows] *= x["gate"][head, rows]
                found["gate"][head, rows] = outer * inner
                outer = outer * x["gate"][head, rows]
            grad_weights = outer @ v[keys].mT
            grad_alpha = (weights * grad_weights).sum(-1)
            grad_scores = weights * (alpha[:, None] * (grad_weights - grad_alpha[:, None])) * scale
            found["query"][head, rows] = grad_scores @ k[keys]
            found["key"][head // repeats, keys] += grad_scores.mT @ query[head, rows]
            total = (alpha[:, None] * weights + beta[:, None]).masked_fill(hidden, 0)
            found["value"][head // repeats, keys] += total.mT @ outer
            if "alpha" in x:
                found["alpha"][head, rows] = grad_alpha
            if "beta" in x:
                found["beta"][head, rows] = (outer * sums[rows]).sum(-1)
            if "sink" in x:
                found["sink"][head] -= (torch.exp(x["sink"][head] - lse) * alpha * grad_alpha).sum()
    return found


def plain(given: dict[str, Tensor]) -> Tensor:
    """SDPA with the mechanism around it, in the dtypes of the inputs. It has no sink."""
    query, key, value = given["query"], given["key"], given["value"]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    if "alpha" in given:
        out = given["alpha"][..., None] * out
    if "beta" in given:
        sums = value.float().cumsum(2).repeat_interleave(query.shape[1] // value.shape[1], 1)
        out = out + given["beta"][..., None] * sums
    out = out.to(query.dtype)
    return given["gate"] * out if "gate" in given else out


def worst_rows(out: Tensor, given: dict[str, Tensor], grad_out: Tensor, right: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of a row of the output and of each gradient; of an element where a tensor has no rows."""
    grads = torch.autograd.grad(out, list(given.values()), grad_out)
    found = {"out": out.detach()} | dict(zip(given, grads, strict=True))
    worst = {}
    for name, x in found.items():
        error = (x[0] if x.dim() > 1 else x).double() - right[name]
        worst[name] = float((error.norm(dim=-1) if error.dim() == 3 else error.abs()).max())
    return worst


def measure(shape: Shape, device: str, mechanism: str, repeats: int) -> list[list[str]]:
    """One row of the table for each tensor of a mechanism."""
    one = Shape(shape.name, 1, shape.heads, shape.groups, shape.length, shape.dim)
    bench = Bench(one, device, torch.bfloat16)
    given = bench.of(mechanism)
    right = truth(given, bench.grad_out)
    # A sink has no counterpart in SDPA: its baseline is plain SDPA on the same query, key and value.
    baseline = {name: x for name, x in given.items() if name != "sink"}
    base_right = truth(baseline, bench.grad_out) if "sink" in given else right
    base = worst_rows(plain(baseline), baseline, bench.grad_out, base_right)
    ours: dict[str, float] = {}
    above: dict[str, int] = {}
    for _ in range(repeats):
        out = attention(**given, is_causal=True, nonnegative_alpha=True)
        for name, error in worst_rows(out, given, bench.grad_out, right).items():
            if math.isnan(error) or error > ours.get(name, -1.0):  # a NaN stays: no number is larger
                ours[name] = error
            bar = MAX_ROW_ERROR_RATIO * base.get(name, float("inf"))
            above[name] = above.get(name, 0) + (not error <= bar)
    rows = []
    for name, error in ours.items():
        unit = base.get(name)
        ratio = "" if unit is None or unit == 0 else f"{error / unit:.2f}"
        shown = "" if unit is None else f"{unit:.3g}"
        rows.append([str(shape), mechanism, name, f"{error:.3g}", shown, ratio, f"{above[name]} of {repeats}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="*", default=None, metavar="NAME", help="only these shapes")
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each call (default 3)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    shapes = CUDA_SHAPES if options.device == "cuda" else CPU_SHAPES
    rows = []
    for shape in shapes:
        if options.shapes is None or shape.name in options.shapes:
            for mechanism in options.mechanisms:
                rows += measure(shape, options.device, mechanism, options.repeats)
    lines = [
        "bf16, causal, one batch entry. The error of a row is the L2 norm of its difference to fp64; the ratio is the "
        f"largest of all runs over the largest of plain SDPA (bar {MAX_ROW_ERROR_RATIO:g}). The last column counts the "
        "runs above the bar. A sink has no plain counterpart: its other tensors are compared with SDPA without a sink.",
        "",
        *table(["shape", "mechanism", "tensor", "worst row", "plain SDPA", "ratio", "runs above"], rows),
    ]
    write("worst-row", options.device, "The worst row against fp64", lines)


if __name__ == "__main__":
    main()
