"""Builds the models of the loop benchmark (a llama of SmolLM2-135M's shape) and their training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import attach, is_attached

from .loop_options import Run
from .loop_timing import PLAIN, Function

LEARNING_RATE = 1e-5  # small: the labels are random, and the weights must stay finite


def build_model(run: Run, name: str) -> Any:
    """The model on transformers' own SDPA attention or, with the same weights, with the mechanism of that name.

    Its weights are random, and it is in training mode.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        **run.sizes.model, "tie_word_embeddings": True, "max_position_embeddings": 2 * run.sizes.length,
        "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa",
    }  # fmt: skip
    with torch.device(run.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model = model.to(run.sizes.dtype).train()
    assert model.config._attn_implementation == "sdpa"
    return model if name == PLAIN else attach(model, Mechanism.named(name, running_alpha_start=0.5))


def compile_layers(model: Any, device: str) -> None:
    """Compiles each decoder layer by itself, in place. On a CPU dynamo traces, but nothing is compiled to C++."""
    backend = "inductor" if device == "cuda" else "eager"
    for layer in model.model.layers:
        layer.compile(dynamic=False, backend=backend)


def random_tokens(run: Run, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, run.sizes.model["vocab_size"], (batch, length), generator=generator).to(run.device)


def make_optimizer(model: Any, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=capturable)


def training_step(
    model: Any, tokens: Tensor, optimizer: torch.optim.Optimizer, forward: Callable[..., Any] | None = None
) -> Function:
    """One step as a user writes it. `forward` stands for the model where it is called through a compiled function."""
    call = model if forward is None else forward
    attached = is_attached(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        call(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        if attached:
            commit_running_alpha(model)

    return step


def free_memory(device: str) -> None:
    """Drops compiled code and cached memory.

    Dynamo compiles a function for a limited number of variants and then runs it in eager mode. It also makes a size
    dynamic when it sees a second value of it.
    """
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
