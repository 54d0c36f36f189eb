"""A small language model built from `SelfAttention`, for the tests of training and distribution."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from affine_attention import Mechanism, SelfAttention

VOCABULARY = 31
# alpha of scores s and a start c, written from the sources that the entries name.
ALPHA_FORMULAS = {
    "linear_clipping": lambda s, c: torch.minimum(torch.maximum(s / 10 + c, torch.zeros(())), torch.ones(())),
    "sigmoid": lambda s, c: c * s.exp() / (1 - c + c * s.exp()),
    "double_sigmoid": lambda s, c: 2 * (c / 2) * s.exp() / (1 - c / 2 + c / 2 * s.exp()),
    "softplus": lambda s, c: torch.log(1 + torch.expm1(torch.tensor(c, dtype=s.dtype)) * s.exp()),
    "per_head": lambda s, c: s,
    "constant": lambda s, c: torch.full_like(s, c),
}


class TinyLM(nn.Module):
    def __init__(self, mechanism: Mechanism | str = "affine", layers: int = 2, reentrant: bool | None = None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(SelfAttention(32, 4, 2, mechanism) for _ in range(layers))
        self.head = nn.Linear(32, VOCABULARY)
        self.reentrant = reentrant  # None: no activation checkpointing

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            if self.reentrant is None:
                hidden = hidden + layer(hidden, mask=mask)
            else:
                hidden = hidden + checkpoint(
                    lambda h, layer=layer: layer(h, mask=mask), hidden, use_reentrant=self.reentrant
                )
        return self.head(hidden)


def summed_loss(model: nn.Module, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy summed over real tokens, so that the losses of micro-batches add up to that of the batch."""
    logits = model(tokens, mask)[:, :-1].flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    return losses.sum() if mask is None else (losses * mask[:, 1:].flatten()).sum()


def make_tokens(batch: int = 8, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def running_alphas(model: nn.Module) -> Tensor:
    return torch.cat([b for name, b in model.named_buffers() if name.endswith("running_alpha")])
