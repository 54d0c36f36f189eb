"""Converts the training state (weights, optimizer, random states) to named tensors and JSON, and back.

Optimizer tensors are stored under the name of their parameter, not by position. FSDP2 shards are gathered before they
are stored, so that a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .contents import check_group, check_optimizer_tensor, check_random_state


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; only the first of tied tensors."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


@torch.no_grad()
def load_weights(model: nn.Module, stored: Iterable[tuple[str, Tensor]]) -> None:
    """Copies stored tensors into a model, which must have exactly these tensors."""
    own = weights(model)
    missing = set(own)
    for name, tensor in stored:
        if name not in own or own[name].shape != tensor.shape:
            shape = list(own[name].shape) if name in own else "no such tensor"
            raise ValueError(f"the checkpoint has {name} {list(tensor.shape)}, but the model has {shape}")
        if own[name].dtype != tensor.dtype:
            raise ValueError(f"the checkpoint has {name} in {tensor.dtype}, but the model has {own[name].dtype}")
        own[name].copy_(like(tensor, own[name]))
        missing.discard(name)
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])} of the model")


def optimizer_state(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors named `KIND/PARAMETER`, groups with parameter names) of an optimizer."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    _reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in inner.state.items():
        for kind, value in state.items():
            tensors[f"{kind}/{names[id(parameter)]}"] = torch.as_tensor(value)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in inner.param_groups
    ]
    return dict(sorted(tensors.items())), {"groups": groups}  # sorted, because loading changes the order


def load_optimizer_state(
    model: nn.Module, optimizer: Any, stored: Iterable[tuple[str, Tensor]], settings: dict[str, Any]
) -> None:
    """Loads the result of `optimizer_state`; raises before any change if a shape, dtype or setting does not match."""
    inner = getattr(optimizer, "optimizer", optimizer)
    _reshard(model)
    parameters = dict(model.named_parameters())
    own = {id(parameter): name for name, parameter in parameters.items()}
    # load_state_dict matches parameters by position.
    order = [[own[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
    if [group.get("params") for group in settings["groups"]] != order:
        raise ValueError("the checkpoint's optimizer has its parameters in another order than the model's")
    for mine, theirs in zip(inner.param_groups, settings["groups"], strict=True):
        check_group(theirs, mine)
    numbers = {name: number for number, name in enumerate(n for group in settings["groups"] for n in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in stored:
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise ValueError(f"the checkpoint has the optimizer's {kind} of {name}, which the model does not have")
        check_optimizer_tensor(key, tensor, parameters[name])
        # A copy: the tensor is a memory map of the file, which may be removed later.
        copied = tensor.clone()
        state.setdefault(numbers[name], {})[kind] = copied if kind == "step" else like(copied, parameters[name])
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in (mine | theirs).items()}
        | {"params": [numbers[name] for name in theirs["params"]]}
        for mine, theirs in zip(inner.param_groups, settings["groups"], strict=True)
    ]
    inner.load_state_dict({"state": state, "param_groups": groups})


def _reshard(model: nn.Module) -> None:
    """Restores the sharded parameters of an FSDP2 model, which the optimizer refers to.

    After a forward without a backward (an evaluation), the root module still has its unsharded parameters: different
    tensors with the same names.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """The tensor on the device of the pattern, sharded like the pattern."""
    if not hasattr(pattern, "device_mesh"):
        return tensor.to(pattern.device)
    from torch.distributed.tensor import distribute_tensor

    # Every rank has read the whole tensor, so no communication is needed.
    return distribute_tensor(
        tensor.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None  # type: ignore[attr-defined]
    )  # fmt: skip


def whole_on_cpu(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; if it is sharded, every rank must call this."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu()


def random_state() -> dict[str, Any]:
    """The random states of this process (torch, current GPU, numpy, Python) as JSON."""
    import numpy

    kind, keys, *rest = numpy.random.get_state()
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [kind, numpy.asarray(keys).tolist(), *rest],
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    import numpy

    check_random_state(state, "the random state")
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


def of_all_ranks(value: Any) -> list[Any]:
    """all_gather of Python objects, in order of ranks; every rank must call this."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class Gathering:
    """Gathers sharded tensors one at a time, in the same order on all ranks, because gathering is collective.

    The writing rank fetches each tensor. The other ranks, and a writing rank whose disk failed, only participate in the
    remaining gathers (`finish`).
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._left = deque(tensors)

    def fetch(self, tensor: Tensor) -> Tensor:
        expected = self._left.popleft()
        assert expected is tensor, "tensors must be fetched in the given order"
        return whole_on_cpu(tensor)

    def finish(self) -> None:
        while self._left:
            if hasattr(tensor := self._left.popleft(), "full_tensor"):
                whole_on_cpu(tensor)
