"""Recomputes E . O for the rows in which O is lost to cancellation, so that a large call need not save O.

out = alpha O + beta n, and the backward needs E . O = (E . out - beta E . n) / alpha (B8). If alpha O is small in out,
it is lost when out is rounded to 16 bits. The forward marks these rows, and the backward recomputes their weights only.
"""

from __future__ import annotations

from typing import Any

from ...call import CallSpec, TensorSpec
from ..shared.descriptors import tile_descriptor
from ..shared.launch import Launch, Slot
from ..shared.tile_functions import LOG2E
from ..shared.tile_sizes import Config
from ..shared.value_sums import padded
from .recompute_kernels import list_kernel, recompute_kernel

LISTED = 1024  # rows per step of the list kernel, which has one program per head
SIZES = Config(64, 64, num_warps=4, num_stages=2)  # measured on an H200


def num_parts(num_queries: int) -> int:
    """Programs per head; each writes one part of the sink's gradient."""
    return -(-num_queries // SIZES.block_m)


def launches(
    call: CallSpec,
    grad_out: TensorSpec,
    lse: Slot | None,
    lse_strides: tuple[int, ...],
    marks: Slot | None,
    slots: dict[str, Slot],
    *,
    num_sink_parts: int,
    wants_sink: bool,
) -> list[Launch]:
    """Launches that write, for marked rows, dalpha, delta, and the last `num_parts` parts of the sink's gradient."""
    from . import backward as at  # the order of the slots

    query, key, value, (alpha, _, _, _) = call[:4]
    batch, heads, length, dim = query.shape
    alpha_strides: tuple[Any, ...] = (0, 0, 0) if alpha is None else alpha.stride()[:3]
    row_length = -(-length // at.ROW_UNIT) * at.ROW_UNIT
    rows = SIZES.block_n
    return [
        Launch(
            list_kernel, (batch * heads,), (marks, slots["listed"], slots["counts"], length, LISTED), num_warps=4
        ),
        Launch(
            recompute_kernel, (num_parts(length) * batch * heads,),
            (
                Slot(at.QUERY), Slot(at.GRAD), Slot(at.KEY, tile_descriptor(key, rows)),
                Slot(at.VALUE, tile_descriptor(value, rows)), lse, None if alpha is None else Slot(at.ALPHA),
                Slot(at.SINK) if wants_sink else None, slots["listed"], slots["counts"],
                None if alpha is None else Slot(at.DALPHA), slots["row_numbers"],
                Slot(at.SINK_PARTS) if wants_sink else None,
                *query.stride()[:3], *grad_out.stride()[:3], *lse_strides, *alpha_strides,
                length, row_length, num_sink_parts if wants_sink else 0, call.softmax_scale * LOG2E.value,
                heads, key.shape[1], batch * heads, not call.nonnegative_alpha,
                SIZES.block_m, SIZES.block_n, dim, padded(dim),
            ),
            **SIZES.options,
        ),
    ]  # fmt: skip
