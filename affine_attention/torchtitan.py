"""Turns the GQAttention of a torchtitan model into one with a mechanism, through torchtitan's `--override.imports`.

`override.imports = ["affine_attention.torchtitan.attention"]` replaces the attention of every layer whose config is a
GQAttention.Config (llama3, qwen3). The running averages are committed at the end of each step of torchtitan's
OptimizersContainer, by a hook that this module registers when it is imported. docs/train.md says what is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.runtime import get_partition_spec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from .messages import shown
from .nn import AffineScale, AttentionMechanism, Mechanism, commit_running_alpha
from .nn.commit import affine_scales
from .nn.mechanism import as_mechanism

STARTS = ("fresh", "identity")


class TitanScale(AffineScale, Module):
    """`AffineScale` as a torchtitan module; MechanismAttention initialises it."""


class MechanismAttention(AttentionMechanism, Module):
    """`AttentionMechanism` as the inner attention of a torchtitan layer: parameters, running average and operator."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        mechanism: dict[str, Any]
        dim: int
        n_heads: int
        head_dim: int
        start: str = "fresh"
        documents: bool = True
        """True where a query sees its own document only; documents begin where `positions` is 0."""
        window: int | None = None
        """A query sees its last `window` keys only."""

    def __init__(self, config: Config):
        super().__init__(Mechanism.from_dict(config.mechanism), config.dim, config.n_heads, config.head_dim)
        self.start, self.documents, self.window = config.start, config.documents, config.window
        for module in self.modules():
            # torchtitan requires its own base class of every module. FSDP2 sets classes in the same way.
            if type(module) is AffineScale:
                module.__class__ = TitanScale
            elif type(module) is nn.Linear:
                module.__class__ = Linear

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fills all parameters and buffers; those of the modules inside too, whose own initial values are others."""
        if buffer_device is not None:
            for module in self.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        like: dict[str, Any] = {"device": buffer_device, "requires_grad": buffer.requires_grad}
                        module._buffers[name] = torch.empty_like(buffer, **like)
        for each in self.starts(identity=self.start == "identity"):
            each.fill()
        if self.scale is not None and self.scale.has_running_alpha:
            self.scale.discard_collected()

    def parallelize(self, parallel_dims: Any) -> None:
        """Declares to torchtitan that data-parallel ranks hold the same parameters; refuses every other split."""
        for name, size, way_out in (
            ("tensor_parallel_degree", parallel_dims.tp, "shard with data_parallel_shard_degree"),
            ("context_parallel_degree", parallel_dims.cp, "use activation checkpointing for long sequences"),
        ):
            if size > 1:
                raise ValueError(
                    f"parallelism.{name} must be 1 with affine_attention.torchtitan.attention, got {size}; {way_out}"
                )
        backend = parallel_dims.spmd_backend
        if backend == "full_dtensor":
            raise ValueError(
                "parallelism.spmd_backend must be 'spmd_types' or 'partial_dtensor' with "
                f"affine_attention.torchtitan.attention, got {backend!r}: the operator takes local tensors"
            )
        if backend == "spmd_types":
            layout = dense_param_placement(tp=spmd.R)
            modules: list[Any] = list(self.modules())
            for module in modules:
                for name, parameter in list(module.named_parameters(recurse=False)):
                    module._spmd_distribute_state(parallel_dims, name, parameter, layout, is_param=True)


class MechanismGQAttention(GQAttention):
    """torchtitan's grouped-query attention whose inner attention has a mechanism."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        inner_attention: MechanismAttention.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.register_load_state_dict_pre_hook(_scale_plain_checkpoint)

    @property
    def output_factor(self) -> float:
        """The factor of `wo` that compensates what a mechanism with start="identity" does to the output."""
        inner: Any = self.inner_attention
        return 1 / inner.mechanism.identity_scale if inner.start == "identity" else 1.0

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        with torch.no_grad():
            self.wo.weight.mul_(self.output_factor)

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        """Maps hidden states [B, L, M] to [B, L, M].

        Args:
            attention_masks: None; torchtitan makes masks for layers with another inner attention only.
            positions: [B, L] rotary positions, 0 at the first token of each document.
        """
        if attention_masks is not None:
            raise ValueError(
                "attention_masks must be None for a layer with a mechanism, which separates documents by positions, "
                f"got {type(attention_masks).__name__}; override the attention of all layers"
            )
        inner: Any = self.inner_attention
        query, key, value = self.qkv_linear(x_BLD)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self.rope(query, key, positions)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        # The type checker of spmd_types does not know the operator: its output is sharded as its queries are.
        with spmd.no_typecheck():
            segment_ids = (positions == 0).cumsum(1) if inner.documents and positions is not None else None
            out = inner(
                x_BLD, query, key, value, is_causal=True, window=inner.window, segment_ids=segment_ids,
                softmax_scale=self.scaling,
            )  # fmt: skip
        if spmd.is_type_checking():
            spmd.assert_type(out, spmd.get_local_type(query), get_partition_spec(query))
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


def _scale_plain_checkpoint(module: MechanismGQAttention, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Compensates start="identity" in weights of plain attention, such as torchtitan's initial_load_in_hf."""
    name, own = f"{prefix}wo.weight", f"{prefix}inner_attention."
    if name in state_dict and module.output_factor != 1 and not any(key.startswith(own) for key in state_dict):
        state_dict[name] = state_dict[name] * module.output_factor


@override(target=GQAttention.Config, exact=True, description="attention with a mechanism of affine_attention")
def attention(
    config: GQAttention.Config, mechanism: str | dict[str, Any] = "affine", start: str = "fresh", **settings: Any
) -> MechanismGQAttention.Config:
    """The override: a GQAttention.Config in, the config of the same layer with a mechanism out.

    Args:
        mechanism: the name of a preset, or all settings of a mechanism as `Mechanism.to_dict` returns them.
        start: "fresh" for random gates, as in the paper; "identity" for a model that starts as plain attention.
        settings: settings of the preset that differ, such as bias_length=8192.
    """
    if isinstance(mechanism, dict):
        chosen = Mechanism.from_dict(mechanism | settings)
    else:
        chosen = Mechanism.named(mechanism, **settings) if isinstance(mechanism, str) else as_mechanism(mechanism)
    if start not in STARTS:
        raise ValueError(f"start must be one of {', '.join(map(repr, STARTS))}, got {shown(start)}")
    if start == "identity" and chosen.identity_scale is None:
        raise ValueError(
            f'start="identity" does not work for {chosen.name!r}, whose start no factor of the output projection '
            'compensates without rounding; use start="fresh"'
        )
    documents, window = _visibility(config.inner_attention)
    head_dim = config.dim // config.n_heads if config.head_dim is None else config.head_dim
    inner = MechanismAttention.Config(
        mechanism=chosen.to_dict(),
        dim=config.dim,
        n_heads=config.n_heads,
        head_dim=head_dim,
        start=start,
        documents=documents,
        window=window,
    )
    replaced: MechanismGQAttention.Config = derive(config, MechanismGQAttention.Config, inner_attention=inner)
    return replaced


def _visibility(inner: Module.Config) -> tuple[bool, int | None]:
    """Whether an inner attention of torchtitan separates documents, and its window."""
    if type(inner) is ScaledDotProductAttention.Config:
        return False, None
    if type(inner) is FlexAttention.Config:
        return True, None
    if type(inner) is VarlenAttention.Config:
        left, right = inner.window_size
        if right != 0:
            raise ValueError(
                f"window_size of VarlenAttention must be (left, 0), which is causal, got {inner.window_size}; "
                "a mechanism in torchtitan has causal attention only"
            )
        return True, None if left < 0 else left + 1
    raise ValueError(
        "inner_attention must be the config of FlexAttention, VarlenAttention or ScaledDotProductAttention, got "
        f"{type(inner).__qualname__}; the override does not know which keys its queries see"
    )


@torch.no_grad()
def commit_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Commits the running averages of a model that torchtitan trains; the hook after each optimizer step."""
    if not isinstance(optimizer, OptimizersContainer):
        return
    for part in optimizer.model_parts:
        collected = [scale.collected for scale in affine_scales(part)]
        if collected:
            sums = [each.grad for each in collected]
            commit_running_alpha(part, _data_group(part))
            # A CUDA graph, torchtitan's default, adds to the memory that it has captured: keep it, and start from 0.
            for each, grad in zip(collected, sums, strict=True):
                if grad is not None:
                    each.grad = grad.zero_()


def _data_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold the same layers and different data; None for all ranks."""
    inner = next(module for module in model.modules() if isinstance(module, MechanismAttention))
    parameter = next(inner.parameters())
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == dist.get_world_size():
        return None
    mesh = parameter.device_mesh
    # Pipeline parallelism: the other ranks hold other layers.
    group: dist.ProcessGroup = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    return group


register_optimizer_step_post_hook(commit_step)
