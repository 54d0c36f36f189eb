"""Turns hidden states and W_a into alpha and beta (Eq. 7 and 8) in one launch, and their gradients back in two.

The projection has few columns, so a training step spends less time in it on the GPU than on the host: as a linear layer
it is three GEMM calls per layer, and coefficients.py adds two launches. The launches of each kind of call are prepared
once and later go by address. A compiled graph contains two opaque operators in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import on_device
from .coefficients import check_arguments
from .projection_kernels import NUM_WARPS, projection_backward_kernel, projection_kernel, projection_sum_kernel
from .shared.allocation import Allocate, contiguous
from .shared.launch import Launch, LaunchSet, Slot
from .shared.workspace import Arrays, Workspace

PROGRAMS = 264  # CTAs of the backward, two for each SM of an H100: a constant, so that sums do not depend on the GPU
MAX_PLANS = 4096  # signatures to keep: evaluation has many lengths


class _Plan(NamedTuple):
    """The launches of one signature, and the allocators of its outputs."""

    launches: LaunchSet
    outputs: list[Allocate]


_plans: dict[tuple[Any, ...], _Plan] = {}


def projected_coefficients(
    hidden: Tensor,
    weight: Tensor,
    activation: str,
    running_alpha: Tensor | None = None,
    divisor: int | None = None,
    token_mask: Tensor | None = None,
    collected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """alpha = phi(W_a x) and beta = (running_alpha - alpha) / divisor, each contiguous [B, H, T] in fp32.

    W_a x is summed in fp32 and rounded to the dtype of hidden before the activation, as a linear layer rounds it.

    Args:
        hidden: [B, T, M] in bf16, fp16 or fp32; not empty.
        weight: [H, M], W_a in the dtype of hidden.
        activation: "linear_clipping" or "sigmoid".
        running_alpha: [H] fp32; None returns beta = None.
        divisor: N of Eq. 8; needed with running_alpha.
        token_mask: boolean [B, T], True for real tokens; only `collected` depends on it.
        collected: [H + 1] fp64 leaf. Its gradient is the sum of alpha over real tokens, per head, then their number.
    """
    check_arguments(hidden, activation, running_alpha, divisor, token_mask)
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight must have the dtype of hidden, {hidden.dtype}, got {weight.dtype}; cast one of them")
    number, sigmoid = 1 if divisor is None else divisor, activation == "sigmoid"
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad or collected is not None):
        apply = _Projection.apply
        if not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            apply = _apply
        return apply(hidden, weight, running_alpha, collected, token_mask, number, sigmoid)
    found = _forward(hidden, weight, running_alpha, number, sigmoid, False)
    return found[0], None if running_alpha is None else found[1]


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        running_alpha: Tensor | None,
        collected: Tensor | None,
        token_mask: Tensor | None,
        divisor: int,
        sigmoid: bool,
    ) -> tuple[Tensor, Tensor | None]:
        found = _forward(hidden, weight, running_alpha, divisor, sigmoid, True)
        # alpha does not tell a score on the boundary of the clipping from one beyond it, so the scores are saved.
        ctx.save_for_backward(hidden, weight, found[-1], token_mask)
        ctx.divisor, ctx.sigmoid = divisor, sigmoid
        ctx.set_materialize_grads(False)
        return found[0], None if running_alpha is None else found[1]

    @staticmethod
    def backward(ctx: Any, grad_alpha: Tensor | None, grad_beta: Tensor | None):
        # Gradients are enabled under create_graph=True only; the guard against a second backward takes longer than
        # the launches.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _guarded_gradients(ctx, grad_alpha, grad_beta)
        return _gradients(ctx, grad_alpha, grad_beta)


# Without the checks of Function.apply for functorch, which take 5 us.
_apply = super(torch.autograd.Function, _Projection).apply


def _gradients(ctx: Any, grad_alpha: Tensor | None, grad_beta: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, scores, token_mask = ctx.saved_tensors
    needs = ctx.needs_input_grad
    has_grad = grad_alpha is not None or grad_beta is not None
    wants = (needs[0] and has_grad, needs[1] and has_grad, needs[3])
    run = torch.ops.affine_attention.projection_backward if torch.compiler.is_compiling() else _run_backward
    found = iter(run(hidden, weight, scores, token_mask, grad_alpha, grad_beta, ctx.divisor, ctx.sigmoid, *wants))
    grad_hidden = next(found) if wants[0] else None
    grad_weight = next(found) if wants[1] else None
    return grad_hidden, grad_weight, None, next(found) if wants[2] else None, None, None, None


_guarded_gradients = once_differentiable(_gradients)


def _forward(
    hidden: Tensor, weight: Tensor, running_alpha: Tensor | None, divisor: int, sigmoid: bool, keeps_scores: bool
) -> list[Tensor]:
    """alpha, then beta where there is a running average, then the scores [B, T, H] where they are kept."""
    run = torch.ops.affine_attention.projection if torch.compiler.is_compiling() else _run_forward
    return run(hidden, weight, running_alpha, divisor, sigmoid, keeps_scores)


def _run_forward(
    hidden: Tensor, weight: Tensor, running_alpha: Tensor | None, divisor: int, sigmoid: bool, keeps_scores: bool
) -> list[Tensor]:
    device = hidden.get_device()
    has_beta = running_alpha is not None
    key = (hidden.shape, weight.shape, hidden.dtype, device, has_beta, divisor, sigmoid, keeps_scores)
    plan = _plans.get(key)
    if plan is None:
        spec = _spec_of(hidden, weight, has_beta, divisor, sigmoid)
        launches = LaunchSet({"forward": [forward_launch(spec, *map(Slot, range(6)))]})
        plan = _keep(key, launches, _outputs(hidden, weight, has_beta, keeps_scores), hidden.device)
    inputs = [_addressable(hidden), _addressable(weight), _addressable(running_alpha)]
    return on_device(device, _launch_forward, plan, inputs, has_beta, keeps_scores, device)


def _launch_forward(
    plan: _Plan, inputs: list[Tensor | None], has_beta: bool, keeps_scores: bool, device: int
) -> list[Tensor]:
    outputs = [allocate() for allocate in plan.outputs]
    tensors = [*inputs, outputs[-1] if keeps_scores else None, outputs[0], outputs[1] if has_beta else None]
    plan.launches.run("forward", plan.launches.values(tensors), device)
    return outputs


def _outputs(hidden: Tensor, weight: Tensor, has_beta: bool, keeps_scores: bool) -> list[tuple[Any, torch.dtype]]:
    """Shape and dtype of alpha, of beta where there is a running average, and of the scores where they are kept."""
    (batch, length, _), heads = hidden.shape, weight.shape[0]
    rows, scores = ((batch, heads, length), torch.float32), ((batch, length, heads), hidden.dtype)
    return [rows, *([rows] if has_beta else []), *([scores] if keeps_scores else [])]


def _run_backward(
    hidden: Tensor, weight: Tensor, scores: Tensor, token_mask: Tensor | None, grad_alpha: Tensor | None,
    grad_beta: Tensor | None, divisor: int, sigmoid: bool, wants_hidden: bool, wants_weight: bool, wants_sums: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of hidden, weight and collected, those that are wanted."""
    device = hidden.get_device()
    wants = (wants_hidden, wants_weight, wants_sums)
    if not wants_sums:
        token_mask = None
    missing = (token_mask is None, grad_alpha is None, grad_beta is None)
    key = (hidden.shape, weight.shape, hidden.dtype, device, missing, divisor, sigmoid, *wants)
    plan = _plans.get(key)
    if plan is None:
        spec = _spec_of(hidden, weight, grad_beta is not None, divisor, sigmoid)
        arrays = spec.partial_arrays(wants)
        partial = {name: Slot(9 + n) for n, name in enumerate(arrays)}
        launches = LaunchSet(
            {"backward": backward_launches(spec, wants, [Slot(n) for n in range(7)], partial, Slot(7), Slot(8))},
            *([Workspace(arrays, hidden.device)] if arrays else []),
        )
        plan = _keep(key, launches, _gradient_outputs(hidden, weight, *wants), hidden.device)
    inputs = [_addressable(x) for x in (hidden, weight, scores, token_mask, grad_alpha, grad_beta)]
    return on_device(device, _launch_backward, plan, inputs, wants, device)


def _launch_backward(plan: _Plan, inputs: list[Tensor | None], wants: tuple[bool, ...], device: int) -> list[Tensor]:
    outputs = [allocate() for allocate in plan.outputs]
    found = iter(outputs)
    tensors = [*inputs, *[next(found) if want else None for want in wants]]
    buffers = [workspace.new() for workspace in plan.launches.workspaces]
    plan.launches.run("backward", plan.launches.values(tensors, *buffers), device)
    return outputs


def _gradient_outputs(
    hidden: Tensor, weight: Tensor, wants_hidden: bool, wants_weight: bool, wants_sums: bool
) -> list[tuple[Any, torch.dtype]]:
    """Shape and dtype of the gradients of hidden, weight and collected, those that are wanted."""
    gradients = [(hidden.shape, hidden.dtype), (weight.shape, weight.dtype), ((weight.shape[0] + 1,), torch.float64)]
    wants = (wants_hidden, wants_weight, wants_sums)
    return [gradient for gradient, want in zip(gradients, wants, strict=True) if want]


def _addressable(x: Tensor | None) -> Tensor | None:
    """The tensor as the kernels address it: contiguous, at a multiple of 16 bytes."""
    if x is None:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.data_ptr() & 15 == 0 else x.clone()


def _keep(
    key: tuple[Any, ...], launches: LaunchSet, outputs: list[tuple[Any, torch.dtype]], device: torch.device
) -> _Plan:
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    plan = _plans[key] = _Plan(launches, [contiguous(tuple(shape), dtype, device) for shape, dtype in outputs])
    return plan


class ProjectionSpec(NamedTuple):
    """What the launches of a projection depend on apart from the addresses of its tensors."""

    shape: tuple[int, int, int]  # of hidden: B, T, M
    heads: int
    dtype: torch.dtype
    has_beta: bool
    divisor: int
    sigmoid: bool

    @property
    def row_arrays(self) -> Arrays:
        """alpha, beta where there is one, and the scores: what the forward leaves for the backward."""
        batch, length, _ = self.shape
        rows = ((batch, self.heads, length), torch.float32)
        beta: Arrays = {"beta": rows} if self.has_beta else {}
        return {"alpha": rows, **beta, "scores": ((batch, length, self.heads), self.dtype)}

    def parts(self, wants: tuple[bool, bool, bool]) -> tuple[int, int]:
        """(CTAs per chunk of M, chunks) of the backward."""
        batch, length, dim = self.shape
        block_t, _, block_m = backward_tile(length, self.heads, dim, self.dtype)
        chunks = _blocks(dim, block_m) if wants[0] or wants[1] else 0
        return _num_parts(batch * _blocks(length, block_t), chunks), chunks

    def partial_arrays(self, wants: tuple[bool, bool, bool]) -> Arrays:
        """What the first launch of the backward leaves for the second."""
        parts, _ = self.parts(wants)
        weight: Arrays = {"partial_weight": ((parts, self.heads, self.shape[2]), torch.float32)} if wants[1] else {}
        sums: Arrays = {"partial_sums": ((parts, self.heads + 1), torch.float64)} if wants[2] else {}
        return {**weight, **sums}


def forward_launch(spec: ProjectionSpec, *slots: Slot | None) -> Launch:
    """`slots` are hidden, weight, running_alpha, scores, alpha and beta."""
    (batch, length, dim), heads = spec.shape, spec.heads
    block_t, block_h, block_m = forward_tile(length, heads, dim, spec.dtype)
    return _launch(
        projection_kernel, (batch * _blocks(length, block_t),), *slots, length, float(spec.divisor), heads, dim,
        block_t, block_h, block_m, spec.sigmoid, num_stages=4,
    )  # fmt: skip


def backward_launches(
    spec: ProjectionSpec, wants: tuple[bool, bool, bool], slots: Sequence[Slot | None], partial: dict[str, Slot],
    grad_weight: Slot | None, grad_sums: Slot | None,
) -> list[Launch]:  # fmt: skip
    """`slots` are hidden, weight, scores, token_mask and the gradients of alpha, beta and hidden."""
    (batch, length, dim), heads = spec.shape, spec.heads
    _, wants_weight, wants_sums = wants
    block_t, block_h, block_m = backward_tile(length, heads, dim, spec.dtype)
    parts, chunks = spec.parts(wants)
    partial_weight, partial_sums = partial.get("partial_weight"), partial.get("partial_sums")
    launches = [
        _launch(
            projection_backward_kernel, (parts, chunks + wants_sums), *slots, partial_weight, partial_sums, length,
            batch * _blocks(length, block_t), float(spec.divisor), heads, dim, chunks, block_t, block_h, block_m,
            spec.sigmoid, num_stages=3,
        )
    ]  # fmt: skip
    if not (wants_weight or wants_sums):
        return launches
    block_p, block_w, block_s = min(64, 1 << (parts - 1).bit_length()), 64, 16
    weight_programs = _blocks(heads * dim, block_w) if wants_weight else 0
    programs = weight_programs + (_blocks(heads + 1, block_s) if wants_sums else 0)
    launches.append(
        _launch(
            projection_sum_kernel, (programs,), partial_weight, partial_sums, grad_weight, grad_sums, parts, heads, dim,
            weight_programs, block_p, block_w, block_s,
        )
    )  # fmt: skip
    return launches


def _spec_of(hidden: Tensor, weight: Tensor, has_beta: bool, divisor: int, sigmoid: bool) -> ProjectionSpec:
    return ProjectionSpec(tuple(hidden.shape), weight.shape[0], hidden.dtype, has_beta, divisor, sigmoid)  # type: ignore[arg-type]


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Launch:
    """Without fp fusion, as in coefficients.py: scores on the boundary of the clipping keep their gradient."""
    return Launch(kernel, grid, arguments, num_warps=NUM_WARPS, enable_fp_fusion=False, **options)


def _blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def _num_parts(blocks: int, chunks: int) -> int:
    """Programs per chunk of M, as few as have no more token blocks each than with PROGRAMS in all."""
    most = max(1, PROGRAMS // max(1, chunks))
    return _blocks(blocks, _blocks(blocks, most))


def forward_tile(length: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(tokens, heads, columns of M) of a tile. With few tokens W_a is most of the traffic: larger chunks of it."""
    block_h, half = _power_of_two(heads), dtype.itemsize == 2
    block_t = min(64 if half and block_h <= 64 else 32, _power_of_two(length))
    columns = (256 if block_t * block_h <= 512 else 64) if half else 32
    return block_t, block_h, min(columns, _power_of_two(dim))


def backward_tile(length: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(tokens, heads, columns of M) of a tile; [heads, columns] are summed in registers.

    The loads of three iterations, at most 90 KiB, fit the shared memory of every GPU from compute capability 8.0.
    """
    block_h, half = _power_of_two(heads), dtype.itemsize == 2
    most = max(16, min(64, 2048 // block_h) if half else min(32, 1024 // block_h))
    columns = 128 if half and block_h <= 32 else 64 if half else 32
    return min(most, _power_of_two(length)), block_h, min(columns, _power_of_two(dim))


def _power_of_two(length: int) -> int:
    """The next power of 2, 16 at least: the smallest side of a tile of an MMA."""
    return max(16, 1 << (length - 1).bit_length())


_library = torch.library.Library("affine_attention", "FRAGMENT")
_library.define(
    "projection(Tensor hidden, Tensor weight, Tensor? running_alpha, SymInt divisor, bool sigmoid, bool keeps_scores) "
    "-> Tensor[]"
)
_library.define(
    "projection_backward(Tensor hidden, Tensor weight, Tensor scores, Tensor? token_mask, Tensor? grad_alpha, "
    "Tensor? grad_beta, SymInt divisor, bool sigmoid, bool wants_hidden, bool wants_weight, bool wants_sums) "
    "-> Tensor[]"
)


def _fake_forward(hidden, weight, running_alpha, divisor, sigmoid, keeps_scores) -> list[Tensor]:
    outputs = _outputs(hidden, weight, running_alpha is not None, keeps_scores)
    return [torch.empty(shape, dtype=dtype, device=hidden.device) for shape, dtype in outputs]


def _fake_backward(hidden: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    outputs = _gradient_outputs(hidden, weight, *rest[-3:])
    return [torch.empty(shape, dtype=dtype, device=hidden.device) for shape, dtype in outputs]


for _name, _body, _fake in (
    ("projection", _run_forward, _fake_forward),
    ("projection_backward", _run_backward, _fake_backward),
):
    _library.impl(_name, _body, "CUDA")
    _library.impl(_name, _body, "CPU")  # in Triton's interpreter
    torch.library.register_fake(f"affine_attention::{_name}", _fake, lib=_library)
