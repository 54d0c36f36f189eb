"""The options of a run of the loop benchmark and the sizes of what it measures."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CallSize = tuple[int, int, int, int]  # B, H, T, D


@dataclass(frozen=True)
class Sizes:
    """What is smaller in a run that only shows that the benchmark works."""

    model: dict[str, int]
    dtype: torch.dtype
    length: int
    batches: tuple[int, int]  # of the training step that the host limits, and of the one that the GPU limits
    call: CallSize
    small_call: CallSize
    prompts: tuple[tuple[int, int], ...]  # batch and prompt length of each generation
    new_tokens: int


@dataclass(frozen=True)
class Run:
    """What the sections read of the command line."""

    device: str
    sizes: Sizes
    mechanisms: tuple[str, ...]
    rounds: int
    steps: int
    call_rounds: int
    host_calls: int
    commit_rounds: int
    control: bool = False  # train a second plain model


SMOLLM2_135M = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152,
}  # fmt: skip
FULL = Sizes(
    model=SMOLLM2_135M,
    dtype=torch.bfloat16,
    length=2048,
    batches=(8, 32),
    call=(2, 16, 1024, 64),
    small_call=(2, 8, 512, 64),
    prompts=((1, 16), (8, 512)),
    new_tokens=128,
)
TINY = Sizes(
    model=SMOLLM2_135M | {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 96, "vocab_size": 128},
    dtype=torch.float32,
    length=32,
    batches=(1, 2),
    call=(1, 2, 32, 16),
    small_call=(1, 2, 16, 16),
    prompts=((1, 4), (2, 8)),
    new_tokens=4,
)
