"""Implements `affine tune`: finds the fastest tile sizes of the Triton kernels on this GPU.

    affine tune                                       # the head dims of most models, bfloat16
    affine tune --head-dims 96 256 --dtype float32

The shipped sizes were measured on an H200; on other GPUs they fit but were not measured. Every candidate is compiled,
checked against the result of the shipped sizes, and timed; the best of each kernel is saved (tuned.py). Tuning affects
only the flash route: windows, segments, padding, fp32, deterministic runs, and GPUs before Hopper.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor

from ...call import AttentionCall, CallSpec, Rows, TensorSpec
from ...visibility import Visibility
from ..shared.tile_sizes import KERNELS, Config, shipped_config
from ..shared.tuned import Key, bucket, file_of, save
from .backward import FlashBackward
from .forward import FlashForward

ROUNDS = 10
TURNS = 5  # final comparisons of the best candidate with the shipped sizes
ELEMENTS = 2**25  # elements of query: enough work to fill a large GPU
WORTH = 0.98  # a candidate must take at most this fraction of the shipped time; smaller differences are noise
HOPELESS = 1.5  # skip deeper pipelines of a tile that takes this multiple of the best time
COMPILERS = 16  # threads


@dataclass(frozen=True)
class Found:
    """The best tile sizes of one kernel, and the times of these and of the shipped ones."""

    key: Key
    config: Config
    milliseconds: float
    shipped: Config
    shipped_milliseconds: float
    tried: int
    failed: int


def candidates(kernel: str, itemsize: int) -> list[Config]:
    """The candidates: tile sizes and warps that were the fastest for some kernel and GPU."""
    tiles = (16, 32, 64) if itemsize == 4 else (32, 64, 128)
    found = []
    for block_m, block_n, warps, stages in itertools.product(tiles, tiles, (4, 8), (2, 1, 3)):
        few = block_m * block_n < 32 * 32 or (warps == 8 and block_m * block_n < 64 * 64)
        if not few and not (itemsize == 4 and stages == 3):
            found.append(Config(block_m, block_n, warps, stages))
    if kernel == "causal":
        found += [config._replace(maxnreg=168) for config in found if config.block_n == 128 and config.num_warps == 4]
    return found


def tune(
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: torch.device | str = "cuda",
    length: int = 2048,
    only: dict[str, Iterable[Config]] | None = None,
    on_candidate: Callable[[str, int, int], None] | None = None,
) -> Iterator[Found]:
    """Yields the fastest tile sizes of each kernel, for one head dim and dtype, on one GPU.

    Args:
        head_dim: the result is used for all head dims up to the next of 64, 128 and 256.
        dtype: bfloat16, float16 or float32; the first two share a row.
        device: a CUDA GPU (or the CPU, in Triton's interpreter, where times mean nothing).
        length: sequence length; the batch is chosen to fill the GPU.
        only: candidates by kernel, instead of `candidates`.
        on_candidate: called for each candidate with the current step, its number and the number of candidates.
    """
    device = torch.device(device)
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim must be 1 to 256, got {head_dim}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype must be bfloat16, float16 or float32, got {str(dtype).removeprefix('torch.')}")
    bench = _Bench(head_dim, dtype, device, length)
    say = on_candidate or (lambda doing, number, count: None)

    def search() -> Iterator[Found]:
        for kernel in KERNELS:
            tried = list(only[kernel] if only is not None else candidates(kernel, dtype.itemsize))
            best = _fastest(bench, kernel, tried, say)
            bench.chosen[kernel] = best.config
            yield best

    return search()


def _fastest(bench: _Bench, kernel: str, tried: list[Config], say: Callable[[str, int, int], None]) -> Found:
    """The fastest of the shipped tile sizes of a kernel and the candidates."""
    shipped = bench.chosen[kernel]
    tried = [shipped, *(config for config in tried if config != shipped)]
    if bench.device.type == "cuda":
        _compile(bench, kernel, tried, say)
    expected = bench.run(kernel, shipped)
    best, best_time, shipped_time, count, failed = shipped, torch.inf, torch.inf, 0, 0
    hopeless: set[tuple[int, ...]] = set()  # (block_m, block_n, warps) for which a deeper pipeline would not help
    for number, config in enumerate(tried):
        say(f"{kernel}, measures", number + 1, len(tried))
        if config[:3] in hopeless:
            continue
        count += 1
        try:
            same = all(_is_close(a, b) for a, b in zip(bench.run(kernel, config), expected, strict=True))
        except Exception as error:  # compilers and drivers raise many types for sizes that do not fit
            if config == shipped or isinstance(error, torch.OutOfMemoryError):
                raise
            same = False
        if not same:
            failed += 1
            continue
        needed = bench.milliseconds(kernel, config)
        if needed > HOPELESS * best_time:
            hopeless.add(config[:3])
        if number == 0:
            best_time = shipped_time = needed
        elif needed < min(best_time, WORTH * shipped_time):
            best, best_time = config, needed
    if best != shipped:  # the minimum of many noisy times is biased, and clocks drift: compare again, alternating
        turns = [[bench.milliseconds(kernel, config) for config in (shipped, best)] for _ in range(TURNS)]
        shipped_time, best_time = (statistics.median(times) for times in zip(*turns, strict=True))
        if best_time >= WORTH * shipped_time:
            best, best_time = shipped, shipped_time
    key = (kernel, bench.query.dtype.itemsize, bucket(bench.query.shape[-1]))
    return Found(key, best, best_time, shipped, shipped_time, count, failed)


def _compile(bench: _Bench, kernel: str, configs: list[Config], say: Callable[[str, int, int], None]) -> None:
    """Runs every candidate once, in threads: compilation takes most of the time and releases the GIL."""

    def attempt(config: Config) -> None:
        # A new thread uses GPU 0. Errors are suppressed here, because the candidate raises again when it is measured.
        with torch.cuda.device(bench.query.device), contextlib.suppress(Exception):
            bench.run(kernel, config)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, COMPILERS)) as pool:
        for number, _ in enumerate(pool.map(attempt, configs)):
            say(f"{kernel}, compiles", number + 1, len(configs))
    torch.cuda.synchronize(bench.device)


def tune_and_save(head_dims: Iterable[int], dtype: torch.dtype, length: int) -> Iterator[str]:
    """Runs `tune` for several head dims on the current GPU, saves the sizes of each kernel, and yields log lines."""
    gpu = torch.cuda.get_device_name()
    yield f"{gpu}, {str(dtype).removeprefix('torch.')}, {length} tokens"
    shows = sys.stderr.isatty()
    for head_dim in head_dims:

        def say(doing: str, number: int, count: int, head_dim: int = head_dim) -> None:
            if shows:
                print(f"\r\033[Khead dim {head_dim}, {doing} {number} of {count} ", end="", file=sys.stderr, flush=True)

        for found in tune(head_dim, dtype, length=length, on_candidate=say):
            if shows:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            save(gpu, {found.key: found.config}, {"date": now, "torch": torch.__version__, "length": length})
            yield describe(found)
    yield f"saved in {file_of(gpu)}; every process that uses this GPU reads it"


def describe(found: Found) -> str:
    """One line of text about a kernel."""
    kernel, _, head_dim = found.key
    if found.config == found.shipped:
        change = f"{found.shipped_milliseconds:.3f} ms with the shipped sizes, which are kept"
    else:
        change = f"{found.shipped_milliseconds:.3f} to {found.milliseconds:.3f} ms with {found.config}"
    failed = f", {found.failed} of them invalid" if found.failed else ""
    return f"  {kernel}, head dims up to {head_dim}: {change} ({found.tried} tried{failed})"


class _Bench:
    """One causal call, which runs one kernel with given tile sizes and the others with the best known ones."""

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device, length: int):
        heads, groups = (8, 2) if device.type == "cuda" else (2, 1)
        batch = max(ELEMENTS // (heads * length * head_dim), 1) if device.type == "cuda" else 1
        generator = torch.Generator(device=device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, head_dim, generator=generator, device=device).to(dtype)

        self.device, self.scale, self.length = device, head_dim**-0.5, length
        self.query, self.grad = draw(batch, heads, length), draw(batch, heads, length)
        self.key, self.value = draw(batch, groups, length), draw(batch, groups, length)
        self.alpha = torch.rand(batch, heads, length, generator=generator, device=device)
        self.beta = (0.5 - self.alpha) / length
        self.chosen = {kernel: shipped_config(kernel, head_dim, dtype, device) for kernel in KERNELS}
        self.prepared: dict[tuple[str, Config], tuple[FlashForward, FlashBackward]] = {}

    def run(self, kernel: str, config: Config) -> list[Tensor]:
        """Runs the call with these tile sizes for one kernel and returns its outputs."""
        sizes = self.chosen | {kernel: config}
        rows = Rows(self.alpha, None if kernel == "causal" else self.beta)
        seen = Visibility(self.query.shape[0], self.length, self.length, self.device, is_causal=True)
        call = CallSpec.of(AttentionCall(self.query, self.key, self.value, rows, seen, self.scale))
        inputs = (self.query, self.key, self.value, *rows, None, None, None)
        key = (kernel, config)
        if key not in self.prepared:
            forward = FlashForward(call, keeps_core=True, sizes=sizes)
            grad = TensorSpec.of(self.grad)
            self.prepared[key] = forward, FlashBackward(call, grad, grad, forward.state, sizes)
        forward, backward = self.prepared[key]
        out, core, _, state = forward(*inputs)
        assert core is not None
        assert state is not None
        if kernel in ("forward", "causal"):
            return [out, forward.state.views(state)[0]]
        return [x for x in backward(self.grad, core, state, *inputs) if x is not None]

    def milliseconds(self, kernel: str, config: Config) -> float:
        """Median time of ROUNDS runs. They include other kernels, which are the same for all candidates."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            self.run(kernel, config)
            return 1e3 * (time.perf_counter() - begin)
        # Queue all runs without synchronising, so that the GPU waits for the host only before the first.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
        for mark in marks:
            self.run(kernel, config)
            mark.record()
        marks[-1].synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in itertools.pairwise(marks))


def _is_close(x: Tensor, expected: Tensor) -> bool:
    """True up to rounding: other tile sizes sum in a different order."""
    tolerance = 16 * torch.finfo(x.dtype).eps
    return bool((x.double() - expected.double()).norm() <= tolerance * expected.double().norm())
