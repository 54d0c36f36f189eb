"""Compares affine attention with plain attention where it is not plain causal: documents, windows, padding, head dims.

    python -m benchmarks.ranges                                      # on a GPU: FlexAttention and cuDNN beside ours
    python -m benchmarks.ranges --cases packed-8k window-8k --device cpu --rounds 3

Each row is one case. Plain attention is softmax without alpha and beta, with the same visibility: compiled
FlexAttention, or cuDNN's plain causal attention for padding (which a user who ignores it would run) and for head dims.
On a CPU it is SDPA with a dense mask. Our call is compared with `composed` before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from affine_attention import attention, explain

from .measure import median_seconds
from .results_file import table, write

DOCUMENT = 700  # mean length of a document, drawn evenly from 1 to twice this
MAX_ERROR = 0.02  # relative L2 difference to `composed` above which a route is reported as wrong


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    dim: int
    documents: bool = False
    padded: bool = False
    window: int | None = None
    against: str = "flex"  # or "causal": cuDNN's plain causal attention

    def __str__(self) -> str:
        length = f"T{self.queries}" if self.queries == self.keys else f"T{self.queries} S{self.keys}"
        return f"{self.name}: B{self.batch} H{self.heads}/{self.groups} {length} D{self.dim}"


CASES = (
    Case("packed-8k", 2, 24, 8, 8192, 8192, 128, documents=True),
    Case("packed-2k", 8, 32, 8, 2048, 2048, 64, documents=True),
    Case("window-8k-64", 2, 32, 8, 8192, 8192, 64, window=1024),
    Case("window-8k-128", 2, 24, 8, 8192, 8192, 128, window=1024),
    Case("padding-2k", 16, 16, 16, 2048, 2048, 64, padded=True, against="causal"),
    Case("chunk-8k", 2, 24, 8, 2048, 8192, 128),
    Case("dim80-2k", 8, 32, 8, 2048, 2048, 80, against="causal"),
    Case("dim96-4k", 4, 32, 8, 4096, 4096, 96, against="causal"),
    Case("dim256-4k", 4, 16, 4, 4096, 4096, 256, against="causal"),
)


def scaled_down(case: Case) -> Case:
    """The case in the size of a CPU."""
    window = None if case.window is None else case.window // 16
    small = {"batch": 1, "heads": 4, "groups": case.groups * 4 // case.heads, "dim": min(case.dim, 64)}
    return replace(case, **small, queries=case.queries // 16, keys=case.keys // 16, window=window)


class Bench:
    """The inputs of one case, and the functions to compare."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype):
        self.case, self.device = case, device
        self.ids: Tensor | None = None  # of documents, [B, S]
        draw = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        rows = (case.batch, case.heads, case.queries)
        of_keys = (case.batch, case.groups, case.keys, case.dim)
        alpha = torch.rand(rows, device=device)
        self.given: dict[str, Tensor] = {
            "query": torch.randn(*rows, case.dim, device=device, dtype=dtype),
            "key": torch.randn(of_keys, device=device, dtype=dtype),
            "value": torch.randn(of_keys, device=device, dtype=dtype),
            "alpha": alpha,
            "beta": (0.5 - alpha) / case.keys,
        }
        for x in self.given.values():
            x.requires_grad_()
        self.grad_out = torch.randn(*rows, case.dim, device=device, dtype=dtype)
        self.visible: dict[str, Any] = {"is_causal": True, "window": case.window}
        if case.documents:
            ids = torch.stack([_documents(case.keys, draw) for _ in range(case.batch)])
            self.ids = ids.to(device)
            self.visible["segment_ids"] = (self.ids[:, case.keys - case.queries :], self.ids)
        if case.padded:
            lengths = torch.randint(case.keys // 2, case.keys + 1, (case.batch, 1), generator=draw)
            self.visible["mask"] = (torch.arange(case.keys) < lengths).to(device)

    def ours(self, impl: str = "auto") -> Callable[[], Tensor]:
        return lambda: attention(**self.given, **self.visible, nonnegative_alpha=True, impl=impl)

    def plain(self) -> Callable[[], Tensor]:
        query, key, value = (self.given[name] for name in ("query", "key", "value"))
        if self.device == "cpu":
            seen = self._dense()
            return lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        if self.case.against == "causal":

            def causal() -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

            return causal
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # otherwise later cases exceed dynamo's recompile limit and silently run uncompiled
        batch = None if self.ids is None else self.case.batch
        size = (self.case.queries, self.case.keys)
        seen = create_block_mask(self._sees(), batch, None, *size, device=self.device)
        compiled = torch.compile(flex_attention)
        return lambda: compiled(query, key, value, block_mask=seen, enable_gqa=True)

    def _sees(self) -> Callable[..., Tensor]:
        """FlexAttention's mask function."""
        offset, window, ids = self.case.keys - self.case.queries, self.case.window, self.ids

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            found = i + offset >= j
            if window is not None:
                found = found & (i + offset - j < window)
            if ids is not None:
                found = found & (ids[b, i + offset] == ids[b, j])
            return found

        return sees

    def _dense(self) -> Tensor:
        b = torch.arange(self.case.batch)[:, None, None, None]
        i, j = torch.arange(self.case.queries)[:, None], torch.arange(self.case.keys)
        return self._sees()(b, None, i, j).expand(self.case.batch, 1, self.case.queries, self.case.keys)

    def with_backward(self, forward: Callable[[], Tensor]) -> Callable[[], tuple[Tensor | None, ...]]:
        leaves = list(self.given.values())
        return lambda: torch.autograd.grad(forward(), leaves, self.grad_out, allow_unused=True)


def _documents(length: int, draw: torch.Generator) -> Tensor:
    """Ids of documents, in order, for one packed sequence."""
    lengths = torch.randint(1, 2 * DOCUMENT, (length,), generator=draw).cumsum(0)
    return torch.searchsorted(lengths, torch.arange(length), right=True)


def difference(bench: Bench, forward: Callable[[], Tensor]) -> float:
    """The largest relative L2 difference of the output and the gradients to `composed`."""
    composed = bench.ours(impl="composed")
    with torch.no_grad():
        pairs: list[tuple[Any, Any]] = [(forward(), composed())]
    pairs += zip(bench.with_backward(forward)(), bench.with_backward(composed)(), strict=True)
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs)


def measure(case: Case, device: str, dtype: torch.dtype, rounds: int) -> list[list[str]]:
    bench = Bench(case, device, dtype)
    name = "plain, dense mask" if device == "cpu" else "plain causal, cuDNN" if case.against == "causal" else (
        "plain, FlexAttention")  # fmt: skip
    kernels = str(explain(**bench.given, **bench.visible, nonnegative_alpha=True)).split(":")[0]
    wrong = difference(bench, bench.ours())
    notes = {name: "", "affine": kernels + (f"; WRONG by {wrong:.2g}" if not wrong <= MAX_ERROR else "")}
    functions = {name: bench.plain(), "affine": bench.ours()}

    def without_graph(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with torch.no_grad():
                return function()

        return call

    forward = median_seconds({n: without_graph(f) for n, f in functions.items()}, rounds, device)
    both = median_seconds({n: bench.with_backward(f) for n, f in functions.items()}, rounds, device)
    return [
        [
            str(case) if label == name else "", label, f"{forward[label] * 1e3:.3f}",
            f"{forward[label] / forward[name]:.3f}", f"{both[label] * 1e3:.3f}",
            f"{both[label] / both[name]:.3f}", notes[label],
        ]
        for label in functions
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=None, help="measurements per function (CPU 5, GPU 60)")
    parser.add_argument("--cases", nargs="+", default=None, metavar="NAME", help="only these cases")
    options = parser.parse_args()
    names = [case.name for case in CASES]
    unknown = [name for name in options.cases or () if name not in names]
    if unknown:
        parser.error(f"--cases must be among {', '.join(names)}, got {', '.join(unknown)}")
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rounds = options.rounds or (5 if options.device == "cpu" else 60)
    rows: list[list[str]] = []
    chosen = [case for case in CASES if options.cases is None or case.name in options.cases]
    for case in chosen:
        rows += measure(case if options.device == "cuda" else scaled_down(case), options.device, dtype, rounds)
        lines = [
            f"{str(dtype).removeprefix('torch.')}, medians of {rounds} rounds. Ratios are to the first row of a case. "
            f"Documents have {DOCUMENT} tokens on average; padded sequences have half of their tokens or more.",
            "",
            *table(["case", "function", "fwd ms", "x plain", "fwd+bwd ms", "x plain", "ran on"], rows),
        ]
        # Write after each case, so that an interrupted run keeps its results.
        title = "Documents, windows, padding and head dims compared with plain attention"
        write("ranges", options.device, title, lines, echo=case is chosen[-1])


if __name__ == "__main__":
    main()
