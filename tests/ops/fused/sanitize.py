"""Runs the fused kernels over many small cases, forward and backward, under NVIDIA's compute-sanitizer.

    make sanitize        # memcheck, racecheck and initcheck, one after the other; needs a GPU and compute-sanitizer
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.ops.fused.sanitize --part 0/4

Without PyTorch's caching allocator every tensor is an allocation of its own, so that a read past its end or of memory
that nothing wrote is seen. Prints the number of cases; --check compares the results, without a sanitizer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from affine_attention import attention, decode_attention
from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratios, grid_cases, make_inputs, run

NOT_SERVED = ("mask", "head_mask")
LONGEST = 100  # in the place of 1000: a sanitizer runs a kernel hundreds of times slower


def cases() -> list[Case]:
    """Cases of the grid that the fused kernels serve, cut to lengths that a sanitizer can bear."""
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


def show_results_of_cudnn() -> None:
    """Copies what cuDNN returns: initcheck takes even cuDNN's own results for memory that nothing wrote.

    It then reports the copies, and cuDNN's own reading; whatever it reports in a kernel of ours is a fault.
    """
    from affine_attention.ops.fused import cudnn

    for name in ("_attend", "_attend_backward"):
        inner = getattr(cudnn, name)
        setattr(cudnn, name, lambda *args, inner=inner: tuple(x.clone() for x in inner(*args)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th case, from the I-th on")
    parser.add_argument("--initcheck", action="store_true", help="copy what cuDNN returns, see the function")
    parser.add_argument("--check", action="store_true", help="fail when a result is wrong")
    options = parser.parse_args()
    if options.initcheck:
        show_results_of_cudnn()
    first, step = map(int, options.part.split("/"))
    ran = decoded = 0
    for case in cases()[first::step]:
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
