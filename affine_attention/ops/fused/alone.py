"""The forward of plain causal calls in one Triton kernel, with what cuDNN's backward takes: O and the natural lse.

At head dims up to 64 the kernel of alone_kernels.py is as fast as cuDNN's plain attention, and applies sink, alpha,
beta and gate before the output leaves the registers. The sums of v that beta needs come from two small kernels before
it, whose end it does not wait for until it needs them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import capability_of, side, sum_table
from .alone_kernels import causal_kernel
from .launch import Call, align, make_rule
from .relaunch import relaunch
from .sum_table import block_of
from .tiles import LOG2E

MAX_HEAD_DIM = 64


class Sizes(NamedTuple):
    """Queries of a program, keys of its wide tiles, and what Triton takes at a launch."""

    block_m: int
    wide: int
    options: dict[str, int]


# Three programs to a processor, and no fewer: one's softmax hides behind another's products.
HOPPER = Sizes(64, 128, {"num_warps": 4, "num_stages": 2, "maxnreg": 168})
INTERPRETER = HOPPER._replace(options={"num_warps": 4, "num_stages": 1})


def forwards_alone(query: Tensor, key: Tensor, is_causal: bool, softmax_scale: float) -> bool:
    """Whether the call is one for `forward_alone`: measured on Hopper, causal, head dims up to 64, and large."""
    fits = is_causal and query.shape[2] == key.shape[2] and softmax_scale > 0 and query.shape[-1] <= MAX_HEAD_DIM
    return fits and side.is_large(query) and query.is_cuda and 90 <= capability_of(query) < 100


def forward_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    softmax_scale: float,
    *,
    table: Tensor,
    marks: Tensor | None,
    keeps: bool,
    shift: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, O, lse) of a causal call; O is empty where out is O, or without `keeps`.

    `table` gets the sums of v, `marks` which rows are faint in out. lse is [B, H, T, 1] on a GPU, as cuDNN's backward
    knows it; with `shift` it is less log(alpha).
    """
    batch, heads, length, dim = query.shape
    sizes = HOPPER if query.is_cuda else INTERPRETER
    call = Call(query, key, value, make_rule(length, length, True, None, None, None, None), softmax_scale)
    out = torch.empty_like(query)
    is_apart = keeps and (alpha is not None or beta is not None or gate is not None)
    core = torch.empty_like(query) if is_apart else None
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
    early = beta is not None and query.is_cuda
    if beta is not None:
        sum_table.fill(table, value, early)
    relaunch(
        causal_kernel, (-(-length // sizes.block_m) * batch * heads,),
        (
            call.describe(call.query, sizes.block_m),
            call.describe(call.key, sizes.wide), call.describe(call.value, sizes.wide),
            call.describe(call.key, sizes.block_m), call.describe(call.value, sizes.block_m),
            call.describe(None if gate is None else align(gate), sizes.block_m),
            alpha, beta, None if sink is None else sink.contiguous(), table, out, core, lse, marks,
        ),
        (
            call.strides(alpha), call.strides(beta), out.stride(), length, 0 if beta is None else table.shape[2],
            softmax_scale * LOG2E.value, heads, key.shape[1], batch * heads, call.query_section,
            sizes.block_m, sizes.wide, block_of(dim), dim, call.block_d, shift, early,
        ),
        **sizes.options, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out, out.new_empty(0) if core is None else core, lse.unsqueeze(3) if lse.is_cuda else lse
