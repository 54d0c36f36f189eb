"""Turns hidden states into alpha and beta, and keeps the running average of alpha (Eq. 7 to 9).

Forward only reads `running_alpha`. What a step has seen of alpha is collected as the *gradient* of a small buffer:
backward runs once for each micro-batch, whether activations were checkpointed or not, and autograd adds micro-batches
up, so nothing is counted twice and nothing is written inside forward (docs/decisions/0001).
`commit_running_alpha` folds it in, once per optimizer step and for all layers and ranks together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mechanism import Mechanism


def linear_clipping(x: Tensor) -> Tensor:
    """Eq. 11: 0.1 x + 0.5, clipped to [0, 1]."""
    return torch.clamp(0.1 * x + 0.5, 0.0, 1.0)


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear_clipping": linear_clipping,
    "sigmoid": torch.sigmoid,
}


class _CollectAlpha(torch.autograd.Function):
    """The identity on alpha [B, T, H]; its backward gives `collected` the sums of alpha and the number of tokens."""

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


class AffineScale(nn.Module):
    """alpha = phi(W_a x) for every query head, and beta = (running_alpha - alpha) / N where the mechanism has a bias.

    Attributes:
        proj: W_a, no bias.
        running_alpha: [H] fp32 in every dtype of the model; part of the checkpoint (mechanisms with a bias only).
    """

    running_alpha: Tensor
    collected: Tensor
    shard_mesh: Any = None  # the ranks that hold the other heads, under tensor parallelism

    def __init__(
        self,
        mechanism: Mechanism,
        embed_dim: int,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if mechanism.activation is None:
            raise ValueError(
                f"AffineScale needs a mechanism with an alpha, got {mechanism.name!r} with activation=None"
            )
        self.mechanism = mechanism
        self.activation = ACTIVATION_FUNCTIONS[mechanism.activation]
        self.proj = nn.Linear(embed_dim, num_heads, bias=False, device=device, dtype=dtype)
        if mechanism.bias:
            self.register_buffer("running_alpha", torch.empty(num_heads, dtype=torch.float32, device=device))
            # Sums of alpha and a count of tokens live in its .grad; the values are never read.
            collected = torch.zeros(num_heads + 1, dtype=torch.float64, device=device, requires_grad=True)
            self.register_buffer("collected", collected, persistent=False)
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
        scores_BTH = self.proj(hidden)
        # Row quantities in fp32 or better: in bf16 alpha would move in steps of 0.004.
        alpha_BTH = self.activation(scores_BTH if scores_BTH.dtype == torch.float64 else scores_BTH.float())
        if self.mechanism.bias and self.training and torch.is_grad_enabled():
            if self.collected.device != alpha_BTH.device:
                # Built on the meta device and loaded since: no checkpoint holds this buffer.
                self.collected = torch.zeros_like(self.collected, device=alpha_BTH.device, requires_grad=True)
            alpha_BTH = _CollectAlpha.apply(alpha_BTH, token_mask, self.collected)
        alpha = alpha_BTH.transpose(1, 2)
        if not self.mechanism.bias:
            return alpha, None
        if num_keys is None:
            raise ValueError("num_keys is missing: beta = (running_alpha - alpha) / num_keys needs it (Eq. 8)")
        return alpha, (self.running_alpha[:, None] - alpha) / num_keys

    def discard_collected(self) -> None:
        """Forgets what was collected since the last commit (after a skipped optimizer step)."""
        self.collected.grad = None

    def _apply(self, fn, recurse=True):
        """Keeps running_alpha fp32 and `collected` a fp64 leaf through .to(), .half(), .cuda() and the like."""
        if not self.mechanism.bias:
            return super()._apply(fn, recurse)
        running_alpha, collected = self.running_alpha, self.collected
        super()._apply(fn, recurse)
        self.running_alpha = _moved_in_own_dtype(running_alpha, self.running_alpha)
        moved = _moved_in_own_dtype(collected.detach(), self.collected.detach()).requires_grad_()
        if collected.grad is not None:
            moved.grad = collected.grad.to(moved.device)
        self.collected = moved
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *rest):
        """A checkpoint without running_alpha is an error even where other missing keys are let pass."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        key = f"{prefix}running_alpha"
        if self.mechanism.bias and key not in state_dict and f"{prefix}proj.weight" in state_dict:
            raise ValueError(
                f"the checkpoint has {prefix}proj.weight but not {key}: it was not written by this package or has lost "
                "its running average; add the tensor, or set it to a start value on purpose"
            )

    def extra_repr(self) -> str:
        return f"activation={self.mechanism.activation}, bias={self.mechanism.bias}, N={self.mechanism.bias_length}"


def _moved_in_own_dtype(before: Tensor, after: Tensor) -> Tensor:
    """The tensor as it was, on the device where `_apply` has put it; what to_empty left stays as it is."""
    if after.dtype == before.dtype:
        return after
    if before.is_meta or after.is_meta:
        return torch.empty_like(before, device=after.device)
    return before.to(after.device)


@torch.no_grad()
def commit_running_alpha(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Folds what the step has seen of alpha into every `running_alpha`: the one line after `optimizer.step()`.

    running_alpha <- momentum * running_alpha + (1 - momentum) * mean of alpha over all real tokens of all micro-batches
    since the last commit and, where torch.distributed runs, of all ranks: one all-reduce for all layers together.

    Args:
        model: any module with `AffineScale` modules inside; every rank must call.
        group: the ranks that hold different data; None means all.
    """
    scales = affine_scales(model)
    if not scales:
        return
    parts = [torch.zeros_like(s.collected) if s.collected.grad is None else s.collected.grad for s in scales]
    stacked = torch.cat([part.to(parts[0].device) for part in parts])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        if group is None and any(s.shard_mesh is not None for s in scales):
            raise ValueError(
                "group is missing: under tensor parallelism ranks hold different heads, whose averages must not be "
                "mixed; pass the ranks that hold different data, affine_attention.hf.data_parallel_group(model)"
            )
        dist.all_reduce(stacked, group=group)
    for scale, part in zip(scales, stacked.split([len(part) for part in parts]), strict=True):
        running = scale.running_alpha
        total, count = part[:-1].to(running.device), part[-1].to(running.device)
        mean = (total / count).to(running.dtype)
        rho = scale.mechanism.momentum
        # No real token in the step, or an alpha that is not finite: the average stays. No host sync on a GPU.
        seen = (count > 0) & torch.isfinite(mean).all()
        running.copy_(torch.where(seen, rho * running + (1 - rho) * mean, running))
        scale.discard_collected()


def discard_running_alpha(model: nn.Module) -> None:
    """Forgets what was seen since the last commit: for a step that is skipped (overflow in a GradScaler, say)."""
    for scale in affine_scales(model):
        scale.discard_collected()


def commit_after_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> torch.utils.hooks.RemovableHandle:
    """Makes every `optimizer.step()` end with `commit_running_alpha(model)`; returns a handle to undo it."""
    return optimizer.register_step_post_hook(lambda *_: commit_running_alpha(model, group))


def affine_scales(model: nn.Module) -> list[AffineScale]:
    """The modules of a model that keep a running average, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, AffineScale) and module.mechanism.bias]
