"""One call of the operator as one object, with its tensors (`AttentionCall`) and without their memory (`CallSpec`).

Every implementation takes an `AttentionCall`. A plan keeps the `CallSpec` of the first call with a signature: shapes,
strides, dtypes and device, which determine the route of all calls with that signature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .visibility import Visibility

ROUNDS_TO_ZERO = 2.0**-150  # the largest softmax_scale that rounds to 0 in fp32


class Rows(NamedTuple):
    """The coefficients of a call, by row or by head; None for those that the call does not have."""

    alpha: Tensor | None = None  # [B, H, T]
    beta: Tensor | None = None  # [B, H, T]
    sink: Tensor | None = None  # [H], or [B, H, T]
    gate: Tensor | None = None  # [B, H, T, D]

    @property
    def has_row_sinks(self) -> bool:
        """True if every row has a sink of its own, [B, H, T]."""
        return self.sink is not None and len(self.sink.shape) == 3

    @property
    def is_plain(self) -> bool:
        """True for plain softmax attention."""
        return self.alpha is None and self.beta is None and self.sink is None and self.gate is None


def sink_by_row(sink: Tensor) -> Tensor:
    """A sink [H] or [B, H, T] in a shape that broadcasts to [B, H, T]."""
    return sink if sink.dim() == 3 else sink[:, None]


def distinct(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, repeated ones as views: a compiler refuses an autograd function that gets one tensor twice."""
    found: list[Any] = []
    for x in tensors:
        is_repeated = x is not None and any(x is other for other in found)
        found.append(x.view_as(x) if is_repeated else x)
    return found


class AttentionCall(NamedTuple):
    """A validated call. Every implementation takes one and returns the output [B, H, T, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    rows: Rows
    visibility: Visibility
    softmax_scale: float
    nonnegative_alpha: bool = False
    scale_is_default: bool = False  # 1/sqrt(D)
    weights: str = "softmax"  # or the name of a weight function of ops/weights

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visibility: Visibility,
        softmax_scale: float,
        nonnegative_alpha: bool = False,
        **rows: Any,
    ) -> AttentionCall:
        """Builds a call with alpha, beta, sink and gate as keyword arguments."""
        return cls(query, key, value, Rows(**rows), visibility, softmax_scale, nonnegative_alpha)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The seven differentiable inputs, in the order in which a backward returns their gradients."""
        return self.query, self.key, self.value, *self.rows

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.tensors)

    @property
    def has_positive_scale(self) -> bool:
        """True if softmax_scale is above 0 in the dtype of the scores.

        The default scale is not compared: with a dynamic D it is symbolic, and the comparison would cause a retrace.
        """
        return self.scale_is_default or self.softmax_scale > (
            0.0 if self.query.dtype == torch.float64 else ROUNDS_TO_ZERO
        )

    def with_positive_scale(self) -> AttentionCall:
        """The same scores with a positive scale: kernels mask and compute row maxima before they apply the scale."""
        if self.has_positive_scale:
            return self
        if -self.softmax_scale > (0.0 if self.query.dtype == torch.float64 else ROUNDS_TO_ZERO):
            return self._replace(query=-self.query, softmax_scale=-self.softmax_scale)
        return self._replace(query=self.query * 0, softmax_scale=1.0)


class TensorSpec:
    """Shape, strides, dtype and device of a tensor, without its memory."""

    __slots__ = ("_strides", "device", "dtype", "shape")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.shape, self._strides, self.dtype, self.device = shape, strides, dtype, device

    @classmethod
    def of(cls, x: Tensor) -> TensorSpec:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index

    @property
    def fresh_strides(self) -> tuple[int, ...]:
        """The strides that torch.empty_like would give such a tensor."""
        like = torch.empty_strided(self.shape, self._strides, dtype=self.dtype, device="meta")
        return tuple(torch.empty_like(like).stride())


class RowSpecs(NamedTuple):
    """`Rows` without memory."""

    alpha: TensorSpec | None
    beta: TensorSpec | None
    sink: TensorSpec | None
    gate: TensorSpec | None

    @property
    def has_row_sinks(self) -> bool:
        return self.sink is not None and len(self.sink.shape) == 3

    @property
    def sink_strides(self) -> tuple[int, ...] | None:
        """The strides of a sink [B, H, T], None for a sink [H]."""
        return None if self.sink is None or len(self.sink.shape) == 1 else self.sink.stride()

    @property
    def is_plain(self) -> bool:
        return self.alpha is None and self.beta is None and self.sink is None and self.gate is None


class CallSpec(NamedTuple):
    """An `AttentionCall` without memory; the tensors of its visibility are specs as well."""

    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    rows: RowSpecs
    visibility: Visibility
    softmax_scale: float
    nonnegative_alpha: bool
    weights: str = "softmax"

    @classmethod
    def of(cls, call: AttentionCall) -> CallSpec:
        def spec(x: Tensor | None) -> Any:
            return None if x is None else TensorSpec.of(x)

        seen = call.visibility
        seen = replace(
            seen, query_segments=spec(seen.query_segments), key_segments=spec(seen.key_segments),
            key_mask=spec(seen.key_mask), pair_mask=spec(seen.pair_mask),
        )  # fmt: skip
        query, key, value, *rows = map(spec, call.tensors)
        return cls(query, key, value, RowSpecs(*rows), seen, call.softmax_scale, call.nonnegative_alpha, call.weights)
