"""Tensor parallelism: each rank holds a slice of the query heads, including their part of the running average.

Transformers shards parameters by a plan and does not shard buffers. We add entries for W_a, W_g and the sink to the
plan. Per-head state that is not a parameter is sliced here after loading and gathered before saving.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..nn import AttentionMechanism, Mechanism
from ..nn.arguments import check_no_context_parallel

STYLE = "colwise"  # transformers' name for sharding the output features, here the heads


def head_plan(plan: dict[str, str] | None, slot: str, mechanism: Mechanism) -> dict[str, str] | None:
    """Adds an entry for each parameter of a mechanism to the plan of a family, if the family shards its query heads."""
    if plan is None:
        return None
    modules = [
        name.removesuffix(".q_proj") for name, style in plan.items() if name.endswith(".q_proj") and style == STYLE
    ]
    example = AttentionMechanism(mechanism, 4, 4, 4, device="meta")
    # Every parameter has the heads first. Transformers matches a linear layer by its name, and not by its weight's.
    parts = [name.removesuffix(".weight") for name, _ in example.named_parameters()]
    return plan | {f"{module}.{slot}.{part}": STYLE for module in modules for part in parts}


@torch.no_grad()
def keep_own_heads(layer: AttentionMechanism) -> None:
    """Slices the running average, the collected sums and the head count of a sharded layer to this rank's heads."""
    shard = next((p for p in layer.parameters() if isinstance(p, DTensor)), None)
    mesh = None if shard is None else head_mesh(shard)
    if mesh is None:
        return
    ranks = mesh.size()
    if layer.num_heads % ranks:
        raise ValueError(f"tp_size must divide the query heads, got tp_size={ranks} and {layer.num_heads} heads")
    heads = layer.num_heads // ranks
    first = mesh.get_local_rank() * heads
    layer.num_heads = heads
    scale = layer.scale
    if scale is None:
        return
    scale.num_heads = heads
    if layer.mechanism.has_running_alpha:
        scale.running_alpha = scale.running_alpha[first : first + heads].clone()
        scale.collected = torch.zeros_like(scale.collected[: heads + 1], requires_grad=True)
        scale.shard_mesh = mesh


def head_mesh(shard: DTensor) -> DeviceMesh | None:
    """The ranks over which a parameter is split by heads; None where it is split for storage alone (FSDP).

    FSDP puts a parameter together again before it is used, so every rank computes with all heads.
    """
    mesh = shard.device_mesh
    names = mesh.mesh_dim_names
    if names is None or names == ("tp",):
        return mesh
    return mesh["tp"] if "tp" in names else None


def own_sink(sink: Tensor | None, heads: int) -> Tensor | None:
    """Returns the sink of this rank's heads: the local shard if it is learned, a slice if it is constant."""
    if isinstance(sink, DTensor):
        return sink.to_local()
    if sink is None or sink.shape[0] == heads or isinstance(sink, nn.Parameter):
        return sink
    return sink[:heads]


def check_no_hidden_sharding() -> None:
    """Raises where torch or accelerate cuts sequences over ranks for attention functions other than ours."""
    if torch.compiler.is_compiling():
        return
    check_no_context_parallel()
    module: Any = sys.modules.get("accelerate.state")
    config = None if module is None else module.AcceleratorState._shared_state.get("parallelism_config")
    for name in ("cp_size", "sp_size"):
        size = getattr(config, name, None) or 1
        if size > 1:
            raise ValueError(
                f"{name} of accelerate's ParallelismConfig must be 1 for a model that runs this operator, got {size}: "
                "it cuts each sequence over ranks and drops the mask, so every rank would attend to its own part only; "
                "use affine_attention.hf.sequence_parallel(model, group) on an attached model"
            )


def whole_state_dict(model: nn.Module) -> dict[str, Any] | None:
    """The state dict with the running averages of all heads, or None if heads are not sharded; a collective call."""
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
    """Creates the group of ranks with the same heads and different data, for `commit_running_alpha(model, group)`.

    Returns None, which means all ranks, if heads are not sharded. Every rank must call it exactly once.
    """
    mesh: Any = next((m.shard_mesh for m in model.modules() if getattr(m, "shard_mesh", None) is not None), None)
    if mesh is None:
        return None
    size, world = mesh.size(), dist.get_world_size()
    # Transformers gives consecutive ranks to one tensor-parallel group.
    groups = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    group: dist.ProcessGroup = groups[dist.get_rank() % size]
    return group
