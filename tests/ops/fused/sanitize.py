"""Runs the fused kernels over many small cases, forward and backward, under NVIDIA's compute-sanitizer.

    make sanitize        # = --tools memcheck racecheck initcheck; needs a GPU and compute-sanitizer
    python -m tests.ops.fused.sanitize --tools initcheck --processes 13

Without PyTorch's caching allocator every tensor has its own allocation, so that out-of-bounds reads and reads of
uninitialised memory are detected. Prints the number of cases and the reports of each tool. racecheck and initcheck also
report accesses inside cuDNN's kernels, and racecheck those by which Triton's compiler hands work to the warps of
`gl.warp_specialize` (a word in shared memory before and after a barrier): all other reports are failures. --check
compares the results without a sanitizer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace

import torch
import triton
import triton.language as tl

from affine_attention import attention, decode_attention
from affine_attention.ops.api import forget_plans
from affine_attention.ops.fused import plan as planning
from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratios, grid_cases, make_inputs, run

NOT_SERVED = ("mask", "head_mask")
LARGE = planning.LARGE
LONGEST = 100  # instead of 1000: a sanitizer slows kernels down by a factor of hundreds


def cases() -> list[Case]:
    """Cases of the grid that the fused kernels support, with lengths that are feasible under a sanitizer."""
    chosen = []
    for case in grid_cases(150, device="cuda"):
        if any(kind in NOT_SERVED for kind in case.visibility.split("+")):
            continue
        length = LONGEST if case.queries > 500 else case.queries
        chosen.append(replace(case, queries=length, keys=length))
    return chosen


def decode(case: Case) -> None:
    """Two queries against the keys of a case: dense, with lengths, and gathered from pages of two sizes."""
    inputs = make_inputs(replace(case, visibility="full", layout="plain", queries=2))
    given = {name: x for name, x in inputs.tensors.items() if x is not None}
    with torch.no_grad():
        attention(**given, is_causal=True, impl="fused")
        lengths = torch.full((case.batch,), case.keys - 1, dtype=torch.int32, device="cuda")
        decode_attention(**given, lengths=lengths)
        for page_size in (16, 64):
            pages = -(-case.keys // page_size)
            rows = {"key": given["key"], "value": given["value"]}
            for name, x in rows.items():
                x = torch.nn.functional.pad(x, (0, 0, 0, pages * page_size - case.keys))
                rows[name] = x[0].transpose(0, 1).reshape(pages, page_size, *x.shape[1::2])
            table = torch.arange(pages, dtype=torch.int32, device="cuda").expand(case.batch, -1)
            decode_attention(**given | rows, lengths=lengths, block_table=table)


def show_unseen_writes() -> None:
    """Makes initcheck aware of writes that it does not detect: those of cuDNN and of TMA.

    Copies replace cuDNN's results. The tool then reports the kernel that copies, which is named after cuDNN, and reads
    of cuDNN's own kernels; a report in another kernel is an error. The gradients that TMA writes start as NaN;
    hopper/test_backward.py checks that all of each is overwritten.
    """
    from affine_attention.ops.fused.cudnn import backward as cudnn_backward
    from affine_attention.ops.fused.cudnn import forward as cudnn_forward
    from affine_attention.ops.fused.hopper import backward as hopper_backward

    hopper_backward.like = lambda spec: lambda: torch.full(spec.shape, float("nan"), dtype=spec.dtype, device="cuda")

    for module, name in ((cudnn_forward, "attend"), (cudnn_backward, "attend_backward")):
        inner = getattr(module, name)
        setattr(module, name, lambda *args, inner=inner: tuple(copy_of(x) for x in inner(*args)))


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """A copy made by a named kernel, so that a sanitizer reports its reads under that name; `clone` is not a kernel."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    assert copy.untyped_storage().nbytes() == x.nbytes, f"gaps in {tuple(x.shape)}, strides {x.stride()}"
    _copy_cudnns_result[(triton.cdiv(x.numel(), 1024),)](x, copy, x.numel(), BLOCK=1024)
    return copy


@triton.jit
def _copy_cudnns_result(x, copy, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(copy + offsets, tl.load(x + offsets, mask=offsets < count), mask=offsets < count)


def reported_kernels(output: str) -> Counter[str]:
    """The number of reports per kernel in the output of a sanitizer."""
    found: Counter[str] = Counter()
    for line in output.splitlines():
        if line.startswith("=========") and (place := re.search(r"\bat (?!0x)(.+?)(\+0x[0-9a-f]+.*)?$", line)):
            is_hand_over = " access at " in line and any(f" in {there}" in line for there in hand_over_places())
            found["hand-over of warps" if is_hand_over else place[1].strip()] += 1
    return found


def is_cudnns(kernel: str) -> bool:
    return "cudnn" in kernel


@functools.cache
def hand_over_places() -> tuple[str, str]:
    """Source lines of the hand-over to the warps: the definition of the kernel and its call of warp_specialize."""
    from affine_attention.ops.fused.hopper.backward_kernels import gradients_kernel

    lines, first = inspect.getsourcelines(gradients_kernel.fn)
    found = [number for number, line in enumerate(lines, first) if line.startswith(("def ", "    gl.warp_specialize("))]
    file = os.path.basename(inspect.getsourcefile(gradients_kernel.fn) or "")
    return f"{file}:{found[0]}", f"{file}:{found[1]}"


def sanitize(tool: str, processes: int) -> bool:
    """Runs the cases under one tool, in several processes; True if all reports are inside cuDNN."""
    command = ["compute-sanitizer", "--tool", tool, "--show-backtrace", "no", "--print-limit", "1000000"]
    command += [sys.executable, "-W", "ignore", "-m", "tests.ops.fused.sanitize"]
    command += ["--initcheck"] if tool == "initcheck" else []
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with contextlib.ExitStack() as stack:  # files instead of pipes, because a full pipe blocks its process
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)]
        running = [
            subprocess.Popen([*command, "--part", f"{part}/{processes}"], env=environment, stdout=file, stderr=file)
            for part, file in enumerate(files)
        ]
        outputs = []
        for process, file in zip(running, files, strict=True):
            process.wait()
            file.seek(0)
            outputs.append(file.read())
    kernels = sum((reported_kernels(output) for output in outputs), Counter[str]())
    ran = sum(int(cases[1]) for output in outputs if (cases := re.search(r"(\d+) cases ran", output)))
    handed_over = kernels.pop("hand-over of warps", 0)
    ours = {kernel: count for kernel, count in kernels.items() if not is_cudnns(kernel)}
    print(
        f"{tool}: {ran} cases, {kernels.total()} reports, {sum(ours.values())} outside of cuDNN's kernels; "
        f"{handed_over} of the hand-over of warps that Triton's compiler makes"
    )
    for kernel, count in ours.items():
        print(f"  {count} x {kernel[:150]}")
    died = [part for part, output in enumerate(outputs) if "cases ran" not in output]
    for part in died:
        print(f"  part {part} did not come to its end:\n{outputs[part][-2000:]}")
    return not ours and not died


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", metavar="TOOL", help="run under these tools of compute-sanitizer")
    parser.add_argument("--processes", type=int, default=8, help="that share the cases of --tools")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th case, from the I-th on")
    parser.add_argument("--initcheck", action="store_true", help="show writes that the tool misses, see the function")
    parser.add_argument("--check", action="store_true", help="fail when a result is wrong")
    options = parser.parse_args()
    if options.tools:
        clean = [sanitize(tool, options.processes) for tool in options.tools]
        sys.exit(not all(clean))
    if options.initcheck:
        show_unseen_writes()
    first, step = map(int, options.part.split("/"))
    ran = decoded = 0
    for number, case in enumerate(cases()[first::step]):
        planning.LARGE = (
            0 if number % 2 else LARGE
        )  # every second case with the kernels of large calls, which use a side stream
        forget_plans()
        if options.check:
            worst = max(error_ratios(case, "fused").values(), default=0.0)
            assert worst <= MAX_ERROR_RATIO, f"{case}: {worst}"
        else:
            run(make_inputs(case), "fused")
        ran += 1
        if case.keys > 2 and ran % 4 == 0:
            decode(case)
            decoded += 1
        torch.cuda.synchronize()
    print(f"{ran} cases ran, forward and backward; {decoded} of them decoded, too")


if __name__ == "__main__":
    main()
