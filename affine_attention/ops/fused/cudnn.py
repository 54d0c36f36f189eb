"""The whole equation at the price of cuDNN's plain attention: cuDNN between a fused prologue and a fused epilogue.

Forward: sums of V (two small kernels beside cuDNN, with `beta` only), one pass over its output (F6, F7 of
cudnn_kernels.py); or one kernel of our own, where that is faster (alone.py). Kept for the backward (cudnn_backward.py):
query, key, value, lse, the small inputs, the table of sums (1/16 of V at D = 64, 1/8 at D = 128), and O; or, where the
backward can win O back from it, the output, which the caller has anyway (faint.py). All is registered with
torch.library, so that compiled graphs hold it in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..sdpa import CudnnAttention
from ..visibility import Visibility
from . import on_device, sum_table
from .alone import forward_alone, forwards_alone
from .cudnn_backward import ELEMENTS, STAND_IN, attend_backward, backward, row_gradients, shifts_alpha
from .cudnn_kernels import epilogue_kernel
from .faint import marks_faint_rows, new_marks
from .launch import is_packed, packed_rows, strides_of
from .relaunch import relaunch
from .side import Side
from .sum_table import block_of, padded, warps_of

aten = torch.ops.aten
CUDNN = CudnnAttention("cudnn")


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
) -> str | None:
    """The reason why cuDNN's route cannot serve the call, None when it can."""
    if query.device.type != "cuda":
        return f"needs a CUDA GPU, got {query.device.type} tensors"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN takes bfloat16 and float16, got query of {query.dtype}"
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return f"query, key and value must share one dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[-1] % 8:
        return f"cuDNN takes head dims that are multiples of 8, got {query.shape[-1]}"
    if 0 in query.shape or 0 in key.shape:
        return f"needs at least one query and one key, got T = {query.shape[2]} and S = {key.shape[2]}"
    if query.shape[2] == key.shape[2] == 1:
        return "cuDNN does not take one query with one key"
    if not visibility.has_ranges_only:
        return "serves plain causal and full attention only, got segment ids or a mask"
    if visibility.window is not None:
        return f"serves plain causal and full attention only, got window = {visibility.window}"
    if visibility.is_causal and visibility.offset != 0:
        return (
            "causal attention needs as many queries as keys, "
            f"got T = {visibility.num_queries} and S = {visibility.num_keys}"
        )
    if query.shape[1] % key.shape[1]:
        return f"query heads must be a multiple of key-value heads, got H = {query.shape[1]} and G = {key.shape[1]}"
    if torch.are_deterministic_algorithms_enabled():
        return "cuDNN's backward is not deterministic, and torch.use_deterministic_algorithms asks for that"
    if torch.compiler.is_compiling():
        # PyTorch's own question cannot be asked inside a graph: only what is known to be taken.
        return None if query.shape[-1] <= 128 else "is used up to head dim 128 in compiled graphs"
    return CUDNN.why_not(_like_packed(query), _like_packed(key), False, visibility.is_causal)


def cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    visibility: Visibility,
    softmax_scale: float,
    nonnegative_alpha: bool = False,
) -> Tensor:
    """F1 to F7 for the calls that `why_not` lets pass: [B, H, T, D] in the dtype of query, differentiable once.

    `nonnegative_alpha` is the caller's word that alpha >= 0 (sigmoid and linear clipping give that). Without a gate,
    the backward then needs no tensor of its own for alpha * dOut (B5); a negative alpha makes its gradients NaN.
    """
    query, key, value = (packed_rows(x) for x in (query, key, value))
    gate = None if gate is None else packed_rows(gate)
    given = (query, key, value, alpha, beta, sink, gate)
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    args = (*given, visibility.is_causal, softmax_scale, nonnegative_alpha, keeps)
    if torch.compiler.is_compiling() or type(query) not in (Tensor, torch.nn.Parameter):
        return _forward_op(*args)[0]
    # The same functions without the registered op around them: at T = 2048 its host time shows.
    return _Eager.apply(*args)


@on_device
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    sink: Tensor | None,
    gate: Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    nonnegative_alpha: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, O, lse, table of sums, marks); empty where the backward has no use for them, or takes out for O."""
    num_queries, dim = query.shape[2:]
    heads, groups, block = query.shape[1], key.shape[1], block_of(dim)
    if alpha is None and beta is None and sink is None and gate is None:
        core, lse = _attend(query, key, value, is_causal, softmax_scale)
        return core, core.new_empty(0), lse, lse.new_empty(0), _no_marks(core)
    has_marks = keeps and marks_faint_rows(query, key, alpha, beta, gate, is_causal, softmax_scale)
    marks = new_marks(query) if has_marks else _no_marks(query)
    marked = marks if has_marks else None
    shift = keeps and shifts_alpha(alpha, gate, nonnegative_alpha, has_marks)
    table = query.new_empty(0, dtype=torch.float32) if beta is None else sum_table.new_table(value)
    if forwards_alone(query, key, is_causal, softmax_scale):
        out, core, lse = forward_alone(
            query, key, value, alpha, beta, sink, gate, softmax_scale,
            table=table, marks=marked, keeps=keeps and not has_marks, shift=shift,
        )  # fmt: skip
        return out, core, lse, table if keeps else table.new_empty(0), marks
    side = Side(query)
    core, lse = _attend(query, key, value, is_causal, softmax_scale)
    if beta is not None:
        side.run(lambda: sum_table.fill(table, value))
    side.join()
    only_core = alpha is None and beta is None and gate is None
    out = core if only_core or has_marks or not keeps else torch.empty_like(core)
    # The heads of a group share their sum of V; without beta there is none to share.
    together = 1 if beta is None else heads // groups
    blocks = -(-num_queries // block)
    relaunch(
        epilogue_kernel, (query.shape[0] * heads // together * blocks,),
        (
            core, lse, core if only_core or out is not core else None, None if only_core else out,
            marked, value, table, alpha, beta, sink, gate,
        ),
        (
            *core.stride()[:3], *lse.stride()[:3], *value.stride()[:3],
            *strides_of(alpha), *strides_of(beta), *strides_of(gate),
            num_queries, blocks, -(-key.shape[2] // block), heads, heads // groups,
            together, shift, is_causal, dim, block, padded(dim),
        ),
        num_warps=warps_of(dim, ELEMENTS),
    )  # fmt: skip
    if not keeps:
        table = table.new_empty(0)
    return out, core.new_empty(0) if out is core else core, lse, table, marks


def _no_marks(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.int8)


def _fake_forward(query, key, value, alpha, beta, sink, gate, is_causal, softmax_scale, nonnegative_alpha, keeps):
    core, lse = _attend(query, key, value, is_causal, softmax_scale)
    nothing = core.new_empty(0)
    if not keeps or (alpha is None and beta is None and gate is None):
        return core, nothing, lse, lse.new_empty(0), _no_marks(core)
    table = lse.new_empty(0 if beta is None else sum_table.table_shape(value))
    if marks_faint_rows(query, key, alpha, beta, gate, is_causal, softmax_scale):
        return core, nothing, lse, table, new_marks(query)
    return torch.empty_like(core), core, lse, table, _no_marks(core)


def _fake_backward(
    grad_out, query, key, value, core, lse, table, marks, alpha, beta, sink, gate,
    is_causal, softmax_scale, nonnegative_alpha,
):  # fmt: skip
    grads = attend_backward(torch.empty_like(core), query, key, value, core, lse, is_causal, softmax_scale)
    return (*grads, *row_gradients(query, alpha, beta, sink, gate))


def _setup_context(ctx, inputs, output):
    query, key, value, alpha, beta, sink, gate, ctx.is_causal, ctx.softmax_scale, ctx.nonnegative_alpha, _ = inputs
    out, core, lse, table, marks = output
    ctx.set_materialize_grads(False)
    plain = alpha is None and beta is None and gate is None
    kept = out if plain or marks.numel() else core
    ctx.save_for_backward(query, key, value, kept, lse, table, marks, alpha, beta, sink, gate)


def _input_grads(run_backward, ctx, grad_out):
    needs = ctx.needs_input_grad
    if grad_out is None:
        return (None,) * len(needs)
    query, key, value, core, lse, table, marks, alpha, beta, sink, gate = ctx.saved_tensors
    grads = run_backward(
        grad_out, query, key, value, core, lse, table, marks, alpha, beta, sink if needs[5] else None, gate,
        ctx.is_causal, ctx.softmax_scale, ctx.nonnegative_alpha,
    )  # fmt: skip
    return (*(grad if need else None for grad, need in zip(grads, needs[:7], strict=True)), *(None,) * 4)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        output = _forward(*args)
        _setup_context(ctx, args, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        return _input_grads(backward, ctx, grad_out)


def _compiled_backward(ctx, grad_out, *grads_of_kept):
    assert all(grad is None for grad in grads_of_kept), "what is kept is for the backward only"
    return _input_grads(_backward_op, ctx, grad_out)


_forward_op = torch.library.custom_op("affine_attention::cudnn_forward", _forward, mutates_args=())
_forward_op.register_fake(_fake_forward)
_backward_op = torch.library.custom_op("affine_attention::cudnn_backward", backward, mutates_args=())
_backward_op.register_fake(_fake_backward)
_forward_op.register_autograd(_compiled_backward, setup_context=_setup_context)


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention: (O, lse), with lse [B, H, T] or [B, H, T, 1] as the kernel below has it."""
    if query.device.type == "cpu":
        return STAND_IN.forward(query, key, value, None, is_causal, softmax_scale)[:2]
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=softmax_scale
    )[:2]


def _like_packed(x: Tensor) -> Tensor:
    """What `packed_rows` will hand to cuDNN, to be asked about: no copy is made for the question."""
    if is_packed(x):
        return x
    return torch.empty((1, 1, 1, x.shape[-1]), dtype=x.dtype, device=x.device).expand(x.shape)
