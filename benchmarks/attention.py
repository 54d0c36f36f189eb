"""Compares the time and memory of the mechanisms with plain attention, on this machine's CPU or GPU.

    make benchmark                                    # on a GPU if available, otherwise on the CPU
    python -m benchmarks.attention --device cpu --rounds 9

All functions run on the same inputs in the same process, interleaved; times are medians, and ratios are to the fastest
plain SDPA backend. Plain attention is `F.scaled_dot_product_attention` with the same grouped heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from affine_attention import Mechanism, attention, explain
from affine_attention.testing import naive_attention

from .measure import kept_memory, median_seconds, peak_memory
from .results_file import table, write

MECHANISMS = ("affine", "affine_gated", "sink")


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    heads: int
    groups: int
    length: int
    dim: int

    def __str__(self) -> str:
        return f"{self.name}: B{self.batch} H{self.heads}/{self.groups} T{self.length} D{self.dim}"

    @property
    def flops(self) -> float:
        """FLOPs of a causal forward; forward and backward together have 3.5 times as many."""
        return 2.0 * self.batch * self.heads * self.length**2 * self.dim


CPU_SHAPES = (Shape("cpu-2k", 2, 16, 4, 2048, 64), Shape("cpu-16k", 1, 2, 1, 16384, 64))
CUDA_SHAPES = (
    Shape("qwen0.5b-2k", 16, 16, 16, 2048, 64),
    Shape("llama1b-2k", 8, 32, 8, 2048, 64),
    Shape("llama3b-2k", 8, 24, 8, 2048, 128),
    Shape("llama1b-8k", 2, 32, 8, 8192, 64),
    Shape("llama3b-8k", 2, 24, 8, 8192, 128),
    Shape("llama3b-32k", 1, 24, 8, 32768, 128),
)
PLAIN_BACKENDS = {
    "cpu": {"sdpa": SDPBackend.FLASH_ATTENTION},
    "cuda": {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION},
}
NAIVE_LIMIT = {"cpu": 1e9, "cuda": 3e10}  # bytes of T x S weights beyond which the paper's formula is not run


class Bench:
    """The inputs of one shape and the functions to compare."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        self.shape, self.device, self.dtype = shape, device, dtype
        torch.manual_seed(0)
        like = {"device": device, "dtype": dtype}
        rows = (shape.batch, shape.heads, shape.length)
        alpha = torch.rand(rows, device=device)
        self.tensors = {
            "query": torch.randn(*rows, shape.dim, **like),
            "key": torch.randn(shape.batch, shape.groups, shape.length, shape.dim, **like),
            "value": torch.randn(shape.batch, shape.groups, shape.length, shape.dim, **like),
            "alpha": alpha,
            "beta": (0.5 - alpha) / shape.length,
            "sink": torch.randn(shape.heads, device=device),
            "gate": torch.rand(*rows, shape.dim, **like),
        }
        for x in self.tensors.values():
            x.requires_grad_()
        self.zero_alpha = torch.zeros_like(alpha).requires_grad_()
        self.middle_alpha = (0.4 + 0.2 * alpha.detach()).requires_grad_()  # as at the start of a training
        self.grad_out = torch.randn(*rows, shape.dim, **like)

    def of(self, mechanism: str) -> dict[str, Tensor]:
        """The input tensors of a mechanism."""
        chosen = Mechanism.named(mechanism)
        has = {"alpha": chosen.has_alpha, "beta": chosen.bias, "sink": chosen.sink is not None, "gate": chosen.gate}
        return {name: x for name, x in self.tensors.items() if has.get(name, True)}

    def plain(self, backend: SDPBackend) -> Callable[[], Tensor]:
        given = self.of("softmax")

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*given.values(), is_causal=True, enable_gqa=True)

        return call

    def ours(self, mechanism: str) -> Callable[[], Tensor]:
        """The call of the layers, which promise that alpha is not negative."""
        given = self.of(mechanism)
        return lambda: attention(**given, is_causal=True, nonnegative_alpha=True)

    def ours_any_sign(self) -> Callable[[], Tensor]:
        given = self.of("affine")
        return lambda: attention(**given, is_causal=True)

    def ours_with(self, alpha: Tensor) -> Callable[[], Tensor]:
        """The call with another alpha. Without a saved O, alpha = 0 is the worst case: every row is recomputed."""
        given = {**self.of("affine"), "alpha": alpha}
        return lambda: attention(**given, is_causal=True, nonnegative_alpha=True)

    def ours_deterministic(self) -> Callable[[], Tensor]:
        """Under torch.use_deterministic_algorithms, with a backward that adds dQ in a fixed order."""
        given = self.of("affine")

        def call() -> Tensor:
            torch.use_deterministic_algorithms(True)
            try:
                return attention(**given, is_causal=True)
            finally:
                torch.use_deterministic_algorithms(False)

        return call

    def naive(self, mechanism: str) -> Callable[[], Tensor] | None:
        """The paper's formula as written, with T x S weights; None if they would not fit into memory."""
        shape, item = self.shape, self.tensors["query"].element_size()
        if shape.batch * shape.heads * shape.length**2 * item > NAIVE_LIMIT[self.device]:
            return None
        given = {name: x.to(self.dtype) if x.dim() == 3 else x for name, x in self.of(mechanism).items()}
        return lambda: naive_attention(given, {"is_causal": True})

    def rivals(self) -> dict[str, Callable[[], Tensor]]:
        """Alternatives for affine attention on a GPU, built from PyTorch functions and compiled."""
        if self.device != "cuda":
            return {}
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # otherwise later shapes exceed dynamo's recompile limit and silently run uncompiled
        given = self.of("affine")
        query, key, value, alpha, beta = (given[name] for name in ("query", "key", "value", "alpha", "beta"))
        repeats = self.shape.heads // self.shape.groups

        def shift(out: Tensor, value: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
            sums = value.float().cumsum(2).repeat_interleave(repeats, 1)
            return (alpha[..., None] * out + beta[..., None] * sums).to(out.dtype)

        def composed(query, key, value, alpha, beta):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return shift(out, value, alpha, beta)

        length = self.shape.length
        causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")

        def flex(query, key, value, alpha, beta):
            out = flex_attention(query, key, value, block_mask=causal, enable_gqa=True)
            return shift(out, value, alpha, beta)

        compiled, compiled_flex = torch.compile(composed), torch.compile(flex)

        def run_composed() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return compiled(query, key, value, alpha, beta)

        return {
            "affine, compiled composition": run_composed,
            "affine, FlexAttention": lambda: compiled_flex(query, key, value, alpha, beta),
        }

    def with_backward(self, forward: Callable[[], Tensor]) -> Callable[[], object]:
        leaves = [*self.tensors.values(), self.zero_alpha, self.middle_alpha]
        return lambda: torch.autograd.grad(forward(), leaves, self.grad_out, allow_unused=True)


def measure(
    shape: Shape, device: str, dtype: torch.dtype, rounds: int, with_rivals: bool, with_naive: bool
) -> list[list[str]]:
    """Rows of the table for one shape."""
    bench = Bench(shape, device, dtype)
    functions = {name: bench.plain(backend) for name, backend in PLAIN_BACKENDS[device].items()}
    plain_names = list(functions)
    functions |= {mechanism: bench.ours(mechanism) for mechanism in MECHANISMS}
    if device == "cuda":
        functions["affine, alpha of any sign"] = bench.ours_any_sign()
        functions["affine, alpha near 0.5"] = bench.ours_with(bench.middle_alpha)
        functions["affine, every alpha 0"] = bench.ours_with(bench.zero_alpha)
        functions["affine, deterministic"] = bench.ours_deterministic()
    others = bench.rivals() if with_rivals else {}
    naive = bench.naive("affine") if with_naive else None
    if naive is not None:
        others["affine, the paper's formula"] = naive
    too_large = [name for name, function in others.items() if not fits(bench.with_backward(function))]
    functions |= {name: function for name, function in others.items() if name not in too_large}

    def without_graph(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with torch.no_grad():
                return function()

        return call

    forward = median_seconds({n: without_graph(f) for n, f in functions.items()}, rounds, device)
    both = {n: bench.with_backward(f) for n, f in functions.items()}
    backward = median_seconds(both, rounds, device)
    memory = {n: peak_memory(f, device) for n, f in both.items()}
    kept = {n: kept_memory(f) for n, f in functions.items()} if device == "cuda" else {}
    best_forward = min(forward[n] for n in plain_names)
    best_backward = min(backward[n] for n in plain_names)
    least_memory = min(memory[n] for n in plain_names)
    least_kept = min((kept[n] for n in plain_names if n in kept), default=1)

    rows = []
    for name in functions:
        ran = str(explain(**bench.of(name), is_causal=True)).split(":")[0] if name in MECHANISMS else ""
        rows.append(
            [
                str(shape) if not rows else "",
                name,
                f"{forward[name] * 1e3:.3f}",
                f"{shape.flops / forward[name] / 1e12:.3g}",
                f"{forward[name] / best_forward:.3f}",
                f"{backward[name] * 1e3:.3f}",
                f"{3.5 * shape.flops / backward[name] / 1e12:.3g}",
                f"{backward[name] / best_backward:.3f}",
                f"{memory[name] / 2**20:.0f}",
                f"{memory[name] / least_memory:.2f}",
                f"{kept[name] / 2**20:.1f}" if kept else "",
                f"{kept[name] / least_kept:.2f}" if kept else "",
                ran,
            ]
        )
    return rows + [["", name, "out of memory", *[""] * 10] for name in too_large]


def fits(function: Callable[[], object]) -> bool:
    """False if a call runs out of memory."""
    try:
        function()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=None, help="measurements per function (CPU 5, GPU 60)")
    parser.add_argument("--shapes", nargs="*", default=None, metavar="NAME", help="only these shapes")
    parser.add_argument("--name", default="attention", help="name of the results file (default: attention)")
    parser.add_argument("--no-naive", action="store_true", help="skip the paper's formula as written")
    parser.add_argument("--no-rivals", action="store_true", help="skip the compiled alternatives (they take minutes)")
    options = parser.parse_args()
    shapes = CPU_SHAPES if options.device == "cpu" else CUDA_SHAPES
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rounds = options.rounds or (5 if options.device == "cpu" else 60)
    rows: list[list[str]] = []
    columns = ["shape", "function", "fwd ms", "TFLOP/s", "x plain", "fwd+bwd ms", "TFLOP/s", "x plain",
               "peak MiB", "x plain", "kept MiB", "x plain", "ran on"]  # fmt: skip
    chosen = [shape for shape in shapes if options.shapes is None or shape.name in options.shapes]
    for shape in chosen:
        rows += measure(shape, options.device, dtype, rounds, not options.no_rivals, not options.no_naive)
        lines = [
            f"Causal, {str(dtype).removeprefix('torch.')}, medians of {rounds} rounds. TFLOP/s counts 2 B H T² D for a "
            "forward and 3.5 times as many with the backward. Peak memory is that of forward and backward without the "
            "inputs; kept memory is held between forward and backward, including the output. Ratios are to the best "
            "plain SDPA backend of the same run.",
            "",
            *table(columns, rows),
        ]
        # Write after each shape, so that an interrupted run keeps its results.
        title = "Attention: time and memory compared with plain SDPA"
        write(options.name, options.device, title, lines, echo=shape is chosen[-1])


if __name__ == "__main__":
    main()
