"""Turns hidden states into alpha and beta, and collects alpha for its running average (Eq. 7 and 8).

Forward only reads `running_alpha`. What a step has seen of alpha is collected as the *gradient* of a small buffer:
backward runs once for each micro-batch, whether activations were checkpointed or not, and autograd adds micro-batches
up, so nothing is counted twice and nothing is written inside forward (docs/decisions/0001).
commit.py updates the running average from it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.nn import Linear, Parameter

from ..ops.dtypes import row_dtype
from ..ops.fused import HAS_TRITON, INTERPRETED
from .arguments import check_place, check_size
from .coefficients import ALPHA_RULES, BETA_RULES
from .mechanism import Mechanism

WIDE = (torch.float32, torch.float64)
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton's interpreter multiplies the bit patterns of bf16 tiles.
PROJECTED_DTYPES = FUSED_DTYPES[1:] if INTERPRETED else FUSED_DTYPES
MAX_PROJECTED_BYTES = 256  # of one column of W_a: 128 heads in bf16, 64 in fp32; more would spill registers


def linear_clipping(x: Tensor) -> Tensor:
    """Eq. 11: 0.1 x + 0.5, clipped to [0, 1]."""
    return ALPHA_RULES["linear_clipping"].function(x, 0.5)


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
    """True where one Triton kernel replaces the projection and the formula, in compiled graphs too."""
    return _is_served(hidden) and hidden.dtype in PROJECTED_DTYPES and _is_plain_linear(proj, hidden)


def _is_plain_linear(proj: nn.Module, hidden: Tensor) -> bool:
    """True for a linear layer without a wrapper, hooks or a conversion, which a kernel may replace.

    Every name that is read here becomes a guard of a compiled layer. `torch.X` would be two and a third, in Python,
    because other modules have `torch` too.
    """
    # A subclass that computes the same is torchtitan's Linear, for one.
    if (type(proj) is not Linear and type(proj).forward is not Linear.forward) or type(hidden) is not Tensor:
        return False
    # Not proj.weight: an attribute of a module that is a parameter takes ten times as long to find.
    parameters = proj._parameters
    weight: Any = parameters.get("weight")
    dtype = hidden.dtype
    if type(weight) not in (Parameter, Tensor) or weight.dtype != dtype or parameters["bias"] is not None:
        return False
    if weight.get_device() != hidden.get_device() or weight.shape[0] * dtype.itemsize > MAX_PROJECTED_BYTES:
        return False
    kind = "cuda" if hidden.is_cuda else "cpu"
    autocasts = is_autocast_enabled(kind) and get_autocast_dtype(kind) != dtype
    return not autocasts and not _is_altered(proj)


def _both_scores(hidden: Tensor, proj: nn.Module, beta_proj: nn.Module) -> tuple[Tensor, Tensor] | None:
    """W_a x and W_b x from one GEMM, which reads the hidden states once; None where the modules must be called."""
    weights: list[Any] = []
    for module in (proj, beta_proj):
        if type(module) is not Linear and type(module).forward is not Linear.forward:
            return None
        if module.bias is not None or _is_altered(module):
            return None
        weights.append(module.weight)
    w_a, w_b = weights
    if not {type(w_a), type(w_b)} <= {Parameter, Tensor} or w_a.dtype != w_b.dtype or w_a.device != w_b.device:
        return None
    of_alpha, of_beta = wide(nn.functional.linear(hidden, torch.cat([w_a, w_b]))).chunk(2, -1)
    return of_alpha, of_beta


def _is_altered(module: nn.Module) -> bool:
    """True where a call of the module does more than its forward: hooks, or a method that accelerate has wrapped."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or ("forward" in module.__dict__)  # fmt: skip


@functools.cache
def _fused_coefficients() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function, imported on first use because it imports Triton."""
    from ..ops.fused.coefficients import fused_coefficients

    return fused_coefficients


def _projected_coefficients(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """Imported on first use, as above; without a cache, which a compiled graph does not trace."""
    from ..ops.fused.projection import projected_coefficients

    return projected_coefficients(*arguments)


# Every AffineScale of this process by its id, whatever model it belongs to: commit.py finds new ones here.
ALL_SCALES: weakref.WeakValueDictionary[int, AffineScale] = weakref.WeakValueDictionary()


class AffineScale(nn.Module):
    """alpha and beta for every query head, by the rules of the mechanism (coefficients.py).

    The paper's: alpha = phi(W_a x) and beta = (running_alpha - alpha) / N.

    Attributes:
        proj: W_a, no bias; None for a rule of alpha that does not look at the token.
        head_alpha: [H], one alpha per head, for activation="per_head"; else None.
        beta_proj: W_b, no bias, for bias="free"; else None.
        head_beta: [H], c_h of beta = -c_h alpha / N, for bias="centred"; else None.
        running_alpha: [H] fp32 in every dtype of the model; part of the checkpoint (Eq. 8's beta only).
    """

    running_alpha: Tensor
    collected: Tensor
    shard_mesh: Any = None  # the ranks that hold the other heads, under tensor parallelism
    sequence_ranks: tuple[int, ...] | None = None  # those that hold the sequence's parts, under sequence parallelism

    def __new__(cls, *_: Any, **__: Any) -> AffineScale:
        # Copies and unpickled modules come this way too.
        scale = super().__new__(cls)
        ALL_SCALES[id(scale)] = scale
        return scale

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
        self.mechanism, self.num_heads = mechanism, num_heads
        # Attributes, not properties of the mechanism: forward reads them in every layer and step.
        self.beta_name, self.initial_alpha = mechanism.beta_name, mechanism.initial_alpha
        self.has_kernels, self.has_running_alpha = mechanism.has_kernels, mechanism.has_running_alpha
        self.has_bias, self.is_sigmoid = bool(mechanism.bias), mechanism.activation == "sigmoid"
        beta_rule = mechanism.beta_rule
        scores = ALPHA_RULES[mechanism.activation].scores
        term = None if beta_rule is None else beta_rule.term
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.proj = nn.Linear(embed_dim, num_heads, bias=False, **like) if scores == "token" else None
        self.head_alpha = nn.Parameter(torch.empty(num_heads, **like)) if scores == "head" else None
        self.beta_proj = nn.Linear(embed_dim, num_heads, bias=False, **like) if term == "token" else None
        self.head_beta = nn.Parameter(torch.empty(num_heads, **like)) if term == "head" else None
        if mechanism.has_running_alpha:
            self.register_buffer("running_alpha", torch.empty(num_heads, dtype=torch.float32, device=device))
            self.register_buffer("collected", _new_collected(num_heads, self.running_alpha.device), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for start in self.starts():
            start.fill()
        if self.mechanism.has_running_alpha:
            self.discard_collected()

    def starts(self, identity: bool = False) -> Iterator[Start]:
        """The initial values of all parameters and of the running average, in the order in which they are drawn.

        Args:
            identity: for a start whose alpha is `mechanism.initial_alpha` and whose beta is 0 for every token.
        """
        mechanism = self.mechanism
        for proj in (self.proj, self.beta_proj):
            if proj is not None:
                yield Start(proj.weight, 0.0, 0.0 if identity else mechanism.init_std)
        if self.head_alpha is not None:
            yield Start(self.head_alpha, mechanism.initial_alpha)
        if self.head_beta is not None:
            yield Start(self.head_beta, 0.0)
        if mechanism.has_running_alpha:
            yield Start(self.running_alpha, mechanism.initial_alpha if identity else mechanism.running_alpha_start)

    def forward(
        self, hidden: Tensor, num_keys: Tensor | int | None = None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """alpha and beta [B, H, T] in fp32 (fp64 for fp64 input); beta is None for a mechanism without a bias.

        Args:
            hidden: [B, T, M], the input of q_proj.
            num_keys: N of Eq. 8, broadcastable to [B, H, T].
            token_mask: boolean [B, T], True for real tokens: padding does not enter the running average.
        """
        # Not self.proj: an attribute of a module that is a module or buffer takes ten times as long to find.
        mechanism, proj = self.mechanism, self._modules.get("proj")
        if num_keys is None and mechanism.bias:
            raise ValueError(f"num_keys is missing: it is N of beta = {BETA_RULES[self.beta_name].formula}")
        has_one_divisor = not mechanism.bias or isinstance(num_keys, int)
        # The kernels serve the paper's rules (`has_kernels`); the others are the formulas below on every device.
        may_use_kernels = has_one_divisor and (hidden.is_cuda or INTERPRETED) and self.has_kernels
        projects = may_use_kernels and proj is not None and _can_project(proj, hidden)
        beta_proj = None if projects else self._modules.get("beta_proj")
        both = None if proj is None or beta_proj is None else _both_scores(hidden, proj, beta_proj)
        if both is not None:
            source = both[0]
        else:
            source = hidden if projects or proj is None else proj(hidden)
        running_alpha = collected = None
        if self.has_running_alpha:
            running_alpha, collected = self._buffers["running_alpha"], self._collected(source)
        if projects:
            assert proj is not None
            arguments = (mechanism.activation, running_alpha, num_keys, token_mask, collected)
            return _projected_coefficients(hidden, proj.weight, *arguments)
        if may_use_kernels and _can_fuse(source):
            arguments = (mechanism.activation, running_alpha, num_keys, token_mask, collected)
            return _fused_coefficients()(source, *arguments)
        if proj is None:
            scores_BTH = self._scores_of_heads(hidden)
        else:
            # Row quantities in fp32 or better: in bf16 alpha would move in steps of 0.004.
            scores_BTH = source if source.dtype in WIDE else source.float()
        assert mechanism.activation is not None
        alpha_BTH = ALPHA_RULES[mechanism.activation].function(scores_BTH, self.initial_alpha)
        if collected is not None:
            alpha_BTH = _CollectAlpha.apply(alpha_BTH, token_mask, collected)
        alpha = alpha_BTH.transpose(1, 2)
        if not mechanism.bias:
            return alpha, None
        if both is not None:
            term = both[1].transpose(1, 2)
        else:
            term = self._term(hidden) if running_alpha is None else running_alpha[:, None]
        return alpha, BETA_RULES[self.beta_name].function(alpha, term, num_keys)

    def _scores_of_heads(self, source: Tensor) -> Tensor:
        """What a rule of alpha without W_a receives, [B, T, H]; of `source` only the shape and dtype are used."""
        if self.head_alpha is not None:
            scores_H = wide(own_heads(self.head_alpha))
        else:
            scores_H = torch.zeros(self.num_heads, dtype=row_dtype(source.dtype), device=source.device)
        return scores_H.expand(*source.shape[:2], -1)

    def _term(self, hidden: Tensor) -> Tensor:
        """The second argument of the rule of beta: [H, 1], or [B, H, T] for W_b x."""
        if self.beta_proj is not None:
            return wide(self.beta_proj(hidden)).transpose(1, 2)
        assert self.head_beta is not None
        return wide(own_heads(self.head_beta))[:, None]

    def _collected(self, source: Tensor) -> Tensor | None:
        """The leaf that collects alpha, on the device of `source`; None where this call is not collected."""
        if not (self.training and is_grad_enabled()):
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
        gate_of: Callable[[Tensor], Tensor | None] | None,
        softmax_scale: float | None,
    ) -> Tensor | None:
        """Causal attention with the alpha and beta of `forward`, in one autograd node; None where that is not served.

        It serves training on a Hopper GPU: a node costs the host as much as several launches. `gate_of` turns hidden
        states into the gate.
        """
        proj = self._modules.get("proj")
        if proj is None or not (HAS_TRITON and self.has_kernels and query.is_cuda and is_grad_enabled()):
            return None
        if self.has_bias and not isinstance(num_keys, int):
            return None
        if not (_is_plain_linear(proj, hidden) and not _is_altered(self)):
            return None
        weight: Any = proj._parameters["weight"]
        from ..ops.fused.projected import can_project, in_eager_mode, in_graph

        if not can_project(query, key, value, hidden, weight, sink):
            return None
        compiling = is_compiling()
        if not compiling and torch._C._are_functorch_transforms_active():
            return None
        running_alpha = collected = None
        if self.has_running_alpha:
            running_alpha = self._buffers["running_alpha"]
            if self.training:
                collected = self._buffers["collected"]
                if collected.device != hidden.device:  # type: ignore[union-attr]
                    collected = self._collected(hidden)
        gate = None if gate_of is None else gate_of(hidden)
        if collected is None and not (
            weight.requires_grad or any(x is not None and x.requires_grad for x in (hidden, query, key, value, gate))
        ):
            return None
        run = in_graph if compiling else in_eager_mode
        return run(
            query, key, value, sink, gate, hidden, weight, running_alpha, collected, token_mask, softmax_scale,
            num_keys if self.has_bias else 1, self.is_sigmoid,
        )  # fmt: skip

    def discard_collected(self) -> None:
        """Forgets what was collected since the last commit (after a skipped optimizer step)."""
        self.collected.grad = None

    def _apply(self, fn, recurse=True):
        """Keeps running_alpha fp32 and `collected` a leaf of its own dtype through .to(), .half(), .cuda() and others.

        `collected` does not go through `fn`: its values are never read, and a device may not have its dtype.
        """
        if not self.mechanism.has_running_alpha:
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
        if self.mechanism.has_running_alpha and key not in state_dict and f"{prefix}proj.weight" in state_dict:
            raise ValueError(
                f"the checkpoint has {prefix}proj.weight but not {key}: it was not written by this package or has lost "
                "its running average; add the tensor, or set it to a start value on purpose"
            )

    def extra_repr(self) -> str:
        return f"activation={self.mechanism.activation}, bias={self.mechanism.bias}, N={self.mechanism.bias_length}"


class Start(NamedTuple):
    """The initial value of a tensor: drawn from a normal distribution, or constant for a deviation of 0."""

    tensor: Tensor
    mean: float
    std: float = 0.0

    def fill(self) -> None:
        if self.std:
            nn.init.normal_(self.tensor, self.mean, self.std)
        else:
            self.tensor.fill_(self.mean)


def own_heads(parameter: Tensor) -> Tensor:
    """A parameter of one number per head; this rank's heads of it under tensor parallelism."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def wide(x: Tensor) -> Tensor:
    return x if x.dtype in WIDE else x.float()


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
