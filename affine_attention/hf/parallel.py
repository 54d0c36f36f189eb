"""Tensor parallelism: each rank holds some query heads of a mechanism, its running average among them.

Transformers shards parameters by a plan and leaves buffers whole. So the plan gets lines for W_a, W_g and the sink, and
what belongs to heads but is no parameter is cut here, after loading, and put together again before saving.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..nn import AttentionMechanism

STYLE = "colwise"  # transformers' word for "the output features, here heads, are split over the ranks"


def head_plan(plan: dict[str, str] | None, slot: str) -> dict[str, str] | None:
    """A family's plan with lines for a mechanism, where the family splits its query heads."""
    if plan is None:
        return None
    homes = [
        name.removesuffix(".q_proj") for name, style in plan.items() if name.endswith(".q_proj") and style == STYLE
    ]
    parts = ("scale.proj", "gate_proj", "sink")
    return plan | {f"{home}.{slot}.{part}": STYLE for home in homes for part in parts}


@torch.no_grad()
def keep_own_heads(layer: AttentionMechanism) -> None:
    """Cuts running average, sums and head count of a layer down to the heads of this rank, if it is sharded."""
    shard = next((p for p in layer.parameters() if isinstance(p, DTensor)), None)
    if shard is None:
        return
    ranks = shard.device_mesh.size()
    if layer.num_heads % ranks:
        raise ValueError(f"tp_size must divide the query heads, got tp_size={ranks} and {layer.num_heads} heads")
    heads = layer.num_heads // ranks
    first = shard.device_mesh.get_local_rank() * heads
    layer.num_heads = heads
    if layer.scale is not None and layer.mechanism.bias:
        scale = layer.scale
        scale.running_alpha = scale.running_alpha[first : first + heads].clone()
        scale.collected = torch.zeros_like(scale.collected[: heads + 1], requires_grad=True)
        scale.shard_mesh = shard.device_mesh


def own_sink(sink: Tensor | None, heads: int) -> Tensor | None:
    """The sink of this rank's heads: a shard of the learned one; the constant one is the same for every head."""
    if isinstance(sink, DTensor):
        return sink.to_local()
    if sink is None or sink.shape[0] == heads or isinstance(sink, nn.Parameter):
        return sink
    return sink[:heads]


def check_no_hidden_sharding() -> None:
    """Raises where accelerate cuts sequences over ranks for attention functions other than ours."""
    module: Any = sys.modules.get("accelerate.state")
    config = None if module is None else module.AcceleratorState._shared_state.get("parallelism_config")
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, None) or 1
        if size > 1:
            raise ValueError(
                f"{name} of accelerate's ParallelismConfig must be 1 for a model with a mechanism, got {size}: it cuts "
                "each sequence over ranks and drops the mask, so every rank would attend to its own part alone; use "
                "affine_attention.hf.sequence_parallel(model, group)"
            )


def whole_state_dict(model: nn.Module) -> dict[str, Any] | None:
    """The state dict with running averages of all heads, None where no heads are sharded; every rank must call."""
    state = None
    for name, module in model.named_modules():
        mesh = getattr(module, "shard_mesh", None)
        if mesh is None:
            continue
        state = model.state_dict() if state is None else state
        parts = [torch.empty_like(module.running_alpha) for _ in range(mesh.size())]
        dist.all_gather(parts, module.running_alpha, group=mesh.get_group())
        state[f"{name}.running_alpha"] = torch.cat(parts)
    return state


def data_parallel_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold the same heads and different data: the `group` of `commit_running_alpha`.

    None, which means all ranks, where heads are not sharded. Every rank must call, once.
    """
    mesh: Any = next((m.shard_mesh for m in model.modules() if getattr(m, "shard_mesh", None) is not None), None)
    if mesh is None:
        return None
    size, world = mesh.size(), dist.get_world_size()
    # Ranks of one tensor-parallel group are neighbours, as transformers lays them out.
    groups = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    return groups[dist.get_rank() % size]
