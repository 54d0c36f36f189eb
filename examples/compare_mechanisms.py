"""Trains one small byte-level language model for each mechanism on public-domain prose and compares them.

    python -m examples.compare_mechanisms            # all eight mechanisms, about a minute on two cores
    python -m examples.compare_mechanisms --mechanisms softmax affine --steps 300

Mechanisms start from the same shared weights and see the same batches in the same order. The example shows how to train
with the library in a plain PyTorch loop; it is far too small to rank the mechanisms.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import affine_attention
from affine_attention import Mechanism, SelfAttention, attention_weights, commit_running_alpha
from affine_attention.nn import PRESETS
from affine_attention.nn.rotary import rotate

TEXT = Path(affine_attention.__file__).parent / "lab" / "embedded" / "gutenberg_pd_mini.txt"
LENGTH, WIDTH, LAYERS, HEADS, GROUPS, BATCH = 128, 96, 2, 6, 2, 16


class ByteModel(nn.Module):
    """A two-layer LLaMA-like decoder over bytes."""

    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.attentions = nn.ModuleList(SelfAttention(WIDTH, HEADS, GROUPS, mechanism) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for index in range(LAYERS):
            hidden = hidden + self.attentions[index](self.norms[2 * index](hidden))
            hidden = hidden + self.mlps[index](self.norms[2 * index + 1](hidden))
        return self.norms[-1](hidden) @ self.embed.weight.T


def make_model(mechanism: Mechanism, seed: int) -> ByteModel:
    """Builds a model whose shared weights do not depend on the mechanism, which draws its own weights afterwards."""
    torch.manual_seed(seed)
    shared = ByteModel(Mechanism.named("softmax"))
    model = ByteModel(mechanism)
    model.load_state_dict(shared.state_dict(), strict=False)
    return model


def batches(data: Tensor, steps: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()]).long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(model: ByteModel, data: Tensor, steps: int, seed: int, show: bool) -> float:
    """Trains the model and returns the seconds it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    begin = time.perf_counter()
    for step, rows in enumerate(batches(data, steps, seed)):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / (0.2 * steps))
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        commit_running_alpha(model)  # needed by mechanisms with a running average
        if show:
            done = int(24 * (step + 1) / steps)
            print(f"\r  {'#' * done}{'.' * (24 - done)} loss {loss.item():.3f} ", end="", file=sys.stderr, flush=True)
    if show:
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr, flush=True)
    return time.perf_counter() - begin


@torch.no_grad()
def measure_weights(model: ByteModel, rows: Tensor) -> tuple[float, float, float | None]:
    """Mean row sum of the weights, mean weight on the first token, mean alpha; over layers, heads and queries."""
    model.eval()
    captured: list[tuple[SelfAttention, Tensor]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: captured.append((module, given[0])))
        for layer in model.attentions
    ]
    model(rows)
    for hook in hooks:
        hook.remove()
    sums, first, alphas = [], [], []
    for layer, hidden in captured:
        positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
        query, key = (
            rotate(proj(hidden).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2), positions, layer.rope_theta)
            for proj in (layer.q_proj, layer.k_proj)
        )
        given = layer.mechanism.coefficients(hidden, query, key, is_causal=True)
        weights = attention_weights(query, key, alpha=given.alpha, beta=given.beta, sink=given.sink, is_causal=True)
        sums.append(weights.sum(-1).mean())
        first.append(weights[:, :, 1:, 0].mean())
        if given.alpha is not None:
            alphas.append(given.alpha.mean())
    model.train()

    def mean(values: list[Tensor]) -> float:
        return torch.stack(values).mean().item()

    return mean(sums), mean(first), mean(alphas) if alphas else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=list(PRESETS), metavar="NAME", help="default: all eight")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, default=TEXT, help="a UTF-8 text file (default: the embedded prose)")
    options = parser.parse_args()
    mechanisms = [Mechanism.named(name, bias_length=LENGTH) for name in options.mechanisms]

    data = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    cut = int(0.95 * len(data))
    held_out = torch.cat(list(batches(data[cut:], 8, seed=1)))
    print(f"{LAYERS} layers, width {WIDTH}, {HEADS}/{GROUPS} heads, {options.steps} steps of {BATCH} x {LENGTH} bytes;")
    print(f"{len(data):,} bytes of text, the last 5 % held out; seed {options.seed}.\n")
    print(f"{'mechanism':<16}{'+params':>9}{'held-out':>10}{'bits/byte':>11}{'row sum':>9}{'1st key':>9}", end="")
    print(f"{'alpha':>7}{'seconds':>9}")
    for mechanism in mechanisms:
        model = make_model(mechanism, options.seed)
        seconds = train(model, data[:cut], options.steps, options.seed, show=sys.stderr.isatty())
        with torch.no_grad():
            loss = loss_of(model.eval(), held_out).item()
        row_sum, first, alpha = measure_weights(model, held_out[:8, :-1])
        added = LAYERS * mechanism.extra_parameters(WIDTH, HEADS, WIDTH // HEADS)
        alpha_text = "-" if alpha is None else f"{alpha:.3f}"
        print(f"{mechanism.name:<16}{added:>9,}{loss:>10.4f}{loss / math.log(2):>11.4f}", end="")
        print(f"{row_sum:>9.3f}{first:>9.4f}{alpha_text:>7}{seconds:>9.1f}", flush=True)
    print("\nheld-out: cross-entropy in nats; row sum: mean sum of a row of attention weights; 1st key: mean weight")
    print("on the first token, without the first query. One seed and a tiny model: this does not rank mechanisms.")


if __name__ == "__main__":
    main()
