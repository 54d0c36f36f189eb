"""Updates the running averages of alpha once per optimizer step, for all layers and ranks together (Eq. 9)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops.fused import HAS_TRITON, INTERPRETED, runs_on
from .scaling import ALL_SCALES, AffineScale, sum_dtype

# Where the scales of a model were found: the names that lead to each of them. Names keep no module alive.
_paths: weakref.WeakKeyDictionary[nn.Module, list[tuple[str, ...]]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def commit_running_alpha(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Updates every `running_alpha` with what the step has seen of alpha: the one line after `optimizer.step()`.

    running_alpha <- momentum * running_alpha + (1 - momentum) * mean of alpha over all real tokens of all micro-batches
    since the last commit and, where torch.distributed runs, of all ranks: one all-reduce for all layers together. A
    layer without a real token, or with a mean that is not finite, keeps its value. The number of kernel launches does
    not depend on the number of layers, and the host never waits for the GPU.

    Inside a CUDA graph: call it after the backward, in the same captured region. Commit or discard after the warm-up
    steps, so that nothing is collected when the capture starts; each replay then computes the sums anew and commits
    them. A commit outside of the graph that captured the backward updates the averages once at most: it releases the
    sums, and later replays write to memory that it no longer reads.

    Args:
        model: any module with `AffineScale` modules inside; every rank must call.
        group: the ranks that hold different data; None means all.
    """
    reduces = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    scales = affine_scales(model) if reduces or group is not None else _scales_that_collected(model)
    if reduces and group is None and any(scale.shard_mesh is not None for scale in scales):
        raise ValueError(
            "group is missing: under tensor parallelism ranks hold different heads, whose averages must not be "
            "mixed; pass the ranks that hold different data, affine_attention.hf.data_parallel_group(model)"
        )
    if group is not None and any(scale.sequence_ranks for scale in scales):
        _check_covers_sequence(scales, group)
    # Layers that one update serves: their running averages, and what they have collected.
    batches: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor | None]]] = {}
    for scale in scales:
        buffers: Any = scale._buffers  # an attribute of the module takes ten times as long to find
        collected = buffers["collected"]
        grad = collected.grad
        # Another rank may have collected something where this one has not.
        if grad is not None or reduces:
            running = buffers["running_alpha"]
            key = (running.device, running.dtype, running.numel(), scale.mechanism.momentum)
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = ([], [])
            batch[0].append(running)
            batch[1].append(grad)
            collected.grad = None
    if not reduces:
        for (device, _, _, momentum), (targets, grads) in batches.items():
            if not (_has_kernels(device) and _update_fused(targets, grads, momentum)):
                _update(targets, _stack_collected(targets, grads), momentum)
        return
    sums = [_stack_collected(targets, grads) for targets, grads in batches.values()]
    if sums:
        sums = _all_reduce(sums, group)
    for (*_, momentum), (targets, _), sums_LH in zip(batches, batches.values(), sums, strict=True):
        _update(targets, sums_LH, momentum)


def _check_covers_sequence(scales: list[AffineScale], group: dist.ProcessGroup) -> None:
    """The ranks that hold one sequence see different tokens of it."""
    held = dist.get_process_group_ranks(group)
    for scale in scales:
        if not set(scale.sequence_ranks or ()) <= set(held):
            raise ValueError(
                f"group must contain all ranks that hold parts of a sequence, {list(scale.sequence_ranks or ())}, got "
                f"ranks {held}; leave group out, which means all ranks"
            )


def _has_kernels(device: torch.device) -> bool:
    return HAS_TRITON and (INTERPRETED if device.type == "cpu" else device.type == "cuda" and runs_on(device.index))


def _update_fused(targets: list[Tensor], grads: list[Tensor | None], momentum: float) -> bool:
    """Eq. 9 in one launch; False where the kernel does not serve these tensors."""
    first = targets[0]
    device, total = first.get_device(), torch.float64
    for running, grad in zip(targets, grads, strict=True):
        if type(grad) is not Tensor or grad.dtype is not total or grad.get_device() != device:
            return False
        if not (running.is_contiguous() and grad.is_contiguous()):
            return False
    if first.dtype is not torch.float32:
        return False
    from ..ops.fused.running_average import update_running_alpha

    return update_running_alpha(targets, grads, momentum)  # type: ignore[arg-type]


def _stack_collected(targets: list[Tensor], grads: list[Tensor | None]) -> Tensor:
    """What layers of one device and size have collected, [L, H + 1]: sums of alpha, then the number of tokens."""
    device = targets[0].device
    parts = [grad if grad is None or grad.device == device else grad.to(device) for grad in grads]
    if any(part is None for part in parts):
        nothing = torch.zeros(len(targets[0]) + 1, dtype=sum_dtype(device), device=device)
        return torch.stack([nothing if part is None else part for part in parts])
    return torch.stack(parts)  # type: ignore[arg-type]


def _all_reduce(sums: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """The sums over all ranks, in one collective call."""
    flat = torch.cat([part.to(sums[0].device).flatten() for part in sums])
    dist.all_reduce(flat, group=group)
    parts = flat.split([part.numel() for part in sums])
    return [part.view_as(like).to(like.device) for part, like in zip(parts, sums, strict=True)]


def _update(targets: list[Tensor], sums_LH: Tensor, momentum: float) -> None:
    """Eq. 9 for layers of one device, size and momentum."""
    running_LH = torch.stack(targets)
    # A layer without a real token divides 0 by 0, which is not finite either.
    mean_LH = (sums_LH[:, :-1] / sums_LH[:, -1:]).to(running_LH.dtype)
    is_finite = torch.linalg.vector_norm(mean_LH, torch.inf, dim=1, keepdim=True) < torch.inf
    updated_LH = torch.where(is_finite, momentum * running_LH + (1 - momentum) * mean_LH, running_LH)
    torch._foreach_copy_(targets, updated_LH.unbind())


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
    return [scale for scale, _ in _find_scales(model)]


def _scales_that_collected(model: nn.Module) -> list[AffineScale]:
    """The scales of a model that have collected something, and possibly some that have not.

    A search visits every module of the model. So a later step follows the names on which the scales were found, and
    searches again where the model may have changed: where a name leads elsewhere, or where a scale that it has not
    visited has collected something and may belong to the model by now.
    """
    found = _follow(model, _paths.get(model))
    if found is not None:
        if len(found) == len(ALL_SCALES):
            return found
        visited = set(found)
        if not any(_has_collected(scale) for scale in _all_scales() if scale not in visited):
            return found
    places = _find_scales(model)
    _paths[model] = [_names(place) for place in places]
    return [scale for scale, _ in places]


def _follow(model: nn.Module, paths: list[tuple[str, ...]] | None) -> list[AffineScale] | None:
    """What the names lead to; None where that is not one scale for each path."""
    if paths is None:
        return None
    found = []
    try:
        for path in paths:
            module: Any = model
            for name in path:
                module = module._modules[name]
            if not (isinstance(module, AffineScale) and module.has_running_alpha):
                return None
            found.append(module)
    except (KeyError, AttributeError):  # no such module; None in its place
        return None
    return found if len(set(found)) == len(found) else None


def _all_scales() -> list[AffineScale]:
    """Every scale of the process; the list of references is made at once, since threads may build other models."""
    scales = [reference() for reference in ALL_SCALES.valuerefs()]
    return [scale for scale in scales if scale is not None]


def _has_collected(scale: AffineScale) -> bool:
    """Also of a scale that is still being built."""
    collected = scale.__dict__.get("_buffers", {}).get("collected")
    return collected is not None and collected.grad is not None


def _find_scales(model: nn.Module) -> list[tuple[AffineScale, Any]]:
    """The scales of a model in the order of `model.modules()`, each with the place of the module around it.

    `model.modules()` builds a name for each module and visits every leaf: it takes several times as long.
    """
    found: list[tuple[AffineScale, Any]] = []
    seen: set[nn.Module] = set()
    waiting: list[tuple[nn.Module, Any]] = [(model, None)]
    while waiting:
        place = waiting.pop()
        module = place[0]
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, AffineScale):
            if module.has_running_alpha:
                found.append((module, place[1]))
        else:
            children = reversed(module._modules.values())
            waiting.extend([(child, place) for child in children if child is not None and child._modules])
    return found


def _names(place: tuple[nn.Module, Any]) -> tuple[str, ...]:
    """The names that lead to a module from the outermost one around it."""
    names: list[str] = []
    module, around = place
    while around is not None:
        names.append(next(name for name, child in around[0]._modules.items() if child is module))
        module, around = around
    return tuple(reversed(names))
