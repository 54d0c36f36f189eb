"""Measures time and memory of a distillation loss with a large vocabulary, forward and backward.

    python -m benchmarks.distill                      # on a GPU if available, otherwise on the CPU
    python -m benchmarks.distill --device cpu --rounds 5 --shapes cpu-128k cpu-128k-wide

The loss is the forward KL to the full distribution of the teacher, from the last hidden states and the heads of both
models, with gradients for the student's hidden states and head. The plain version materialises all logits. The chunked
losses of Liger and TRL are included if installed. Measurements are interleaved; times are medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_attention.lab.distill import chunks
from affine_attention.lab.distill.chunks import Head, chunked_loss

from .measure import median_seconds, peak_memory
from .results_file import table, write


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    vocabulary: int
    width: int
    teacher_width: int

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens} tokens, V{self.vocabulary}, M{self.width}, teacher M{self.teacher_width}"

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls: the teacher's logits, the student's logits, and two gradients."""
        return 2.0 * self.tokens * self.vocabulary * (3 * self.width + self.teacher_width)


SHAPES = {
    "cpu": (Shape("cpu-128k", 1024, 128256, 512, 512), Shape("cpu-128k-wide", 1024, 128256, 2048, 3072)),
    "cuda": (
        Shape("smollm-16k", 16384, 49152, 768, 576),
        Shape("smollm-32k", 32768, 49152, 768, 576),
        Shape("llama1b-16k", 16384, 128256, 2048, 3072),
    ),
}
DEFAULT = {"cpu": ("cpu-128k",), "cuda": ("smollm-16k", "smollm-32k", "llama1b-16k")}
MATMUL_SLICE = 1024  # of the vocabulary; 1024 to 8192 were tried on a CPU
PLAIN, OURS, MATMULS = "plain, all logits", "ours", "only the four matmuls"


class Bench:
    """The inputs of one shape and the losses to compare."""

    def __init__(self, shape: Shape, device: str):
        torch.manual_seed(0)
        self.device = device
        like = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
        self.hidden = torch.randn(shape.tokens, shape.width, **like).requires_grad_()
        self.weight = (torch.randn(shape.vocabulary, shape.width, **like) * shape.width**-0.5).requires_grad_()
        self.teacher_hidden = torch.randn(shape.tokens, shape.teacher_width, **like)
        self.teacher_weight = torch.randn(shape.vocabulary, shape.teacher_width, **like) * shape.teacher_width**-0.5
        self.labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=device)

    def plain(self) -> Tensor:
        log_q = F.log_softmax((self.hidden @ self.weight.T).float(), -1)
        log_p = F.log_softmax((self.teacher_hidden @ self.teacher_weight.T).float(), -1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    def ours(self) -> Tensor:
        return chunked_loss(
            self.hidden, Head(self.weight), self.labels, self.teacher_hidden, Head(self.teacher_weight)
        ).total_sum

    def ours_without_triton(self) -> Tensor:
        with mock.patch.object(chunks, "find_spec", return_value=None):
            return self.ours()

    def losses(self) -> tuple[dict[str, Callable[[], Tensor]], list[str]]:
        """The losses by name, and the names of those that are not installed."""
        found: dict[str, Callable[[], Tensor]] = {PLAIN: self.plain, OURS: self.ours}
        absent = []
        if self.device == "cuda":
            found["ours, without Triton"] = self.ours_without_triton
        try:
            from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        except ImportError:
            absent.append("Liger")
        else:
            liger = LigerFusedLinearJSDLoss(
                weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=self.device == "cuda", chunk_size=128
            )
            given = (self.hidden, self.weight, self.teacher_hidden, self.teacher_weight, self.labels)
            # Liger returns a mean over tokens, the others a sum.
            found["Liger, LigerFusedLinearJSDLoss"] = lambda: liger(*given) * len(self.labels)
        try:
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
        except ImportError:
            absent.append("TRL")
        else:
            heads = (self.hidden, self.weight, None, self.teacher_hidden, self.teacher_weight, None)
            found["TRL, ChunkedDivergenceFunction"] = lambda: ChunkedDivergenceFunction.apply(*heads, 0.0)[0].sum()
        return found, absent

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Buffers for the gradients of `matmuls`, reused by every call."""
        return torch.empty_like(self.hidden.detach()), torch.empty_like(self.weight.detach())

    @torch.no_grad()
    def matmuls(self) -> tuple[Tensor, Tensor]:
        """The matmuls that every version needs, as fast as possible: a lower bound for the time of a loss.

        They are the logits of both models and two gradients. On the CPU they process all tokens with one slice of the
        vocabulary at a time, so that its weights and logits stay in the cache, and reuse one buffer, because page
        faults take time. A real loss cannot use this order, because its gradient needs the sum over the whole
        vocabulary first. On a GPU the matmuls are not sliced.
        """
        hidden_grad, weight_grad = self.gradients
        hidden_grad.zero_()
        step = MATMUL_SLICE if self.device == "cpu" else len(self.weight)
        buffer = torch.empty(len(self.hidden) * step, dtype=self.hidden.dtype, device=self.device)
        for start in range(0, len(self.weight), step):
            weight, teacher_weight = self.weight[start : start + step], self.teacher_weight[start : start + step]
            logits = buffer[: len(self.hidden) * len(weight)].view(len(self.hidden), len(weight))
            torch.mm(self.teacher_hidden, teacher_weight.T, out=logits)
            torch.mm(self.hidden, weight.T, out=logits)
            hidden_grad.addmm_(logits, weight)
            torch.mm(logits.T, self.hidden, out=weight_grad[start : start + step])
        return hidden_grad, weight_grad

    def with_backward(self, loss: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(loss(), [self.hidden, self.weight])


def check(bench: Bench, losses: dict[str, Callable[[], Tensor]]) -> None:
    """Checks that all losses and gradients agree before they are timed."""
    truth, *true_grads = (loss := bench.plain()).detach(), *torch.autograd.grad(loss, [bench.hidden, bench.weight])
    for name, function in losses.items():
        loss = function()
        grads = torch.autograd.grad(loss, [bench.hidden, bench.weight])
        off = [abs(float(loss.detach() / truth) - 1)]
        off += [
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(grads, true_grads, strict=True)
        ]
        assert max(off) < (1e-3 if bench.device == "cpu" else 2e-2), f"{name} is off by {off}"


def measure(shape: Shape, device: str, rounds: int) -> tuple[list[list[str]], list[str]]:
    """Rows of the table for one shape, and the names of losses that are not installed."""
    bench = Bench(shape, device)
    losses, absent = bench.losses()
    check(bench, losses)
    functions = {name: bench.with_backward(loss) for name, loss in losses.items()}
    memory = {name: peak_memory(function, device) for name, function in functions.items()}
    functions[MATMULS] = bench.matmuls
    seconds = median_seconds(functions, rounds, device)
    rows = []
    for name in functions:
        rows.append(
            [
                str(shape) if not rows else "",
                name,
                f"{seconds[name] * 1e3:.1f}",
                f"{seconds[name] / seconds[PLAIN]:.2f}",
                f"{shape.flops / seconds[name] / 1e12:.3g}",
                f"{memory[name] / 2**20:.0f}" if name in memory else "",
                f"{memory[name] / memory[PLAIN]:.2f}" if name in memory else "",
            ]
        )
    return rows, absent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=None, help="measurements per loss (CPU 5, GPU 20)")
    parser.add_argument("--shapes", nargs="*", default=None, metavar="NAME", help="only these shapes")
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.device == "cpu" else 20)
    wanted = options.shapes or DEFAULT[options.device]
    known = {shape.name: shape for shape in SHAPES[options.device]}
    if unknown := set(wanted) - set(known):
        parser.error(f"--shapes must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    rows: list[list[str]] = []
    for name in wanted:
        found, absent = measure(known[name], options.device, rounds)
        rows += found
        lines = [
            f"Forward KL, forward and backward, {'float32' if options.device == 'cpu' else 'bfloat16'}, medians of "
            f"{rounds} rounds. TFLOP/s counts the four matmuls. Peak memory excludes the inputs and includes the "
            "gradients. The row with only the matmuls reuses its buffers and is a lower bound.",
            "",
            *table(["shape", "loss", "ms", "x plain", "TFLOP/s", "peak MiB", "x plain"], rows),
        ]
        if absent:
            lines += ["", f"Not measured, because not installed: {', '.join(absent)}."]
        title = "Distillation loss: time and memory compared with the plain version"
        write("distill", options.device, title, lines, echo=name == wanted[-1])


if __name__ == "__main__":
    main()
