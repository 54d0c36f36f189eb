"""Turns hidden states into alpha and beta, and collects alpha for its running average (Eq. 7 and 8).

Forward only reads `running_alpha`. What a step has seen of alpha is collected as the *gradient* of a small buffer:
backward runs once for each micro-batch, whether activations were checkpointed or not, and autograd adds micro-batches
up, so nothing is counted twice and nothing is written inside forward (docs/decisions/0001).
commit.py updates the running average from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.fused import HAS_TRITON, INTERPRETED
from .arguments import check_place, check_size
from .mechanism import Mechanism

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton's interpreter multiplies the bit patterns of bf16 tiles.
PROJECTED_DTYPES = FUSED_DTYPES[1:] if INTERPRETED else FUSED_DTYPES
MAX_PROJECTED_BYTES = 256  # of one column of W_a: 128 heads in bf16, 64 in fp32; more would spill registers


def linear_clipping(x: Tensor) -> Tensor:
    """Eq. 11: 0.1 x + 0.5, clipped to [0, 1]."""
    return torch.clamp(0.1 * x + 0.5, 0.0, 1.0)


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear_clipping": linear_clipping,
    "sigmoid": torch.sigmoid,
}


class _CollectAlpha(torch.autograd.Function):
    """The identity on alpha [B, T, H]. Its backward returns sums of alpha and a number of tokens for `collected`."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, token_mask: Tensor | None, collected: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, token_mask)
        ctx.dtype = collected.dtype
        return alpha.view_as(alpha)

    @staticmethod
    def backward(ctx: Any, grad_alpha: Tensor):
        alpha, token_mask = ctx.saved_tensors
        if token_mask is None:
            total = alpha.sum((0, 1), dtype=ctx.dtype)
            count = torch.full_like(total[:1], alpha.shape[0] * alpha.shape[1])
        else:
            # Padding may hold anything, NaN too: it is replaced, not multiplied by 0.
            total = alpha.masked_fill(~token_mask[..., None], 0).sum((0, 1), dtype=ctx.dtype)
            count = token_mask.sum(dtype=ctx.dtype)[None]
        return grad_alpha, None, torch.cat([total, count])


def _is_served(x: Tensor) -> bool:
    """True where the kernels take a tensor [B, T, ...]; a compiled graph traces it."""
    return (
        (x.is_cuda or INTERPRETED)
        and HAS_TRITON
        and x.dtype in FUSED_DTYPES
        and type(x) is Tensor  # no fake tensor and no DTensor
        and x.numel() > 0
    )


def _can_fuse(scores: Tensor) -> bool:
    """True where one Triton kernel replaces the formula; compiled graphs fuse the formula themselves."""
    return not torch.compiler.is_compiling() and _is_served(scores)


def _can_project(proj: nn.Module, hidden: Tensor) -> bool:
    """True where one Triton kernel replaces the projection and the formula, in compiled graphs too.

    The module is not called then, so it must be a linear layer without a wrapper, hooks or a conversion.
    """
    if type(proj) is not nn.Linear or not _is_served(hidden):
        return False
    # Not proj.weight: an attribute of a module that is a parameter takes ten times as long to find.
    parameters = proj._parameters
    weight: Any = parameters.get("weight")
    dtype = hidden.dtype
    return (
        type(weight) in (nn.Parameter, Tensor)
        and weight.dtype == dtype
        and dtype in PROJECTED_DTYPES
        and weight.get_device() == hidden.get_device()
        and weight.shape[0] * dtype.itemsize <= MAX_PROJECTED_BYTES
        and parameters["bias"] is None
        and not _is_altered(proj)
        and not _autocasts(hidden)
    )


def _is_altered(module: nn.Module) -> bool:
    """True where a call of the module does more than its forward: hooks, or a method that accelerate has wrapped."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or ("forward" in module.__dict__)  # fmt: skip


def _autocasts(hidden: Tensor) -> bool:
    """True where autocast would run a linear layer in another dtype."""
    kind = "cuda" if hidden.is_cuda else "cpu"
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != hidden.dtype


@functools.cache
def _fused_coefficients() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function, imported on first use because it imports Triton."""
    from ..ops.fused.coefficients import fused_coefficients

    return fused_coefficients


def _projected_coefficients(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Imported on first use, as above; without a cache, which a compiled graph does not trace."""
    from ..ops.fused.projection import projected_coefficients

    return projected_coefficients(*arguments)


class AffineScale(nn.Module):
    """alpha = phi(W_a x) for every query head, and beta = (running_alpha - alpha) / N where the mechanism has a bias.

    Attributes:
        proj: W_a, no bias.
        running_alpha: [H] fp32 in every dtype of the model; part of the checkpoint (mechanisms with a bias only).
    """

    running_alpha: Tensor
    collected: Tensor
    shard_mesh: Any = None  # the ranks that hold the other heads, under tensor parallelism
    sequence_ranks: tuple[int, ...] | None = None  # those that hold the sequence's parts, under sequence parallelism

    def __init__(
        self,
        mechanism: Mechanism,
        embed_dim: int,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(mechanism, Mechanism):
            raise TypeError(f"mechanism must be a Mechanism, got {type(mechanism).__name__}; use Mechanism.named")
        check_size("embed_dim", embed_dim)
        check_size("num_heads", num_heads)
        check_place(device, dtype)
        if mechanism.activation is None:
            raise ValueError(
                f"AffineScale needs a mechanism with an alpha, got {mechanism.name!r} with activation=None"
            )
        self.mechanism = mechanism
        self.activation = ACTIVATION_FUNCTIONS[mechanism.activation]
        self.proj = nn.Linear(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        if mechanism.bias:
            self.register_buffer("running_alpha", torch.empty(num_heads, dtype=torch.float32, device=device))
            self.register_buffer("collected", _new_collected(num_heads, self.running_alpha.device), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.proj.weight, std=self.mechanism.init_std)
        if self.mechanism.bias:
            self.running_alpha.fill_(self.mechanism.running_alpha_start)
            self.discard_collected()

    def forward(
        self, hidden: Tensor, num_keys: Tensor | int | None = None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """alpha and beta [B, H, T] in fp32 (fp64 for fp64 input); beta is None for a mechanism without a bias.

        Args:
            hidden: [B, T, M], the input of q_proj.
            num_keys: N of Eq. 8, broadcastable to [B, H, T].
            token_mask: boolean [B, T], True for real tokens: padding does not enter the running average.
        """
        has_one_divisor = not self.mechanism.bias or isinstance(num_keys, int)
        proj = self.proj
        may_use_kernels = has_one_divisor and (hidden.is_cuda or INTERPRETED)
        projects = may_use_kernels and _can_project(proj, hidden)
        source = hidden if projects else proj(hidden)
        running_alpha = collected = None
        if self.mechanism.bias:
            if num_keys is None:
                raise ValueError("num_keys is missing: beta = (running_alpha - alpha) / num_keys needs it (Eq. 8)")
            running_alpha, collected = self.running_alpha, self._collected(source)
        activation = self.mechanism.activation
        if projects:
            weight = proj.weight
            return _projected_coefficients(hidden, weight, activation, running_alpha, num_keys, token_mask, collected)
        scores_BTH = source
        if may_use_kernels and _can_fuse(scores_BTH):
            return _fused_coefficients()(scores_BTH, activation, running_alpha, num_keys, token_mask, collected)
        # Row quantities in fp32 or better: in bf16 alpha would move in steps of 0.004.
        wide = scores_BTH.dtype in (torch.float32, torch.float64)
        alpha_BTH = self.activation(scores_BTH if wide else scores_BTH.float())
        if collected is not None:
            alpha_BTH = _CollectAlpha.apply(alpha_BTH, token_mask, collected)
        alpha = alpha_BTH.transpose(1, 2)
        if running_alpha is None or num_keys is None:
            return alpha, None
        return alpha, (running_alpha[:, None] - alpha) / num_keys

    def _collected(self, source: Tensor) -> Tensor | None:
        """The leaf that collects alpha, on the device of `source`; None where this call is not collected."""
        if not (self.training and torch.is_grad_enabled()):
            return None
        collected: Any = self._buffers["collected"]
        if collected.device != source.device:
            # Built on the meta device and loaded since: no checkpoint holds this buffer.
            collected = torch.zeros_like(collected, device=source.device, requires_grad=True)
            self.collected = collected
        return collected

    def attend(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        num_keys: Tensor | int | None,
        token_mask: Tensor | None,
        sink: Tensor | None,
        gate_of: Callable[[Tensor], Tensor | None],
        softmax_scale: float | None,
    ) -> Tensor | None:
        """Causal attention with the alpha and beta of `forward`, in one autograd node; None where that is not served.

        It serves training on a Hopper GPU: a node costs the host as much as several launches. `gate_of` turns hidden
        states into the gate.
        """
        mechanism, proj = self.mechanism, self._modules["proj"]
        has_divisor = not mechanism.bias or isinstance(num_keys, int)
        if not (query.is_cuda and has_divisor and torch.is_grad_enabled() and _can_project(proj, hidden)):  # type: ignore[arg-type]
            return None
        if _is_altered(self):
            return None
        weight: Any = proj._parameters["weight"]  # type: ignore[union-attr]
        from ..ops.fused.projected import can_project, projected_attention

        if not can_project(query, key, value, hidden, weight, sink):
            return None
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return None
        running_alpha = collected = None
        if mechanism.bias:
            running_alpha, collected = self._buffers["running_alpha"], self._collected(hidden)
        gate = gate_of(hidden)
        if collected is None and not (
            weight.requires_grad or any(x is not None and x.requires_grad for x in (hidden, query, key, value, gate))
        ):
            return None
        return projected_attention(
            query, key, value, sink, gate, hidden, weight, running_alpha, collected, token_mask, softmax_scale,
            num_keys if mechanism.bias else 1, mechanism.activation == "sigmoid",  # type: ignore[arg-type]
        )  # fmt: skip

    def discard_collected(self) -> None:
        """Forgets what was collected since the last commit (after a skipped optimizer step)."""
        self.collected.grad = None

    def _apply(self, fn, recurse=True):
        """Keeps running_alpha fp32 and `collected` a leaf of its own dtype through .to(), .half(), .cuda() and others.

        `collected` does not go through `fn`: its values are never read, and a device may not have its dtype.
        """
        if not self.mechanism.bias:
            return super()._apply(fn, recurse)
        running_alpha, collected = self.running_alpha, self._buffers.pop("collected")
        super()._apply(fn, recurse)
        self.running_alpha = _moved_in_own_dtype(running_alpha, self.running_alpha)
        moved = _new_collected(len(running_alpha), self.running_alpha.device)
        if collected is not None and collected.grad is not None:
            moved.grad = collected.grad.to(moved.device, moved.dtype)
        self._buffers["collected"] = moved
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *rest):
        """A checkpoint without running_alpha is an error even where other missing keys are accepted."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        key = f"{prefix}running_alpha"
        if self.mechanism.bias and key not in state_dict and f"{prefix}proj.weight" in state_dict:
            raise ValueError(
                f"the checkpoint has {prefix}proj.weight but not {key}: it was not written by this package or has lost "
                "its running average; add the tensor, or set it to a start value on purpose"
            )

    def extra_repr(self) -> str:
        return f"activation={self.mechanism.activation}, bias={self.mechanism.bias}, N={self.mechanism.bias_length}"


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the sums of alpha: fp64, and fp32 on Apple's GPUs, which have no fp64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _new_collected(num_heads: int, device: torch.device) -> Tensor:
    """A leaf whose gradient holds the sums of alpha and a count of tokens; its values are never read."""
    return torch.zeros(num_heads + 1, dtype=sum_dtype(device), device=device, requires_grad=True)


def _moved_in_own_dtype(before: Tensor, after: Tensor) -> Tensor:
    """The tensor as it was, on the device where `_apply` has put it; what to_empty left stays as it is."""
    if after.dtype == before.dtype:
        return after
    if before.is_meta or after.is_meta:
        return torch.empty_like(before, device=after.device)
    return before.to(after.device)
