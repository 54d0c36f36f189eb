"""Section `profile`: tables of a training step by operator, by kernel and by Python function, as text files."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Iterator

import torch

from .loop_models import free_memory
from .loop_options import Run
from .loop_timing import PLAIN, WARM_UP, Case, Function, wait
from .loop_train import step_builder
from .results_file import results_folder

STEPS, ROWS = 3, 40


def profile(run: Run) -> Iterator[Case]:
    """Yields the path of every file that it has written."""
    for mode in ("eager", "compiled"):
        for name in (PLAIN, "affine"):
            free_memory(run.device)
            step = step_builder(run, name, run.sizes.batches[0], mode == "compiled")()
            for _ in range(WARM_UP):
                step()
            for kind, text in (("operators", operator_tables(step, run.device)), ("python", python_tables(step))):
                path = results_folder() / f"loop-profile_{mode}_{name}_{kind}.txt"
                path.write_text(f"{STEPS} steps\n{text}\n")
                yield Case(f"profile, {mode}, {kind}", "", {name: path.name})


def operator_tables(step: Function, device: str) -> str:
    """Operators by host time and, on a GPU, kernels by device time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    wait(device)
    with torch_profile(activities=activities) as profiled:
        for _ in range(STEPS):
            step()
        wait(device)
    averages = profiled.key_averages()
    orders = ["self_cpu_time_total"] + ["self_device_time_total"] * on_gpu
    return "\n\n".join(averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=90) for order in orders)


def python_tables(step: Function) -> str:
    """Python functions by host time. The backward runs on this thread, where cProfile sees it."""
    watched, text = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):
        watched.enable()
        for _ in range(STEPS):
            step()
        watched.disable()
    for order in ("tottime", "cumtime"):
        pstats.Stats(watched, stream=text).strip_dirs().sort_stats(order).print_stats(ROWS)
    return text.getvalue()
