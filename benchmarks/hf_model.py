"""Times forward + backward of a 30M llama with a mechanism and of the same model with plain SDPA, in one run.

    python -m benchmarks.hf_model [--mechanisms affine affine_gated] [--batch 2] [--length 512] [--rounds 9] [--write]

The models have the same weights and compute the same loss; runs are interleaved, times are medians. The target for
"affine" is 1.10 times plain SDPA.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch

from affine_attention import Mechanism
from affine_attention.hf import attach, detach, student
from benchmarks.measure import median_seconds
from benchmarks.results_file import table, write

BAR = 1.10


def training_pass(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    return run


def measure(mechanisms: list[str], batch: int, length: int, rounds: int, device: str) -> dict[str, float]:
    """Seconds per step of "plain SDPA" and of every mechanism."""
    torch.manual_seed(0)
    plain = detach(student("llama-30m", "softmax", device=device))
    assert plain.config._attn_implementation == "sdpa"
    tokens = torch.randint(0, plain.config.vocab_size, (batch, length), device=device)
    models = {"plain SDPA": plain}
    for name in mechanisms:
        models[name] = attach(copy.deepcopy(plain), Mechanism.named(name, running_alpha_start=0.5))
    return median_seconds({name: training_pass(model, tokens) for name, model in models.items()}, rounds, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "affine", "affine_gated"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    given = parser.parse_args()
    seconds = measure(given.mechanisms, given.batch, given.length, given.rounds, given.device)
    base = seconds["plain SDPA"]
    rows = [[name, f"{each * 1e3:.1f}", f"{each / base:.3f}"] for name, each in seconds.items()]
    lines = [
        f"llama-30m, batch {given.batch}, {given.length} tokens, median of {given.rounds} interleaved rounds.",
        "",
        *table(["model", "forward + backward, ms", "over plain SDPA"], rows),
    ]
    if "affine" in seconds:
        verdict = "within" if seconds["affine"] <= BAR * base else "OVER"
        lines += ["", f"affine is {verdict} the target of {BAR:.2f}."]
    if given.write:
        write("hf-model", given.device, "An attached model against plain SDPA", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
