"""Section `generate`: greedy generation of transformers with a static cache, which it compiles on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .loop_models import PLAIN, random_tokens, variant
from .loop_timing import Case, Function, build, per_second, take_turns, wall_seconds
from .loop_train import free


def generation_builder(run: Any, name: str, batch: int, prompt: int) -> Callable[[], Function]:
    def builder() -> Function:
        model = variant(run.sizes, run.device, name).eval()
        tokens = random_tokens(run.sizes, batch, prompt, run.device)
        settings = {
            "attention_mask": tokens.new_ones(tokens.shape), "max_new_tokens": run.sizes.new_tokens,
            "do_sample": False, "use_cache": True, "cache_implementation": "static",
        }  # fmt: skip

        def generate() -> None:
            made = model.generate(tokens, **settings)
            assert made.shape == (batch, prompt + run.sizes.new_tokens)

        return generate

    return builder


def generate(run: Any) -> Iterator[Case]:
    for batch, prompt in run.sizes.prompts:
        free(run)  # else dynamo makes the batch size dynamic when it sees a second one
        builders = {name: generation_builder(run, name, batch, prompt) for name in (PLAIN, *run.mechanisms)}
        measured = take_turns(build(builders), run.rounds, wall_seconds(run.device, 1))
        amount = batch * run.sizes.new_tokens
        yield Case(f"generate, static cache, batch {batch}, prompt {prompt}", "tokens/s", per_second(measured, amount))
