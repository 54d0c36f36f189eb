"""Sections `train`, `commit` and `profile`: training steps of a transformers model beside plain SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from affine_attention import commit_running_alpha

from .loop_models import PLAIN, compile_layers, make_optimizer, random_tokens, training_step, variant
from .loop_timing import Case, Function, build, host_seconds, per_second, scaled, take_turns, wait, wall_seconds
from .results_file import results_folder

PROFILED_STEPS, PROFILE_ROWS = 3, 40


def step_builder(run: Any, name: str, batch: int, compiled: bool) -> Callable[[], Function]:
    def builder() -> Function:
        model = variant(run.sizes, run.device, name)
        if compiled:
            compile_layers(model, run.device)
        tokens = random_tokens(run.sizes, batch, run.sizes.length, run.device)
        return training_step(model, tokens, make_optimizer(model))

    return builder


def free(run: Any) -> None:
    """Drops compiled code and cached memory: dynamo compiles only a few variants of one function, then runs eager."""
    torch._dynamo.reset()
    if run.device == "cuda":
        torch.cuda.empty_cache()


def train(run: Any) -> Iterator[Case]:
    small, large = run.sizes.batches
    for mode, batch, compiled in (("eager", small, False), ("layers compiled", small, True), ("eager", large, False)):
        free(run)
        steps = build({name: step_builder(run, name, batch, compiled) for name in (PLAIN, *run.mechanisms)})
        measured = take_turns(steps, run.rounds, wall_seconds(run.device, run.steps))
        tokens = batch * run.sizes.length
        yield Case(f"train, {mode}, {batch} x {run.sizes.length}", "tokens/s", per_second(measured, tokens))


def commit(run: Any) -> Iterator[Case]:
    """Each commit uses up what a backward has collected, so each one follows a backward of its own."""
    model = variant(run.sizes, run.device, "affine")
    tokens = random_tokens(run.sizes, 1, 16, run.device)
    function = {"affine": lambda: commit_running_alpha(model)}
    layers = run.sizes.model["num_hidden_layers"]
    for what, clock in (("host", host_seconds(run.device, 1)), ("wall", wall_seconds(run.device, 1))):

        def seconds(function: Function, clock: Callable[[Function], float] = clock) -> float:
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad(set_to_none=True)
            return clock(function)

        measured = take_turns(function, run.commit_rounds, seconds)
        yield Case(f"commit_running_alpha, {layers} layers, {what}", "ms", scaled(measured, 1e3))


def profile(run: Any) -> Iterator[Case]:
    """Writes tables of the step's operators, by host and by device time, and of its Python functions, as text."""
    batch = run.sizes.batches[0]
    for mode in ("eager", "compiled"):
        for name in (PLAIN, "affine"):
            free(run)
            step = step_builder(run, name, batch, mode == "compiled")()
            for _ in range(3):
                step()
            for kind, text in (("torch", torch_tables(step, run.device)), ("python", python_table(step))):
                path = results_folder() / f"loop-profile_{mode}_{name}_{kind}.txt"
                path.write_text(text)
                print(f"written to {path}", flush=True)
    yield from ()


def torch_tables(step: Function, device: str) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    wait(device)
    with torch_profile(activities=activities) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
        wait(device)
    keys = ["self_cpu_time_total", *(["self_device_time_total"] if device == "cuda" else [])]
    averages = profiled.key_averages()
    tables = [averages.table(sort_by=key, row_limit=PROFILE_ROWS, max_name_column_width=90) for key in keys]
    return f"{PROFILED_STEPS} steps\n" + "\n\n".join(tables) + "\n"


def python_table(step: Function) -> str:
    """Host time by Python function. The backward runs on this thread, where cProfile sees it."""
    import cProfile
    import io
    import pstats

    watched, text = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):
        watched.enable()
        for _ in range(PROFILED_STEPS):
            step()
        watched.disable()
    for order in ("tottime", "cumtime"):
        pstats.Stats(watched, stream=text).strip_dirs().sort_stats(order).print_stats(PROFILE_ROWS)
    return f"{PROFILED_STEPS} steps\n{text.getvalue()}"
