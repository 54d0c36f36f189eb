"""Computes tile ranges from segments and padding: which tiles a block visits, and which of them need no mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...call import CallSpec
from ..shared.launch import Launch, Slot
from ..shared.tile_functions import Rule
from ..shared.tile_sizes import Config

CHUNK = 16  # tiles per step of the loop


@triton.jit
def _range_kernel(
    owner_segments, owner_mask, num_owners, other_segments, other_mask, num_others, ranges,
    BLOCK_OWNER: tl.constexpr, BLOCK_OTHER: tl.constexpr, CHUNK: tl.constexpr, MASK_TAIL: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_OWNER rows of one sequence; writes start, full_start, full_stop, stop, in tiles.

    Tiles are compared by their ranges of ids: exact for sorted segments, conservative for others.
    """
    batch = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    owners = block * BLOCK_OWNER + tl.arange(0, BLOCK_OWNER)
    in_owner = owners < num_owners
    unmasked_owner = in_owner
    if owner_mask is not None:
        unmasked_owner = in_owner & (tl.load(owner_mask + batch * num_owners + owners, mask=in_owner, other=0) != 0)
    # An owned row beyond the end is never stored, so it does not prevent a tile from being full.
    owner_whole = tl.min((unmasked_owner | (in_owner == 0)).to(tl.int32), 0)
    owner_some = tl.max(unmasked_owner.to(tl.int32), 0)
    huge: tl.constexpr = 9223372036854775807
    if owner_segments is not None:
        own_ids = tl.load(owner_segments + batch * num_owners + owners, mask=in_owner, other=0).to(tl.int64)
        owner_low = tl.min(tl.where(unmasked_owner, own_ids, huge), 0)
        owner_high = tl.max(tl.where(unmasked_owner, own_ids, -huge), 0)

    num_tiles = tl.cdiv(num_others, BLOCK_OTHER)
    start = num_tiles
    stop = 0
    full_start = num_tiles
    full_stop = 0
    num_full = 0
    for first in range(0, num_tiles, CHUNK):
        tiles = first + tl.arange(0, CHUNK)
        others = tiles[:, None] * BLOCK_OTHER + tl.arange(0, BLOCK_OTHER)[None, :]
        in_other = others < num_others
        unmasked = in_other
        if other_mask is not None:
            unmasked = in_other & (tl.load(other_mask + batch * num_others + others, mask=in_other, other=0) != 0)
        whole = unmasked
        if not MASK_TAIL:
            whole = unmasked | (in_other == 0)
        meets = (tl.max(unmasked.to(tl.int32), 1) * owner_some) != 0
        full = meets & ((tl.min(whole.to(tl.int32), 1) * owner_whole) != 0)
        if owner_segments is not None:
            ids = tl.load(other_segments + batch * num_others + others, mask=in_other, other=0).to(tl.int64)
            low = tl.min(tl.where(unmasked, ids, huge), 1)
            high = tl.max(tl.where(unmasked, ids, -huge), 1)
            meets = meets & (low <= owner_high) & (high >= owner_low)
            full = full & (low == high) & (owner_low == owner_high) & (low == owner_low)
        start = tl.minimum(start, tl.min(tl.where(meets, tiles, num_tiles), 0))
        stop = tl.maximum(stop, tl.max(tl.where(meets, tiles + 1, 0), 0))
        full_start = tl.minimum(full_start, tl.min(tl.where(full, tiles, num_tiles), 0))
        full_stop = tl.maximum(full_stop, tl.max(tl.where(full, tiles + 1, 0), 0))
        num_full += tl.sum(full.to(tl.int32), 0)
    # Only one contiguous run can skip the mask: if the full tiles are scattered, all tiles are masked.
    if num_full != full_stop - full_start:
        full_start = start
        full_stop = start
    at = ranges + (batch * tl.num_programs(1) + block) * 4
    tl.store(at, start)
    tl.store(at + 1, full_start)
    tl.store(at + 2, full_stop)
    tl.store(at + 3, stop)


class RangeArrays:
    """The tile ranges for the kernels of a forward or backward: one array and one launch per tile size.

    Args:
        first_slot: the slot of the first array.
    """

    def __init__(self, call: CallSpec, rule: Rule, first_slot: int):
        self.call, self.rule, self.first_slot = call, rule, first_slot
        self.arrays: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.launches: list[Launch] = []

    def add(self, config: Config, owner: str) -> Slot | None:
        """The slot of the ranges for `owner` "query" or "key"; None if visibility does not depend on data."""
        rule = self.rule
        if rule.query_segments is None and rule.key_mask is None:
            return None
        name = f"{owner} {config.block_m} {config.block_n}"
        if name not in self.arrays:
            queries = (rule.query_segments, None, rule.num_queries)
            keys = (rule.key_segments, rule.key_mask, rule.num_keys)
            own, other = (queries, keys) if owner == "query" else (keys, queries)
            block_own, block_other = config[:2] if owner == "query" else (config.block_n, config.block_m)
            batch, num_blocks = self.call.query.shape[0], -(-own[2] // block_own)
            slot = Slot(self.first_slot + len(self.arrays))
            self.arrays[name] = ((batch, num_blocks, 4), torch.int32)
            arguments = (*own, *other, slot, block_own, block_other, CHUNK, owner == "query")
            self.launches.append(Launch(_range_kernel, (batch, num_blocks), arguments))
        return Slot(self.first_slot + list(self.arrays).index(name))
