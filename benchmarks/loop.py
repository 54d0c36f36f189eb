"""Measures calls, training steps and generation with the host's time included, against plain SDPA in one run.

    python -m benchmarks.loop --write                          # all sections but `profile`
    python -m benchmarks.loop --only host device --quick       # some sections, few rounds
    python -m benchmarks.loop --only generate --prompts 8x512

Variants take turns and numbers are medians; the ratio of a variant is its number over that of `plain` in the same run.
Host time is the time until a call returns to Python, on an idle GPU queue. Training and generation are wall-clock time
that ends when the GPU is idle. `device` is device time alone, with the host ahead, and `counts` counts kernel launches
and Python calls. On a CPU all sizes are tiny: such a run only shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from . import loop_calls, loop_generate, loop_graph, loop_profile, loop_train
from .loop_options import FULL, TINY, Run
from .loop_timing import PLAIN, Case, first_line
from .results_file import table, write

SECTIONS: dict[str, Callable[..., Iterator[Case]]] = {
    "host": loop_calls.host,
    "device": loop_calls.device,
    "train": loop_train.train,
    "generate": loop_generate.generate,
    "commit": loop_train.commit,
    "counts": loop_calls.counts,
    "graph": loop_graph.graph,
    "profile": loop_profile.profile,
}
NOT_BY_DEFAULT = ("profile",)
COLUMNS = ["what", "variant", "measured", "unit", "over plain", "bar", "goal"]
# What a variant has to reach and what it should reach: ratios to plain, or milliseconds for the commit.
TARGETS = {
    ("host time, forward with gradients, B2 H16 T1024 D64", "affine"): ("2.5", "1.5"),
    ("host time, forward + backward, B2 H16 T1024 D64", "affine"): ("1.8", "1.3"),
    ("device time, forward, B2 H8 T512 D64", "affine"): ("1.25", "1.10"),
    ("device time, forward + backward, B2 H8 T512 D64", "affine"): ("1.20", "1.05"),
    ("device time, forward, B2 H16 T1024 D64", "affine"): ("1.25", "1.10"),
    ("device time, forward + backward, B2 H16 T1024 D64", "affine"): ("1.20", "1.05"),
    ("train, eager, 8 x 2048", "affine"): ("0.92", "0.98"),
    ("train, layers compiled, 8 x 2048", "affine"): ("0.95", "0.99"),
    ("train, layers compiled, 8 x 2048", "softmax"): ("0.98", "1.00"),
    ("train, eager, 32 x 2048", "affine"): ("0.98", "1.00"),
    ("train, CUDA graph, 8 x 2048", "affine"): ("0.97", "1.00"),
    ("train, reduce-overhead, 8 x 2048", "affine"): ("0.97", "1.00"),
    ("generate, static cache, batch 1, prompt 16", "affine"): ("0.96", "1.00"),
    ("generate, static cache, batch 8, prompt 512", "affine"): ("0.98", "1.00"),
    ("commit_running_alpha, 30 layers, host time", "affine"): ("0.5 ms", "0.2 ms"),
    ("commit_running_alpha, 30 layers, wall clock", "affine"): ("0.5 ms", "0.2 ms"),
}


def rows_of(case: Case) -> list[list[str]]:
    base = case.measured.get(PLAIN)
    rows = []
    for name, each in case.measured.items():
        if isinstance(each, str):
            shown, ratio = each, ""
        else:
            shown = f"{each:,.0f}" if each >= 1000 or each == int(each) else f"{each:.4g}"
            ratio = f"{each / base:.3f}" if isinstance(base, float) and base else ""
        rows.append([case.what, name, shown, case.unit, ratio, *TARGETS.get((case.what, name), ("", ""))])
    return rows


def measure(run: Run, sections: list[str]) -> Iterator[list[list[str]]]:
    """The rows of every case, as soon as they are measured. A section that raises becomes a row."""
    for section in sections:
        begin = time.perf_counter()
        try:
            for case in SECTIONS[section](run):
                yield rows_of(case)
        except Exception as error:
            traceback.print_exc()
            yield [[section, "", first_line(error), "", "", "", ""]]
        print(f"{section}: {time.perf_counter() - begin:.0f} s", flush=True)


def describe(run: Run, rows: list[list[str]]) -> list[str]:
    return [
        f"Medians of {run.rounds} rounds ({run.call_rounds} for single calls) in which the variants take turns. A "
        f"training time is the wall clock over {run.steps} consecutive steps, a host time the time until a call "
        f"returns, from {run.host_calls} calls on an idle queue. A higher ratio is better for tokens/s, a lower one "
        "for times and counts.",
        "",
        *table(COLUMNS, rows),
    ]


def batch_and_length(text: str) -> tuple[int, int]:
    """The batch and the prompt length in a text like 8x512."""
    batch, length = map(int, text.split("x"))
    return batch, length


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in SECTIONS if name not in NOT_BY_DEFAULT]
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=default, help="run these sections")
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "affine"], help="attached to the models")
    parser.add_argument("--prompts", nargs="+", type=batch_and_length, metavar="BATCHxLENGTH", help="of generate")
    parser.add_argument("--rounds", type=int, default=7, help="turns of training and generation")
    parser.add_argument("--steps", type=int, default=5, help="consecutive training steps of one turn")
    parser.add_argument(
        "--control", action="store_true", help="train a second plain model, to show the noise of a ratio"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of 2 steps, fewer calls")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--name", default="loop", help="first part of the result's file name")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    given = options()
    sizes = FULL if given.device == "cuda" else TINY
    run = Run(
        given.device,
        replace(sizes, prompts=tuple(given.prompts)) if given.prompts else sizes,
        tuple(given.mechanisms),
        rounds=3 if given.quick else given.rounds,
        steps=2 if given.quick else given.steps,
        call_rounds=15 if given.quick else 60,
        host_calls=20 if given.device == "cuda" else 2,
        commit_rounds=5 if given.quick else 20,
        control=given.control,
    )
    rows: list[list[str]] = []
    for each in measure(run, given.only):
        print("\n".join(" | ".join(row) for row in each), flush=True)
        rows += each
        if given.write:  # after every case: a run that is cut short keeps what it has
            title = "What a loop sees, host time included"
            write(given.name, given.device, title, describe(run, rows), echo=False)
    print("\n".join(describe(run, rows)))


if __name__ == "__main__":
    main()
