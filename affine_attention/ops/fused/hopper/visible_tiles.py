"""Gluon functions on tiles of visible pairs: those of shared/tile_functions.py, compiled for Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared import tile_functions

key_span = gluon.jit(tile_functions.key_span.fn)
mask_irregular = gluon.jit(tile_functions.mask_irregular.fn)
mask_outside = gluon.jit(tile_functions.mask_outside.fn)
mask_pairs = gluon.jit(tile_functions.mask_pairs.fn)
positions_span = gluon.jit(tile_functions.query_positions_span.fn)
row_limits = gluon.jit(tile_functions.row_limits.fn)
scheduled_block = gluon.jit(tile_functions.scheduled_block.fn)


@gluon.jit
def finite_or_zero(x):
    """Replaces NaN and infinity by 0, because a non-finite operand of an MMA times a weight of 0 is NaN."""
    return gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, 0.0).to(x.dtype)
