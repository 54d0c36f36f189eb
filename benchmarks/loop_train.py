"""Sections `train` and `commit`: training steps of a transformers model against the same model on plain SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from affine_attention import commit_running_alpha

from .loop_models import build_model, compile_layers, free_memory, make_optimizer, random_tokens, training_step
from .loop_options import Run
from .loop_timing import (
    CONTROL,
    PLAIN,
    Case,
    Function,
    build,
    host_seconds,
    per_second,
    scaled,
    take_turns,
    wall_seconds,
)

UNTIMED_STEPS = 2  # at the start of a turn


def step_builder(run: Run, name: str, batch: int, compiled: bool) -> Callable[[], Function]:
    def builder() -> Function:
        model = build_model(run, PLAIN if name == CONTROL else name)
        if compiled:
            compile_layers(model, run.device)
        return training_step(model, random_tokens(run, batch, run.sizes.length), make_optimizer(model))

    return builder


def train(run: Run) -> Iterator[Case]:
    small, large = run.sizes.batches
    for mode, batch, compiled in (("eager", small, False), ("layers compiled", small, True), ("eager", large, False)):
        free_memory(run.device)
        names = (PLAIN, CONTROL, *run.mechanisms) if run.control else (PLAIN, *run.mechanisms)
        builders = {name: step_builder(run, name, batch, compiled) for name in names}
        # A layer that dynamo compiles too often would run in eager mode without an error.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            seconds = wall_seconds(run.device, run.steps, UNTIMED_STEPS, releases=batch == large)
            measured = take_turns(build(builders), run.rounds, seconds)
        tokens = batch * run.sizes.length
        yield Case(f"train, {mode}, {batch} x {run.sizes.length}", "tokens/s", per_second(measured, tokens))


def commit(run: Run) -> Iterator[Case]:
    """A commit uses up what the backward has collected, so a short backward runs before each one."""
    model = build_model(run, "affine")
    tokens = random_tokens(run, 1, 16)
    layers = run.sizes.model["num_hidden_layers"]
    for what, clock in (("host time", host_seconds(run.device, 1)), ("wall clock", wall_seconds(run.device, 1))):

        def seconds(function: Function, clock: Callable[[Function], float] = clock) -> float:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)
            return clock(function)

        measured = take_turns({"affine": lambda: commit_running_alpha(model)}, run.commit_rounds, seconds)
        yield Case(f"commit_running_alpha, {layers} layers, {what}", "ms", scaled(measured, 1e3))
