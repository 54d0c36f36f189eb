"""Times one layer's mechanism, forward + backward, for every preset and for parts added to affine scaling.

    python -m benchmarks.mechanisms                                        # on a GPU: llama1b-2k and llama3b-8k
    python -m benchmarks.mechanisms --device cpu --rounds 3 --presets affine exclusive

A layer is `AttentionMechanism`: its projections of the hidden states (W_a, W_g, ...) and the operator, with the
gradients of query, key, value, hidden states and parameters. Times are those of the device, with the host ahead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from affine_attention import Mechanism
from affine_attention.nn import AttentionMechanism
from affine_attention.nn.mechanism import PRESETS
from affine_attention.ops.fused.plan import Route

from .attention import CUDA_SHAPES, Shape
from .measure import median_seconds
from .results_file import table, write
from .routes import on_route

SHAPES = {
    "cpu": (Shape("cpu-256", 1, 4, 2, 256, 32),),
    "cuda": tuple(shape for shape in CUDA_SHAPES if shape.name in ("llama1b-2k", "llama3b-8k")),
}
# Parts added to affine scaling, to be compared with affine scaling itself.
ADDED = {"affine + exclusion": {"exclusion": "full"}, "affine + norm of each head": {"head_norm": True}}
ON_FLASH = "softmax, on the flash kernels"  # signed and sigmoid weights run on these kernels


def layers(names: list[str], shape: Shape, device: str, dtype: torch.dtype) -> dict[str, AttentionMechanism]:
    chosen = {name: Mechanism.named(name) for name in names}
    chosen |= {label: replace(Mechanism.named("affine"), **settings) for label, settings in ADDED.items()}
    width = shape.heads * shape.dim
    return {
        label: AttentionMechanism(mechanism, width, shape.heads, shape.dim, device=device, dtype=dtype)
        for label, mechanism in chosen.items()
    }


def measure(shape: Shape, device: str, dtype: torch.dtype, names: list[str], rounds: int) -> list[list[str]]:
    torch.manual_seed(0)
    size = (shape.batch, shape.heads, shape.length, shape.dim)
    of_keys = (shape.batch, shape.groups, shape.length, shape.dim)
    query = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(of_keys, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    width = shape.heads * shape.dim
    hidden = torch.randn(shape.batch, shape.length, width, device=device, dtype=dtype, requires_grad=True)
    grad_out = torch.randn_like(query)
    failed: dict[str, str] = {}
    functions: dict[str, Callable[[], object]] = {}

    def step(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, grad_out, allow_unused=True)

    if device == "cuda":
        given = {"query": query, "key": key, "value": value}
        flash, _ = on_route(given, {"is_causal": True}, lambda call, needs: Route(
            "flash", "flash" if needs else None, "output" if needs else "nothing", "chosen by the benchmark"
        ))  # fmt: skip
        functions[ON_FLASH] = step(flash, [query, key, value])
    for label, layer in layers(names, shape, device, dtype).items():
        leaves = [query, key, value, *([] if layer.is_plain else [hidden]), *layer.parameters()]
        forward = step(lambda layer=layer: layer(hidden, query, key, value, is_causal=True), leaves)  # type: ignore[misc]
        try:
            forward()
        except torch.OutOfMemoryError:
            failed[label] = "out of memory"
            torch.cuda.empty_cache()
        else:
            functions[label] = forward
    seconds = median_seconds(functions, rounds, device)
    rows = []
    for label, each in seconds.items():
        ratios = [f"{each / seconds[base]:.3f}" if base in seconds else "" for base in ("softmax", "affine", ON_FLASH)]
        rows.append(["" if rows else str(shape), label, f"{each * 1e3:.3f}", *ratios])
    return rows + [["", label, why, "", "", ""] for label, why in failed.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=None, help="measurements per mechanism (CPU 5, GPU 30)")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS), metavar="NAME")
    options = parser.parse_args()
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rounds = options.rounds or (5 if options.device == "cpu" else 30)
    names = list(dict.fromkeys(["softmax", "affine", *options.presets]))
    rows: list[list[str]] = []
    chosen = SHAPES[options.device]
    for shape in chosen:
        rows += measure(shape, options.device, dtype, names, rounds)
        lines = [
            f"Causal, {str(dtype).removeprefix('torch.')}, forward + backward, medians of {rounds} rounds, with the "
            "projections of the mechanism. Ratios are to softmax, to affine and to softmax on the flash kernels.",
            "",
            *table(["shape", "mechanism", "ms", "x softmax", "x affine", "x flash softmax"], rows),
        ]
        # Write after each shape, so that an interrupted run keeps its results.
        title = "Mechanisms: time of one layer"
        write("mechanisms", options.device, title, lines, echo=shape is chosen[-1])


if __name__ == "__main__":
    main()
