"""Section `graph`: a whole training step as one CUDA graph, and a model compiled with mode="reduce-overhead"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from .loop_models import build_model, free_memory, make_optimizer, random_tokens, training_step
from .loop_options import Run
from .loop_timing import PLAIN, WARM_UP, Case, Function, build, per_second, take_turns, wall_seconds

DENSE_MASK = "plain, dense mask"


def graph(run: Run) -> Iterator[Case]:
    batch = run.sizes.batches[0]
    names = (PLAIN, *(name for name in run.mechanisms if name != "softmax"))  # whole models compile for minutes
    rows: dict[str, dict[str, Callable[[], Function]]] = {
        "CUDA graph": {name: capture_builder(run, name) for name in (*names, DENSE_MASK)},
        "reduce-overhead": {name: reduce_overhead_builder(run, name) for name in names},
    }
    for mode, builders in rows.items():
        free_memory(run.device)
        what = f"train, {mode}, {batch} x {run.sizes.length}"
        if run.device != "cuda":
            yield Case(what, "tokens/s", dict.fromkeys(builders, "needs a CUDA GPU"))
            continue
        measured = take_turns(build(builders), run.rounds, wall_seconds(run.device, run.steps))
        yield Case(what, "tokens/s", per_second(measured, batch * run.sizes.length))


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Plain causal attention: with no mask, transformers calls SDPA with is_causal=True."""


def masks_of(name: str) -> Any:
    """A context in which the plain model attends without a mask tensor.

    transformers looks for packed documents on the host. It cannot do so while a graph is captured or traced, and then
    builds a dense mask, with which SDPA takes a slower kernel. A user who trains plain attention fast avoids the mask.
    """
    from transformers.models.llama import modeling_llama

    kept = modeling_llama.create_causal_mask
    return patch.object(modeling_llama, "create_causal_mask", no_mask if name == PLAIN else kept)


def capture_builder(run: Run, name: str) -> Callable[[], Function]:
    """The recipe of the PyTorch documentation: warm up on a side stream, drop the gradients, capture, replay."""

    def builder() -> Function:
        model = build_model(run, PLAIN if name == DENSE_MASK else name)
        optimizer = make_optimizer(model, capturable=True)
        step = training_step(model, random_tokens(run, run.sizes.batches[0], run.sizes.length), optimizer)
        captured, side_stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with masks_of(name):
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.current_stream().wait_stream(side_stream)
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(captured, stream=side_stream):
                step()
        check_trains(model, captured.replay)
        # The graph holds addresses only: the step, and with it the model, must live as long.
        return lambda step=step: captured.replay()  # type: ignore[misc]

    return builder


def check_trains(model: Any, step: Function) -> None:
    """Raises unless a step changes the weights and, where there are any, the running averages of alpha."""
    watched = {name: x for name, x in model.state_dict().items() if "q_proj" in name or "running_alpha" in name}
    before = {name: x.clone() for name, x in watched.items()}
    step()
    unchanged = [name for name, x in watched.items() if torch.equal(x, before[name])]
    if unchanged:
        raise RuntimeError(f"the captured step leaves {len(unchanged)} tensors unchanged, {unchanged[0]} first")


def reduce_overhead_builder(run: Run, name: str) -> Callable[[], Function]:
    """Forward and backward replay CUDA graphs; the optimizer and the commit run in eager mode."""

    def builder() -> Function:
        model = build_model(run, name)
        optimizer = make_optimizer(model)
        compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
        tokens = random_tokens(run, run.sizes.batches[0], run.sizes.length)
        step = training_step(model, tokens, optimizer, forward=compiled)

        def one_step() -> None:
            with masks_of(name):
                torch.compiler.cudagraph_mark_step_begin()
                step()
            # Gradients live in memory that the graphs of all models share, so they must not outlast the step.
            optimizer.zero_grad(set_to_none=True)

        return one_step

    return builder
