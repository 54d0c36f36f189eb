"""A plain training loop over micro-batches, whose losses are sums over real tokens."""

from __future__ import annotations

import torch

from affine_attention import commit_running_alpha


def train_on_sums(model, inner, batches, loss_of, *, steps, rate, ranks=1):
    """The loss of each step. `inner` holds the running averages; `loss_of(model, tokens, mask)` sums over tokens."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for tokens, mask in batches:
            loss = loss_of(model, tokens, mask)
            (loss * ranks).backward()  # DDP and FSDP average over ranks, the loss is a sum over tokens
            total += loss.item()
        losses.append(total)
        optimizer.step()
        commit_running_alpha(inner)
    return losses
