"""Turns the state of a training process (weights, optimizer, random numbers) into named tensors and JSON, and back.

Names, not positions: an optimizer's tensors are stored under the name of their parameter. Sharded tensors (FSDP2) are
stored whole, so that a checkpoint does not know how many ranks wrote it.
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
    """Parameters and persistent buffers by name; of tied ones the first."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


@torch.no_grad()
def load_weights(model: nn.Module, stored: Iterable[tuple[str, Tensor]]) -> None:
    """Copies stored tensors into a model that has exactly these."""
    own = weights(model)
    missing = set(own)
    for name, tensor in stored:
        if name not in own or own[name].shape != tensor.shape:
            shape = list(own[name].shape) if name in own else "no such tensor"
            raise ValueError(f"the checkpoint has {name} {list(tensor.shape)}, the model {shape}")
        if own[name].dtype != tensor.dtype:
            raise ValueError(f"the checkpoint has {name} in {tensor.dtype}, the model in {own[name].dtype}")
        own[name].copy_(like(tensor, own[name]))
        missing.discard(name)
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(missing)[:5])} of the model")


def optimizer_state(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors `KIND/PARAMETER` of an optimizer, and its groups with the names of their parameters."""
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    _shard_again(model)
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
    return dict(sorted(tensors.items())), {"groups": groups}  # loading would change the order


def load_optimizer_state(
    model: nn.Module, optimizer: Any, stored: Iterable[tuple[str, Tensor]], settings: dict[str, Any]
) -> None:
    """Sets what `optimizer_state` gave; any other shape, dtype or setting is refused before anything is changed."""
    inner = getattr(optimizer, "optimizer", optimizer)
    _shard_again(model)
    parameters = dict(model.named_parameters())
    own = {id(parameter): name for name, parameter in parameters.items()}
    # load_state_dict goes by position.
    order = [[own[id(parameter)] for parameter in group["params"]] for group in inner.param_groups]
    if [group.get("params") for group in settings["groups"]] != order:
        raise ValueError("the checkpoint's optimizer has its parameters in another order than the model")
    for mine, theirs in zip(inner.param_groups, settings["groups"], strict=True):
        check_group(theirs, mine)
    numbers = {name: number for number, name in enumerate(n for group in settings["groups"] for n in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in stored:
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise ValueError(f"the checkpoint has the optimizer's {kind} of {name}, which the model does not have")
        check_optimizer_tensor(key, tensor, parameters[name])
        # A copy: what is read is a map of the file, which must not be in use when the checkpoint is removed.
        copied = tensor.clone()
        state.setdefault(numbers[name], {})[kind] = copied if kind == "step" else like(copied, parameters[name])
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in (mine | theirs).items()}
        | {"params": [numbers[name] for name in theirs["params"]]}
        for mine, theirs in zip(inner.param_groups, settings["groups"], strict=True)
    ]
    inner.load_state_dict({"state": state, "param_groups": groups})


def _shard_again(model: nn.Module) -> None:
    """Gives a model of FSDP2 the parameters back that its optimizer knows.

    A forward without a backward, as an evaluation is, leaves those of the root whole: other tensors, by the same names.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """The tensor on the device of the pattern; this rank's part of it where the pattern is sharded."""
    if not hasattr(pattern, "device_mesh"):
        return tensor.to(pattern.device)
    from torch.distributed.tensor import distribute_tensor

    # Every rank has read the whole tensor, so none needs to send it.
    return distribute_tensor(
        tensor.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None  # type: ignore[attr-defined]
    )  # fmt: skip


def whole_on_cpu(tensor: Tensor) -> Tensor:
    """The tensor of all ranks, on the CPU; every rank must call where it is sharded."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu()


def random_state() -> dict[str, Any]:
    """The generators of this process: torch, the current GPU, numpy and Python, as JSON."""
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
    """The values that every rank has given, in order of ranks; each must call."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class Gathering:
    """Makes tensors whole, one at a time, in an order that all ranks keep: gathering a sharded one needs them all.

    A rank that writes fetches each; the others, and one whose disk has failed on the way, only take part (`finish`).
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._left = deque(tensors)

    def fetch(self, tensor: Tensor) -> Tensor:
        expected = self._left.popleft()
        assert expected is tensor, "tensors must be fetched in the order in which they were given"
        return whole_on_cpu(tensor)

    def finish(self) -> None:
        while self._left:
            if hasattr(tensor := self._left.popleft(), "full_tensor"):
                whole_on_cpu(tensor)
