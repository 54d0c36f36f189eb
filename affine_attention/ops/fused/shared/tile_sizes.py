"""Tables of measured tile sizes for the kernels. There is no autotuning unless a user runs `affine tune`."""

from __future__ import annotations

from typing import NamedTuple

import torch

KERNELS = ("forward", "causal", "query_grads", "key_grads")
HEAD_DIMS = (64, 128, 256)  # a row of a table is for head dims up to this one


class Config(NamedTuple):
    """Queries and keys per tile, warps per CTA, stages of the load pipeline, maximum registers per thread."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """The launch options of Triton, without the tile sizes."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else {**options, "maxnreg": self.maxnreg}


# (kernel, bytes of an element, head dim up to) -> Config. A CTA of `forward` and `query_grads` owns block_m queries,
# one of `key_grads` owns block_n keys; `causal`, if present, is the forward of plain causal calls. Measured on an H200:
# four warps with small tiles are faster than eight with large ones, because two or three CTAs share an SM and one
# CTA's softmax overlaps the MMAs of the others.
HOPPER = {
    ("causal", 2, 64): Config(64, 128, 4, 2, 168),  # three CTAs per SM
    ("forward", 2, 64): Config(64, 64, 4, 3),
    ("forward", 2, 128): Config(64, 64, 4, 3),
    ("forward", 2, 256): Config(128, 64, 8, 2),
    ("query_grads", 2, 64): Config(64, 64, 4, 2),
    ("query_grads", 2, 128): Config(128, 64, 8, 3),
    ("query_grads", 2, 256): Config(64, 64, 4, 2),
    ("key_grads", 2, 64): Config(64, 64, 4, 3),
    ("key_grads", 2, 128): Config(64, 64, 4, 2),
    ("key_grads", 2, 256): Config(32, 64, 8, 2),
}
# Fits into the 99 KiB of shared memory of sm_86 and sm_89; used on every GPU without its own table.
UNIVERSAL = {
    ("forward", 2, 64): Config(64, 64, 4, 2),
    ("forward", 2, 128): Config(64, 64, 4, 2),
    ("forward", 2, 256): Config(64, 32, 4, 1),
    ("query_grads", 2, 64): Config(64, 64, 4, 2),
    ("query_grads", 2, 128): Config(64, 32, 4, 2),
    ("query_grads", 2, 256): Config(32, 32, 4, 1),
    ("key_grads", 2, 64): Config(64, 64, 4, 2),
    ("key_grads", 2, 128): Config(32, 64, 4, 2),
    ("key_grads", 2, 256): Config(32, 32, 4, 1),
    # fp32 matmuls run on CUDA cores (no tf32): with larger tiles, the unrolled loops spill registers.
    ("forward", 4, 128): Config(32, 32, 4, 1),
    ("forward", 4, 256): Config(16, 32, 4, 1),
    ("query_grads", 4, 128): Config(32, 32, 4, 1),
    ("query_grads", 4, 256): Config(16, 16, 4, 1),
    ("key_grads", 4, 128): Config(32, 32, 4, 1),
    ("key_grads", 4, 256): Config(16, 16, 4, 1),
}
# Triton's interpreter on the CPU: two different small sizes, so that short test sequences span several tiles.
INTERPRETER = {
    "causal": Config(64, 32, 4, 1),
    "forward": Config(32, 16, 4, 1),
    "query_grads": Config(32, 16, 4, 1),
    "key_grads": Config(16, 32, 4, 1),
}


def shipped_config(kernel: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Config:
    """The configuration of `kernel` for one head dim, dtype and device."""
    if device.type == "cpu":
        return INTERPRETER[kernel]
    return table_config(kernel, head_dim, dtype.itemsize, torch.cuda.get_device_capability(device))


def table_config(kernel: str, head_dim: int, itemsize: int, capability: tuple[int, int]) -> Config:
    """Looks up the tables for a GPU with this compute capability."""
    for table in (HOPPER, UNIVERSAL) if capability[0] == 9 else (UNIVERSAL,):
        for limit in HEAD_DIMS:
            if head_dim <= limit and (kernel, itemsize, limit) in table:
                return table[kernel, itemsize, limit]
    if kernel == "causal":
        return table_config("forward", head_dim, itemsize, capability)
    raise AssertionError(f"no configuration for {kernel}, head dim {head_dim}, {itemsize} bytes")
