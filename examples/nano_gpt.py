"""A GPT in the style of nanoGPT, with Affine-Scaled Attention in place of F.scaled_dot_product_attention.

    python examples/nano_gpt.py [mechanism]      # affine by default; a few seconds on the CPU

The lines marked `# affine` are all that a training script of this kind needs: the module, the call, and the commit of
the running average after each optimizer step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import affine_attention
from affine_attention import AttentionMechanism, Mechanism, commit_running_alpha  # affine

TEXT = Path(affine_attention.__file__).parent / "lab" / "embedded" / "gutenberg_pd_mini.txt"
LENGTH, WIDTH, HEADS, LAYERS, BATCH, STEPS = 64, 64, 4, 2, 16, 20


class CausalSelfAttention(nn.Module):
    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mechanism = AttentionMechanism(mechanism, WIDTH, HEADS, WIDTH // HEADS)  # affine

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = self.mechanism(x, query, key, value, is_causal=True)  # affine: was F.scaled_dot_product_attention(..)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = CausalSelfAttention(mechanism)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(mechanism) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    torch.manual_seed(0)
    mechanism = Mechanism.named(sys.argv[1] if len(sys.argv) > 1 else "affine")
    if mechanism.bias:
        mechanism = Mechanism.named(mechanism.name, bias_length=LENGTH)  # affine: N of Eq. 8, the training length
    model = GPT(mechanism)
    text = torch.tensor(list(TEXT.read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        commit_running_alpha(model)  # affine
        if step in (0, STEPS - 1):
            print(f"step {step + 1}  loss {loss.item():.3f}")
    scale = model.blocks[0].attention.mechanism.scale
    if scale is not None:
        print("running alpha of layer 0:", [round(x, 3) for x in scale.running_alpha.tolist()])


if __name__ == "__main__":
    main()
