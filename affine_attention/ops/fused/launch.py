"""Turns the tensors of a call into what the kernels take: descriptors, tile sizes, ranges and the visibility rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import Config
from .ranges import tile_ranges
from .tiles import Rule
from .tuned import chosen_config

L2_BYTES = 16 * 2**20  # what the heads that run side by side may take of the L2 cache
# Numbers of heads: no reason to compile a kernel again when they change.
GRID_NUMBERS = ("num_heads", "num_kv_heads", "num_programs", "section")
ALIGNMENT = 16  # bytes; the copy engine wants addresses and strides in units of it
MAX_ROW_STRIDE = 2**24  # of rows in a pass beside attention: inside a tile (up to 64 rows) its offsets are 32-bit


def make_rule(
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    window: int | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    key_mask: Tensor | None,
) -> Rule:
    """The kernels' form of `Visibility`. Limits that no pair of the call can pass are dropped."""
    reach = None if window is None or window >= max(num_queries, num_keys) else max(window, 0) - 1
    return Rule(
        num_queries=num_queries,
        num_keys=num_keys,
        back=reach,
        ahead=0 if is_causal and (reach is None or reach >= 0) else reach,
        query_segments=None if query_segments is None else query_segments.contiguous(),
        key_segments=None if key_segments is None else key_segments.contiguous(),
        key_mask=None if key_mask is None else key_mask.contiguous().view(torch.int8),
    )


def align(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows are contiguous and start at multiples of ALIGNMENT bytes."""
    strides_ok = x.stride(-1) == 1 and all(
        size == 1 or (stride > 0 and stride * x.element_size() % ALIGNMENT == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )
    if strides_ok and x.data_ptr() % ALIGNMENT == 0:
        return x
    unit = ALIGNMENT // x.element_size()
    padded = x.new_empty(*x.shape[:-1], triton.cdiv(x.shape[-1], unit) * unit)
    return padded[..., : x.shape[-1]].copy_(x)


def packed_rows(x: Tensor) -> Tensor:
    """x, or a copy of it: the passes beside attention read rows of D neighbours; one that is expanded is copied."""
    return x if is_packed(x) else x.contiguous()


def is_packed(x: Tensor) -> bool:
    """Whether a row's numbers are neighbours, and rows near enough for the 32-bit offsets inside a tile."""
    return x.stride(-1) == 1 and x.stride(2) <= MAX_ROW_STRIDE


def strides_of(x: Tensor | None) -> tuple[int, ...]:
    """The first three strides, as the passes take them; zeros for an absent tensor."""
    return (0, 0, 0) if x is None else x.stride()[:3]


@dataclass
class Call:
    """One call of the operator, with tensors that descriptors can address."""

    query: Tensor
    key: Tensor
    value: Tensor
    rule: Rule
    softmax_scale: float
    # The host's work for a call is near the time of a short one on the GPU: nothing is made twice.
    _configs: dict[str, Config] = field(default_factory=dict)
    _ranges: dict[tuple[int, int, str], Tensor | None] = field(default_factory=dict)
    _descriptors: dict[tuple[int, int], TensorDescriptor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.query, self.key, self.value = align(self.query), align(self.key), align(self.value)

    @cached_property
    def block_d(self) -> int:
        """Columns of a tile: products want a power of two, at least 16."""
        return max(16, triton.next_power_of_2(self.query.shape[-1]))

    @property
    def precision(self) -> str:
        """tf32 would lose what a caller of fp32 pays for."""
        return "ieee"

    @property
    def sums_are_prefixes(self) -> bool:
        """True when the unmasked tiles of every row start at key 0."""
        return self.rule.back is None and self.rule.query_segments is None and self.rule.key_mask is None

    @property
    def is_causal_only(self) -> bool:
        """True when a query sees all keys up to its own position, and nothing else decides."""
        return self.sums_are_prefixes and self.rule.ahead == 0

    @property
    def query_section(self) -> int:
        """Query heads that run side by side, so that their keys and values stay in L2."""
        batch, kv_heads, num_keys, head_dim = self.key.shape
        fitting = L2_BYTES // (2 * num_keys * head_dim * self.key.element_size())
        return max(1, min(fitting, batch * kv_heads)) * (self.query.shape[1] // kv_heads)

    @property
    def key_section(self) -> int:
        """Key-value heads that run side by side, so that their queries and output gradients stay in L2."""
        batch, heads, num_queries, head_dim = self.query.shape
        group = heads // self.key.shape[1]
        fitting = L2_BYTES // (2 * num_queries * head_dim * self.query.element_size() * group)
        return max(1, min(fitting, batch * self.key.shape[1]))

    def config(self, kernel: str) -> Config:
        """The tile sizes of "forward", "causal", "rows" (B1), "query_grads" or "key_grads"."""
        if kernel not in self._configs:
            if kernel == "rows":
                # B1 reads the tile sums of the forward, so it shares their size; fewer queries, for occupancy.
                forward = self.config("forward")
                config = forward._replace(block_m=min(64, forward.block_m), num_warps=4)
            else:
                config = chosen_config(kernel, self.query.shape[-1], self.query.dtype, self.query.device)
            self._configs[kernel] = config
        return self._configs[kernel]

    def ranges(self, kernel: str) -> Tensor | None:
        """Tile ranges from segments and padding for the tile sizes of `kernel`."""
        config = self.config(kernel)
        owner = "key" if kernel == "key_grads" else "query"
        name = (config.block_m, config.block_n, owner)
        if name not in self._ranges:
            self._ranges[name] = tile_ranges(
                self.rule, self.query.shape[0], self.query.device, config.block_m, config.block_n, owner
            )
        return self._ranges[name]

    def describe(self, x: Tensor | None, rows: int) -> TensorDescriptor | None:
        """A descriptor of a [B, heads, length, D] tensor for tiles of `rows` rows; x must be aligned."""
        if x is None:
            return None
        name = (id(x), rows)
        if name not in self._descriptors:
            # A stride along one element is never used, but is checked: give it a value that passes.
            unit = ALIGNMENT // x.element_size()
            strides = [stride if size > 1 else unit for size, stride in zip(x.shape, x.stride(), strict=True)]
            strides[-1] = 1
            self._descriptors[name] = TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, self.block_d])
        return self._descriptors[name]

    @staticmethod
    def strides(x: Tensor | None) -> tuple[int, ...] | None:
        """The strides of an optional tensor."""
        return None if x is None else tuple(x.stride())
