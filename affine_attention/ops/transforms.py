"""`attention` under torch.func.grad, vjp, jacrev and vmap: an autograd function whose batching rule folds into B.

Transforms peel their levels off before they call `forward`, so it runs the usual implementation on plain tensors, fused
kernels included. The backward is a second function with a batching rule of its own (per-sample gradients are vmap of
grad); it repeats the forward instead of saving its intermediate values. Second derivatives and forward mode are not
served.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

DIFFERENTIABLE = ("query", "key", "value", "alpha", "beta", "sink", "gate", "exclusion", "norm_weight")
MESSAGE = (
    "attention can be differentiated once: torch.func transforms that need its second derivatives (hessian, grad of "
    'grad) are not served; use impl="reference" outside of torch.func for them'
)


class _Spec(NamedTuple):
    """What of a call is not a tensor, and the names of its tensors in order."""

    names: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]


def transformed_attention(**arguments: Any) -> Tensor:
    """`attention` with these arguments, inside a transform of torch.func."""
    segment_ids = arguments.pop("segment_ids")
    if isinstance(segment_ids, tuple | list) and len(segment_ids) == 2:
        arguments |= {"query_ids": segment_ids[0], "key_ids": segment_ids[1]}
    elif segment_ids is not None:
        arguments |= {"query_ids": segment_ids, "key_ids": segment_ids}
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    settings = tuple((name, x) for name, x in arguments.items() if name not in tensors)
    return _attention(_Spec(tuple(tensors), settings), *tensors.values())


def _run(spec: _Spec, tensors: tuple[Tensor, ...]) -> Tensor:
    from .api import attention

    given: dict[str, Any] = dict(zip(spec.names, tensors, strict=True)) | dict(spec.settings)
    query_ids, key_ids = given.pop("query_ids", None), given.pop("key_ids", None)
    return attention(**given, segment_ids=None if query_ids is None else (query_ids, key_ids))


def _attention(spec: _Spec, *tensors: Tensor) -> Tensor:
    return _Attention.apply(spec, *tensors)  # type: ignore[no-untyped-call]


def _backward(spec: _Spec, wanted: tuple[str, ...], grad_out: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return _Backward.apply(spec, wanted, grad_out, *tensors)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(spec: _Spec, *tensors: Tensor) -> Tensor:
        return _run(spec, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        wanted = tuple(
            name
            for name, needed in zip(ctx.spec.names, ctx.needs_input_grad[1:], strict=True)
            if needed and name in DIFFERENTIABLE
        )
        grads = dict(zip(wanted, _backward(ctx.spec, wanted, grad_out, *ctx.saved_tensors), strict=True))
        return None, *(grads.get(name) for name in ctx.spec.names)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], spec: _Spec, *tensors: Tensor) -> tuple[Tensor, int]:
        size = info.batch_size
        if _is_batched("norm_weight", spec, in_dims[1:]):
            outs = [_attention(spec, *_item(tensors, in_dims[1:], item)) for item in range(size)]
            return torch.stack(outs), 0
        folded = _fold(spec, tensors, in_dims[1:], size, every_sink=False)
        return _attention(spec, *folded).unflatten(0, (size, -1)), 0


class _Backward(torch.autograd.Function):
    """The gradients of the wanted inputs, in order."""

    @staticmethod
    def forward(spec: _Spec, wanted: tuple[str, ...], grad_out: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(name in wanted) for name, x in zip(spec.names, tensors, strict=True)]
            out = _run(spec, tuple(leaves))
        asked = [leaves[spec.names.index(name)] for name in wanted]
        return torch.autograd.grad(out, asked, grad_out, materialize_grads=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(MESSAGE)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], spec: _Spec, wanted: tuple[str, ...], grad_out: Tensor, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, dims = info.batch_size, in_dims[2:]
        if "norm_weight" in wanted or _is_batched("norm_weight", spec, dims[1:]):
            # The norm has one weight for all rows of a call, so its gradient per sample takes a call per sample.
            calls = [_backward(spec, wanted, *_item((grad_out, *tensors), dims, item)) for item in range(size)]
            return tuple(torch.stack(part) for part in zip(*calls, strict=True)), (0,) * len(wanted)
        shared_sink = _has_sink_per_head(spec, tensors, dims[1:])
        folded = _fold(spec, tensors, dims[1:], size, every_sink=True)
        grads = _backward(spec, wanted, _rows(grad_out, dims[0], size), *folded)
        found = [grad.unflatten(0, (size, -1)) for grad in grads]
        if shared_sink and "sink" in wanted:
            at = wanted.index("sink")
            found[at] = found[at].sum((1, 3))
        return tuple(found), (0,) * len(wanted)


def _item(tensors: tuple[Tensor, ...], dims: tuple[Any, ...], item: int) -> list[Tensor]:
    return [x if dim is None else x.select(dim, item) for x, dim in zip(tensors, dims, strict=True)]


def _is_batched(name: str, spec: _Spec, dims: tuple[Any, ...]) -> bool:
    return name in spec.names and dims[spec.names.index(name)] is not None


def _has_sink_per_head(spec: _Spec, tensors: tuple[Tensor, ...], dims: tuple[Any, ...]) -> bool:
    """Whether each call has a sink [H], not one per row."""
    if "sink" not in spec.names:
        return False
    at = spec.names.index("sink")
    return tensors[at].dim() - (dims[at] is not None) == 1


def _rows(x: Tensor, dim: int | None, size: int) -> Tensor:
    """[B, ..], batched or not, as [size * B, ..]."""
    return (x[None].expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _fold(spec: _Spec, tensors: tuple[Tensor, ...], dims: tuple[Any, ...], size: int, every_sink: bool) -> list[Tensor]:
    """The tensors of `size` calls as those of one call with `size` times as many rows.

    A sink per head becomes one per row where the calls have different ones, and where its gradient per call is needed.
    """
    at = spec.names.index("query")
    shape = list(tensors[at].shape)
    if dims[at] is not None:
        del shape[dims[at]]
    batch, queries = shape[0], shape[2]
    folded = []
    for name, x, dim in zip(spec.names, tensors, dims, strict=True):
        if name == "sink" and _has_sink_per_head(spec, tensors, dims):
            if dim is not None or every_sink:
                per_call = x.expand(size, -1) if dim is None else x.movedim(dim, 0)
                x = per_call[:, None, :, None].expand(-1, batch, -1, queries).flatten(0, 1)
            folded.append(x)
        elif name == "norm_weight":
            folded.append(x)
        else:
            folded.append(_rows(x, dim, size))
    return folded
