"""The backward without O: E . O comes from the output, and for rows whose output holds too little of O from the scores.

Plain attention keeps its output for the backward; so does this: out = alpha O + beta sum, and E . O is won back from it
(B8 of cudnn_kernels.py). A row is *faint* where alpha O is so small beside out that rounding out to 16 bits has eaten
it. The forward sees that and marks the row; for marked rows, and only for these, the backward forms the weights again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .alone_backward import backwards_alone
from .configs import Config
from .faint_kernels import list_kernel, regain_kernel
from .launch import Call, make_rule, strides_of
from .relaunch import relaunch
from .tiles import LOG2E

LISTED = 1024  # rows to a step of the list, in its one program for each head
REGAIN = Config(64, 64, num_warps=4, num_stages=2)  # measured on an H200


def marks_faint_rows(
    query: Tensor, key: Tensor, alpha: Tensor | None, beta: Tensor | None, gate: Tensor | None,
    is_causal: bool, softmax_scale: float,
) -> bool:  # fmt: skip
    """Whether a call keeps its output in place of O: our backward takes it, and no gate stands before the output."""
    has_rows = alpha is not None or beta is not None
    return has_rows and gate is None and backwards_alone(query, key, is_causal, softmax_scale)


def new_marks(query: Tensor) -> Tensor:
    """Unwritten marks of the rows, [B, H, T]."""
    return torch.empty(query.shape[:3], dtype=torch.int8, device=query.device)


def parts_of(num_queries: int) -> int:
    """Programs for a head: each gives a part of the sink's gradient."""
    return -(-num_queries // REGAIN.block_m)


def regain(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    alpha: Tensor | None,
    sink: Tensor | None,
    marks: Tensor,
    softmax_scale: float,
    *,
    grad_alpha: Tensor | None,
    row_numbers: Tensor,
    sink_parts: Tensor | None,
    signed: bool,
) -> None:
    """Writes what E . O gives for the marked rows of a causal call, where the prologue (B8) leaves it out.

    The gradient of alpha, the number of B7, and the last `parts_of` parts of the sink's gradient. `signed`: alpha may
    be negative.
    """
    batch, heads, length, dim = query.shape
    call = Call(query, key, value, make_rule(length, length, True, None, None, None, None), softmax_scale)
    rows = torch.empty(batch * heads, length, dtype=torch.int32, device=query.device)
    counts = torch.empty(batch * heads, dtype=torch.int32, device=query.device)
    relaunch(list_kernel, (batch * heads,), (marks, rows, counts), (length, LISTED), num_warps=4)
    relaunch(
        regain_kernel, (parts_of(length) * batch * heads,),
        (
            query, grad_out, call.describe(call.key, REGAIN.block_n), call.describe(call.value, REGAIN.block_n),
            lse, alpha, sink, rows, counts, grad_alpha, row_numbers, sink_parts,
        ),
        (
            *query.stride()[:3], *grad_out.stride()[:3], *lse.stride()[:3], *strides_of(alpha),
            length, row_numbers.shape[-1], 0 if sink_parts is None else sink_parts.shape[-1],
            softmax_scale * LOG2E.value, heads, key.shape[1], batch * heads,
            signed, REGAIN.block_m, REGAIN.block_n, dim, call.block_d,
        ),
        **REGAIN.options,
    )  # fmt: skip
