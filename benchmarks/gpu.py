"""Runs everything that needs a GPU, step by step within a time limit: tests first, then benchmarks.

    python -m benchmarks.gpu OUT --minutes 9          # goes on with what is missing when called again
    python -m benchmarks.gpu OUT --workers 8          # tests in 8 processes, which need pytest-xdist
    python -m benchmarks.gpu OUT --list               # the steps and their state
    python -m benchmarks.gpu OUT --only ranges loop

OUT receives the log of each step, the results of the benchmarks and state.json. A step that is interrupted by the limit
runs again in the next call; one that failed does not, unless it is named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    name: str
    arguments: tuple[str, ...]  # of python -m
    minutes: float  # at most


def _tests(name: str, minutes: float, *paths: str) -> Step:
    return Step(f"tests-{name}", ("pytest", "-q", "-p", "no:cacheprovider", *paths), minutes)


# Kernels that are the default somewhere come first, then the training loop, then kernels that are switched off.
STEPS = (
    _tests("flash", 3, "tests/ops/fused/flash/test_kernels.py", "tests/ops/fused/flash/test_weights.py",
           "tests/ops/fused/flash/test_flash.py", "tests/ops/fused/shared"),
    _tests("operator", 3, "tests/ops/test_varlen.py", "tests/ops/test_extremes.py", "tests/ops/fused/test_finish.py",
           "tests/ops/fused/decode", "tests/ops/fused/test_coefficients.py", "tests/ops/test_sdpa.py"),
    _tests("hopper", 3, "tests/ops/fused/hopper/test_backward.py", "tests/ops/fused/hopper/test_forward.py",
           "tests/ops/fused/cudnn", "tests/ops/fused/test_projected.py", "tests/ops/fused/test_projection.py"),
    Step("train", ("benchmarks.loop", "--only", "train", "--name", "loop-train", "--write"), 3),
    Step("loop", ("benchmarks.loop", "--only", "host", "device", "commit", "generate", "--write"), 4),
    _tests("models", 4, "tests/hf/test_graphs.py", "tests/nn/test_gpu.py", "tests/hf/test_paged.py"),
    _tests("gluon", 4, "tests/ops/fused/hopper/test_gluon_forward.py",
           "tests/ops/fused/hopper/test_ranges.py"),
    Step("ranges", ("benchmarks.ranges",), 5),
    Step("mechanisms", ("benchmarks.mechanisms",), 3),
    Step("accelerate", ("benchmarks.accelerate", "--write"), 2),
    Step("serving", ("benchmarks.serving", "--write"), 4),
    Step("attention", ("benchmarks.attention", "--no-naive", "--no-rivals"), 3),
    Step("worst-row", ("benchmarks.worst_row",), 5),
    Step("accuracy", ("benchmarks.accuracy", "--device", "cuda", "--workers", "8"), 6),
    Step("decode", ("benchmarks.decode",), 3),
    Step("sanitize", ("tests.ops.fused.sanitize", "--tools", "memcheck", "racecheck", "initcheck"), 9),
)  # fmt: skip
PASSED, FAILED, INTERRUPTED = "passed", "failed", "interrupted"


def read_state(out: Path) -> dict[str, dict[str, object]]:
    file = out / "state.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def run(out: Path, steps: Sequence[Step], minutes: float, workers: int = 0) -> dict[str, dict[str, object]]:
    """Runs the steps in order until the time is used up; returns the state of all steps that have run."""
    out.mkdir(parents=True, exist_ok=True)
    state, end = read_state(out), time.monotonic() + 60 * minutes
    environment = os.environ | {"AFFINE_RESULTS": str((out / "results").resolve()), "PYTHONUNBUFFERED": "1"}
    for step in steps:
        left = end - time.monotonic()
        if left < 20:
            break
        begin = time.monotonic()
        processes = ("-n", str(workers)) if workers and step.arguments[0] == "pytest" else ()
        code = _call([sys.executable, "-m", *step.arguments, *processes], environment, out / f"{step.name}.log",
                     min(left, 60 * step.minutes))  # fmt: skip
        seconds = round(time.monotonic() - begin, 1)
        outcome = PASSED if code == 0 else FAILED if code is not None or 60 * step.minutes <= left else INTERRUPTED
        state[step.name] = {"outcome": outcome, "seconds": seconds}
        (out / "state.json").write_text(json.dumps(state, indent=1))
        print(f"{step.name:<16} {outcome} after {seconds:g} s", flush=True)
    return state


def _call(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """The exit status; None if the command ran out of time. Its processes are stopped as a group."""
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many minutes (default 60)")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"run these: {', '.join(names)}")
    parser.add_argument("--workers", type=int, default=0, help="processes of a step of tests; 0: one, without xdist")
    parser.add_argument("--list", action="store_true", help="print the steps and their state, and stop")
    given = parser.parse_args()
    state = read_state(given.out)
    if given.list:
        for step in STEPS:
            print(
                f"{step.name:<16} {state.get(step.name, {}).get('outcome', 'not run'):<12} up to {step.minutes:g} min"
            )
        return
    again = [step for step in STEPS if step.name in given.only] if given.only else [
        step for step in STEPS if state.get(step.name, {}).get("outcome") not in (PASSED, FAILED)
    ]  # fmt: skip
    state = run(given.out, again, given.minutes, given.workers)
    failed = [name for name, each in state.items() if each["outcome"] == FAILED]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see {given.out}/STEP.log")


if __name__ == "__main__":
    main()
