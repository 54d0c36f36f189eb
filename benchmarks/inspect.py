"""Measures memory and time of `inspect` for one layer of the 1B student at 32k tokens on the CPU.

    python -m benchmarks.inspect [--length 32768] [--mechanisms softmax affine_gated] [--write]

Each mechanism runs in a new process. Peak memory is the maximum resident set size of that process (ru_maxrss), with
Python, torch, the weights and the model's forward. The target is 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch

from benchmarks.results_file import table, write

BAR = 4 * 2**30
VOCABULARY = 512  # random token ids: the embedding does not affect memory or time of attention
BYTES_PER_PAIR = 32 * 4  # dense fp32 attention maps of 32 heads


def inspect_layer(mechanism: str, length: int, dtype: str) -> dict[str, float]:
    """Inspects a layer in this process; returns bytes of memory and seconds."""
    import resource

    from affine_attention.hf import student
    from affine_attention.lab.inspection.inspect import inspect

    torch.manual_seed(0)
    model = student(
        "llama-3.2-1b", mechanism, num_hidden_layers=1, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None,
        dtype=getattr(torch, dtype),
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (1, length))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = inspect(model, text=ids, sequences=1, length=length)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    assert result["tokens"] == length
    assert result["missing"] == ["there was no tokenizer: the tokens of the maps are shown as their ids"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"before": before, "peak": peak, "seconds": seconds, "cpu_seconds": cpu_seconds}


def in_fresh_process(mechanism: str, length: int, dtype: str) -> dict[str, float]:
    arguments = ["--one", mechanism, "--length", str(length), "--dtype", dtype]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.inspect", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"inspecting {mechanism} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "affine_gated"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--one", metavar="MECHANISM", help="inspect one mechanism in this process, print JSON")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(inspect_layer(given.one, given.length, given.dtype)))
        return
    load = os.getloadavg()[0]
    rows, worst = [], 0.0
    for mechanism in given.mechanisms:
        found = in_fresh_process(mechanism, given.length, given.dtype)
        worst = max(worst, found["peak"])
        gib = [f"{found[name] / 2**30:.2f}" for name in ("before", "peak")]
        rows.append([mechanism, *gib, f"{found['cpu_seconds']:.0f}", f"{found['seconds']:.0f}"])
    verdict = "within" if worst <= BAR else "OVER"
    lines = [
        f"One layer of llama-3.2-1b (H 32, G 8, D 64, M 2048, with its MLP), {given.dtype}, {given.length} tokens, all "
        f"metrics of inspection.json; memory and time include the model's forward. Load average before the run: "
        f"{load:.1f}; on a loaded machine CPU seconds are more reliable than wall seconds.",
        "",
        *table(["mechanism", "RSS with the weights, GiB", "peak, GiB", "inspect, CPU s", "wall s"], rows),
        "",
        f"The largest peak, {worst / 2**30:.2f} GiB, is {verdict} the target of {BAR / 2**30:.0f} GiB. Dense fp32 maps "
        f"of this layer would take {BYTES_PER_PAIR * given.length**2 / 2**30:.0f} GiB.",
    ]
    if given.write:
        write("inspect", "cpu", "Inspecting a layer of the 1B student", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
