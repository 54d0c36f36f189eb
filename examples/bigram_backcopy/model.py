"""The small transformer of Guo et al. with any mechanism in its attention, and its training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from affine_attention import Mechanism, SelfAttention, commit_running_alpha

from .task import Task


@dataclass(frozen=True)
class Setting:
    """The sizes of the model and of its training."""

    layers: int = 3
    width: int = 64
    length: int = 64
    batch: int = 32
    steps: int = 2000
    learning_rate: float = 1e-3
    warmup: int = 50

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); one head, ReLU, no biases."""

    def __init__(self, width: int, mechanism: Mechanism):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, 1, mechanism=mechanism, rope_theta=None)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), mask=mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Transformer(nn.Module):
    """Token and learned position embeddings, blocks, a norm and an output layer that is not tied."""

    def __init__(self, vocabulary_size: int, setting: Setting, mechanism: Mechanism):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, setting.width)
        self.positions = nn.Embedding(setting.length, setting.width)
        self.blocks = nn.ModuleList(Block(setting.width, mechanism) for _ in range(setting.layers))
        self.norm = nn.LayerNorm(setting.width)
        self.output = nn.Linear(setting.width, vocabulary_size, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.output(self.norm(hidden))


def make_model(task: Task, setting: Setting, mechanism: str, seed: int) -> Transformer:
    """A model whose shared weights depend on the seed only; the mechanism draws its own weights afterwards."""
    torch.manual_seed(seed)
    shared = Transformer(task.vocabulary_size, setting, Mechanism.named("softmax"))
    chosen = Mechanism.named(mechanism)
    if isinstance(chosen.bias_length, int):  # N of Eq. 8 is the training length, as in the recipes
        chosen = Mechanism.named(mechanism, bias_length=setting.length)
    model = Transformer(task.vocabulary_size, setting, chosen)
    model.load_state_dict(shared.state_dict(), strict=False)
    return model


def token_losses(model: Transformer, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The loss of every label [N, T]."""
    logits = model(tokens[:, :-1], mask)
    return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def train(
    model: Transformer, data: Tensor, setting: Setting, on_step: Callable[[int, float], None] | None = None
) -> None:
    """AdamW with the authors' constants; linear warm-up, then a constant rate; `data` has batch * steps rows."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=True
    )
    for step, rows in enumerate(data.split(setting.batch), start=1):
        optimizer.param_groups[0]["lr"] = setting.learning_rate * min(1.0, step / max(setting.warmup, 1))
        optimizer.zero_grad()
        loss = token_losses(model, rows).mean()
        loss.backward()
        optimizer.step()
        commit_running_alpha(model)  # updates the running average of the mechanisms that have one
        if on_step is not None:
            on_step(step, loss.item())
