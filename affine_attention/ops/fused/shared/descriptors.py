"""Prepares tensors for TMA: aligned rows and tile descriptors; also the number of heads that fit the L2 cache."""

from __future__ import annotations

from torch import Tensor

from ...call import TensorSpec
from .launch import ALIGNMENT, Descriptor
from .value_sums import padded

L2_BYTES = 16 * 2**20  # part of the L2 cache for the heads that run at the same time
MAX_ROW_STRIDE = 2**24  # elements: offsets inside a tile of up to 64 rows are 32-bit


def is_addressable(x: Tensor | TensorSpec) -> bool:
    """True if TMA and the memory-bound kernels can read x without a copy, given an aligned address."""
    if x.stride(-1) != 1 or x.stride(2) > MAX_ROW_STRIDE:
        return False
    return all(
        size == 1 or (stride > 0 and stride * x.element_size() % ALIGNMENT == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def addressable(x: Tensor) -> Tensor:
    """x, or a copy whose rows are contiguous and start at multiples of ALIGNMENT bytes."""
    if is_addressable(x) and x.data_ptr() % ALIGNMENT == 0:
        return x
    unit = ALIGNMENT // x.element_size()
    padded_rows = x.new_empty(*x.shape[:-1], -(-x.shape[-1] // unit) * unit)
    return padded_rows[..., : x.shape[-1]].copy_(x)


def tile_descriptor(x: TensorSpec, rows: int, layout: object = None, block_d: int | None = None) -> Descriptor:
    """Tiles of `rows` rows of one head of an addressable [B, heads, length, D] tensor."""
    # The stride of a dimension of size 1 is unused but validated, so pass a valid value.
    unit = ALIGNMENT // x.element_size()
    strides = [stride if size > 1 else unit for size, stride in zip(x.shape, x.stride(), strict=True)]
    return Descriptor(tuple(x.shape), (*strides[:3], 1), (1, 1, rows, block_d or padded(x.shape[-1])), layout)


def query_section(query: TensorSpec, key: TensorSpec) -> int:
    """Query heads that run at the same time, so that their keys and values stay in L2."""
    batch, kv_heads, num_keys, head_dim = key.shape
    fitting = L2_BYTES // (2 * num_keys * head_dim * key.element_size())
    return max(1, min(fitting, batch * kv_heads)) * (query.shape[1] // kv_heads)


def key_section(query: TensorSpec, key: TensorSpec) -> int:
    """Key-value heads that run at the same time, so that their queries and output gradients stay in L2."""
    batch, heads, num_queries, head_dim = query.shape
    group = heads // key.shape[1]
    fitting = L2_BYTES // (2 * num_queries * head_dim * query.element_size() * group)
    return max(1, min(fitting, batch * key.shape[1]))
