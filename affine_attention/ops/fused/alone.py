"""The forward in one Triton kernel, with what cuDNN's backward takes: O and the natural log-sum-exp.

At head dims up to 64 the kernel of forward.py is as fast as cuDNN's, and applies a sink, alpha and a gate for nothing
before the output leaves the registers. With beta it is not: the sums of V and what is kept for the backward cost more
than the pass over cuDNN's output (docs/kernels.md).
"""

from __future__ import annotations

from torch import Tensor

from . import capability_of
from .forward import launch_forward
from .launch import Call, align, make_rule

MAX_HEAD_DIM = 64


def forwards_alone(
    query: Tensor,
    key: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    gate: Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    keeps: bool,
) -> bool:
    """Whether the call is one for `forward_alone`: measured on Hopper, causal, where the output is all that is kept."""
    one_output = (alpha is None and gate is None) or not keeps
    fits = is_causal and query.shape[2] == key.shape[2] and softmax_scale > 0 and query.shape[-1] <= MAX_HEAD_DIM
    return beta is None and one_output and fits and query.is_cuda and 90 <= capability_of(query) < 100


def forward_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a causal call without beta; lse is [B, H, T, 1] on a GPU, as cuDNN's backward knows it."""
    rule = make_rule(query.shape[2], key.shape[2], True, None, None, None, None)
    out, _, lse = launch_forward(
        Call(query, key, value, rule, softmax_scale),
        alpha=alpha, beta=None, sink=None if sink is None else sink.contiguous(),
        gate=None if gate is None else align(gate), keep_softmax=False, like=query, natural_lse=True,
    )  # fmt: skip
    return out, lse.unsqueeze(3) if lse.is_cuda else lse
