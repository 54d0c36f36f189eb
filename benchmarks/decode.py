"""Measures the bandwidth at which a decoding step reads its cache, relative to a device copy, on a CUDA GPU.

    python -m benchmarks.decode

A step reads every key and value once, so its bandwidth is the size of the cache divided by the time of a step. It is
compared with the bytes read plus written per second by a large device copy in the same run. Steps are replayed as CUDA
graphs, as in an inference engine; "eager" is the same call without a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from affine_attention import attention, decode_attention

from .measure import median_seconds
from .results_file import table, write

PAGE = 64


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    groups: int
    keys: int
    dim: int
    queries: int = 1

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads}/{self.groups} S{self.keys} D{self.dim} T{self.queries}"


SHAPES = (  # 512 MiB of bf16 keys and values each
    Shape(8, 32, 8, 16384, 128),
    Shape(1, 32, 8, 131072, 128),
    Shape(64, 32, 8, 2048, 128),
    Shape(16, 32, 8, 16384, 64),
    Shape(16, 16, 16, 8192, 64),
    Shape(8, 24, 8, 16384, 128, queries=4),
)


def functions_of(shape: Shape) -> dict[str, Callable[[], object]]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    query = normal(shape.batch, shape.heads, shape.queries, shape.dim)
    key, value = (normal(shape.batch, shape.groups, shape.keys, shape.dim) for _ in range(2))
    alpha = torch.rand(query.shape[:3], device="cuda")
    rows = {"alpha": alpha, "beta": (0.5 - alpha) / shape.keys}
    lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda")
    pages = shape.batch * shape.keys // PAGE
    order = torch.randperm(pages, device="cuda")
    cut = (pages, PAGE, shape.groups, shape.dim)
    paged_key, paged_value = (x.transpose(1, 2).reshape(cut)[order.argsort()] for x in (key, value))
    block_table = order.view(shape.batch, -1).int()

    steps: dict[str, Callable[[], object]] = {
        "affine": lambda: attention(query, key, value, **rows, is_causal=True, impl="fused"),
        "affine, lengths": lambda: decode_attention(query, key, value, **rows, lengths=lengths),
        "affine, paged": lambda: decode_attention(
            query, paged_key, paged_value, **rows, lengths=lengths, block_table=block_table
        ),
        "softmax": lambda: attention(query, key, value, is_causal=True, impl="fused"),
    }
    graphs: dict[str, Callable[[], object]] = {}
    for name, step in steps.items():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        # A graph only holds addresses: keep the step, and with it the tensors, alive.
        graphs[name] = lambda graph=graph, step=step: graph.replay()
    graphs["affine, eager"] = steps["affine"]
    if shape.queries == 1:
        graphs["plain SDPA, eager"] = lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return graphs


def copy_bandwidth() -> float:
    """Bytes read plus written per second by a device copy of 1 GiB."""
    source = torch.randint(0, 100, (2**30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds({"copy": lambda: target.copy_(source)}, 15, "cuda")["copy"]


@torch.no_grad()
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.decode needs a CUDA GPU, and torch sees none")
    copy = copy_bandwidth()
    rows = []
    for shape in SHAPES:
        size = 2 * shape.batch * shape.groups * shape.keys * shape.dim * 2
        times = median_seconds(functions_of(shape), 21, "cuda")
        for name, seconds in times.items():
            rows.append(
                [
                    str(shape) if name == "affine" else "",
                    name,
                    f"{seconds * 1e6:.1f}",
                    f"{size / seconds / 1e9:.0f}",
                    f"{size / seconds / copy:.3f}",
                ]
            )
        torch.cuda.empty_cache()
    lines = [
        f"bf16, 512 MiB of keys and values, medians of 21 rounds. A device copy transfers {copy / 1e9:.0f} GB/s "
        "(bytes read plus written).",
        "",
        *table(["shape", "step", "us", "GB/s", "of copy"], rows),
    ]
    write("decode", "cuda", "Decoding: cache bandwidth", lines)


if __name__ == "__main__":
    main()
