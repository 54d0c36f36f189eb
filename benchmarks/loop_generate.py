"""Section `generate`: greedy generation of transformers with a static cache, which it compiles on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .loop_models import build_model, free_memory, random_tokens
from .loop_options import Run
from .loop_timing import PLAIN, Case, Function, build, per_second, take_turns, wall_seconds


def generation_builder(run: Run, name: str, batch: int, prompt: int) -> Callable[[], Function]:
    def builder() -> Function:
        model = build_model(run, name).eval()
        tokens = random_tokens(run, batch, prompt)
        settings = {
            "attention_mask": tokens.new_ones(tokens.shape), "max_new_tokens": run.sizes.new_tokens,
            "do_sample": False, "use_cache": True, "cache_implementation": "static",
        }  # fmt: skip

        def generate_all() -> None:
            made = model.generate(tokens, **settings)
            assert made.shape == (batch, prompt + run.sizes.new_tokens)

        return generate_all

    return builder


def generate(run: Run) -> Iterator[Case]:
    for batch, prompt in run.sizes.prompts:
        free_memory(run.device)
        builders = {name: generation_builder(run, name, batch, prompt) for name in (PLAIN, *run.mechanisms)}
        measured = take_turns(build(builders), run.rounds, wall_seconds(run.device, 1))
        tokens = batch * run.sizes.new_tokens
        yield Case(f"generate, static cache, batch {batch}, prompt {prompt}", "tokens/s", per_second(measured, tokens))
