"""Builds the models of the loop benchmark (a llama of SmolLM2-135M's shape) and their training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import attach, is_attached

PLAIN = "plain"
LEARNING_RATE = 1e-5  # small: random tokens must not drive the weights to infinity


@dataclass(frozen=True)
class Sizes:
    """Everything that is smaller in a run that only checks that the benchmark works."""

    model: dict[str, int]
    dtype: torch.dtype
    length: int
    batches: tuple[int, int]  # of the training step that the host limits, and of the one that the GPU limits
    call: tuple[int, int, int, int]  # B, H, T, D of the call whose host time is measured
    small_call: tuple[int, int, int, int]
    prompts: tuple[tuple[int, int], ...]  # batch and prompt length of each generation
    new_tokens: int


SMOL = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152,
}  # fmt: skip
FULL = Sizes(
    SMOL, torch.bfloat16, 2048, (8, 32), (2, 16, 1024, 64), (2, 8, 512, 64), prompts=((1, 16), (8, 512)), new_tokens=128
)
TINY = Sizes(
    {name: size for name, size in SMOL.items() if "heads" in name}
    | {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 96, "vocab_size": 128},
    torch.float32, 32, (1, 2), (1, 2, 32, 16), (1, 2, 16, 16), prompts=((1, 4), (2, 8)), new_tokens=4,
)  # fmt: skip


def plain_model(sizes: Sizes, device: str) -> Any:
    """The model on transformers' own SDPA attention, with random weights, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes.model, tie_word_embeddings=True, max_position_embeddings=2 * sizes.length, use_cache=False,
        bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device=device, dtype=sizes.dtype)
    assert model.config._attn_implementation == "sdpa"
    return model.train()


def variant(sizes: Sizes, device: str, name: str) -> Any:
    """The plain model, or the same weights with a mechanism attached."""
    model = plain_model(sizes, device)
    return model if name == PLAIN else attach(model, Mechanism.named(name, running_alpha_start=0.5))


def compile_layers(model: nn.Module, device: str) -> nn.Module:
    backend = "inductor" if device == "cuda" else "eager"  # C++ compilation takes a minute and says nothing here
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=False, backend=backend)
    return model


def random_tokens(sizes: Sizes, batch: int, length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, sizes.model["vocab_size"], (batch, length), generator=generator).to(device)


def make_optimizer(model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=capturable)


def training_step(
    model: nn.Module, tokens: Tensor, optimizer: torch.optim.Optimizer, call: Callable[..., Any] | None = None
) -> Callable[[], None]:
    """One step as a user writes it. `call` is the compiled forward, if there is one."""
    forward = call or model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        if is_attached(model):
            commit_running_alpha(model)

    return step
