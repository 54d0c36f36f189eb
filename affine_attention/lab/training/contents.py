"""Validates the contents of a checkpoint, key by key, before anything is loaded.

The hashes of a checkpoint detect damage, not tampering: an attacker can recompute them. A tensor with a wrong shape
would make a fused optimizer write out of bounds, and an invalid random state would be read out of bounds. Therefore
every tensor must have the shape and dtype of its parameter, and every JSON key its type and range. Each error names the
file, the key, the rule and the value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...files import kind, read_table

ADAMW = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of a parameter
TRAINING_KEYS = {"optimizer", "scheduler", "seconds", "random", "stream"}
STEP_DTYPE = torch.float32
NUMPY_KEYS = 624  # 32-bit words of the Mersenne Twister state


def check_contents(path: Path, step: int, model: nn.Module, check_stream: Callable[[Any], None] | None = None) -> None:
    """Raises ValueError, with the file and the rule, unless the checkpoint of this step can be loaded into the model.

    Args:
        path: the checkpoint folder.
        step: the step in its name.
        model: on the CPU, before it is sharded.
        check_stream: raises for a stream position that the data cannot have; None if the data is not a stream.
    """
    parameters = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    state: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:  # only the first of tied tensors
            seen.add(id(tensor))
            state[name] = (tensor.shape, tensor.dtype)
    _check_headers(path / "model.safetensors", state)
    stored = {f"{kind}/{name}": _adamw(kind, *like) for name, like in parameters.items() for kind in ADAMW}
    _check_headers(path / "optimizer.safetensors", stored, some_missing=True)
    position = check_training(path / "training.json", step, list(parameters))
    if check_stream is not None:
        try:
            check_stream(position)
        except ValueError as error:
            raise ValueError(f"{path / 'training.json'}: {error}") from error
    check_trainer_state(path / "trainer_state.json", step)


def check_training(file: Path, step: int, names: list[str]) -> Any:
    """Checks training.json (optimizer groups, schedule, random states, time) and returns the stream position."""
    found = read_table(file)
    if set(found) != TRAINING_KEYS:
        raise ValueError(f"{file} must have the keys {_few(TRAINING_KEYS)}, got {_few(found)}")
    check_number(file, "seconds", found["seconds"], 0.0)
    groups = _table(file, "optimizer", found["optimizer"]).get("groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"{file}: optimizer.groups must be a list of objects, got {kind(groups)}")
    listed = [name for group in groups for name in _list(file, "params", group.get("params"))]
    if sorted(map(str, listed)) != sorted(names):
        raise ValueError(f"{file}: optimizer.groups must name each of the {len(names)} parameters of the model once")
    schedule = _table(file, "scheduler", found["scheduler"])
    if schedule.get("last_epoch") != step:
        raise ValueError(f"{file}: scheduler.last_epoch must be the step {step}, got {schedule.get('last_epoch')!r}")
    states = _list(file, "random", found["random"])
    if not states:
        raise ValueError(f"{file}: random must hold the state of at least one rank, got none")
    for rank, state in enumerate(states):
        check_random_state(state, f"{file}: random[{rank}]")
    return found["stream"]


def check_trainer_state(file: Path, step: int) -> None:
    """Checks trainer_state.json: only keys of a TrainerState, with values of their types."""
    from transformers import TrainerState

    known = TrainerState().__dict__
    found = read_table(file)
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"{file} must have only the keys of a TrainerState, got also {_few(unknown)}")
    if type(found.get("global_step")) is not int or found["global_step"] != step:
        raise ValueError(f"{file}: global_step must be {step}, got {found.get('global_step')!r}")
    for key, value in found.items():
        usual = known[key]
        if isinstance(usual, bool) and not isinstance(value, bool):
            raise ValueError(f"{file}: {key} must be true or false, got {value!r}")
        if isinstance(usual, int | float) and not isinstance(usual, bool) and value is not None:
            check_number(file, key, value, 0.0)
    for key in ("epoch", "best_metric", "train_batch_size"):
        if found.get(key) is not None:
            check_number(file, key, found[key], 0.0)
    if found.get("log_history", []) != []:
        raise ValueError(f"{file}: log_history must be empty (log.jsonl has it), got {kind(found['log_history'])}")
    if not isinstance(found.get("stateful_callbacks", {}), dict):
        raise ValueError(f"{file}: stateful_callbacks must be an object, got {kind(found['stateful_callbacks'])}")


def check_random_state(state: Any, where: str) -> None:
    """Checks the random states of one rank by loading them into separate generators."""
    if not isinstance(state, dict) or not {"torch", "numpy", "python"} <= set(state) <= {
        "torch", "numpy", "python", "cuda"
    }:  # fmt: skip
        raise ValueError(f"{where} must have the keys torch, numpy, python and optionally cuda")
    for key in ("torch", "cuda"):
        if key in state and not _whole_numbers(state[key], 0, 255):
            raise ValueError(f"{where}.{key} must be a list of bytes (0 to 255)")
    try:
        torch.Generator().set_state(torch.tensor(state["torch"], dtype=torch.uint8))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where}.torch must be a state of torch's generator ({reason})") from error
    if "cuda" in state and len(state["cuda"]) not in (16, 5056):
        raise ValueError(f"{where}.cuda must be a state of a GPU's generator, got {len(state['cuda'])} bytes")
    numpy_state = state["numpy"]
    if not isinstance(numpy_state, list) or len(numpy_state) != 5 or numpy_state[0] != "MT19937":
        raise ValueError(f"{where}.numpy must be ['MT19937', keys, position, has_gauss, gauss]")
    _, keys, position, has_gauss, gauss = numpy_state
    # numpy does not check the position, and would read past the keys.
    in_range = _whole_numbers(keys, 0, 2**32 - 1) and len(keys) == NUMPY_KEYS and _whole_numbers([position], 0, 624)
    if not in_range or not _whole_numbers([has_gauss], 0, 1) or not _finite(gauss):
        raise ValueError(f"{where}.numpy must have 624 keys of 32 bits, a position from 0 to 624 and a finite gauss")
    python_state = state["python"]
    try:
        version, numbers, rest = python_state
        if not _whole_numbers(numbers, 0, 2**32 - 1) or not (rest is None or _finite(rest)):
            raise ValueError("numbers out of range")
        random.Random().setstate((version, tuple(numbers), rest))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}.python must be a state of Python's generator ({error})") from error


def check_optimizer_tensor(key: str, tensor: Tensor, parameter: Tensor) -> None:
    """Checks shape and dtype of an AdamW state: with any other, the optimizer would write out of bounds."""
    state, _, name = key.partition("/")
    if state not in ADAMW:
        raise ValueError(f"the checkpoint has {key}, but AdamW has only {', '.join(ADAMW)}")
    shape, dtype = _adamw(state, parameter.shape, parameter.dtype)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"the optimizer's {state} of {name} must be {dtype} {list(shape)} like its parameter, but the checkpoint "
            f"has {tensor.dtype} {list(tensor.shape)}"
        )
    if state == "step" and not (math.isfinite(tensor.item()) and tensor.item() >= 0):
        raise ValueError(f"the optimizer's step of {name} must be a finite number of at least 0, got {tensor.item()}")


def check_group(given: dict[str, Any], own: dict[str, Any]) -> None:
    """Checks an optimizer group: everything must equal the run's settings except lr, which the schedule sets."""
    _check_known("optimizer", given, own)
    for key, value in given.items():
        mine = list(own[key]) if isinstance(own[key], tuple) else own[key]
        if key == "lr":
            if not _finite(value) or value < 0:
                raise ValueError(f"the checkpoint's learning rate must be a finite number of at least 0, got {value!r}")
        elif key != "params" and (list(value) if isinstance(value, tuple) else value) != mine:
            raise ValueError(f"the checkpoint's optimizer has {key} = {value!r}, but the run has {mine!r}")


def check_schedule(given: dict[str, Any], own: dict[str, Any]) -> None:
    """Checks the state of a learning-rate schedule against the run's own schedule."""
    _check_known("schedule", given, own)
    for key, value in given.items():
        if key in ("last_epoch", "_step_count"):
            right = _whole_numbers([value], 0, 2**53)
        elif key == "_last_lr":
            right = isinstance(value, list) and len(value) == len(own[key]) and all(map(_finite, value))
        elif isinstance(own[key], bool):
            right = isinstance(value, bool)
        else:
            right = value == own[key]
        if not right:
            raise ValueError(f"the checkpoint's schedule has {key} = {value!r}, but the run has {own[key]!r}")


def _check_known(what: str, given: dict[str, Any], own: dict[str, Any]) -> None:
    if unknown := sorted(set(given) - set(own)):
        raise ValueError(f"the checkpoint's {what} has the keys {_few(unknown)}, which the run's does not have")


def check_number(file: Path, key: str, value: Any, least: float) -> None:
    if not _finite(value) or value < least:
        raise ValueError(f"{file}: {key} must be a finite number of at least {least:g}, got {value!r}")


def _adamw(state: str, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Size, torch.dtype]:
    return (torch.Size(), STEP_DTYPE) if state == "step" else (shape, dtype)


def _check_headers(file: Path, expected: dict[str, tuple[torch.Size, torch.dtype]], some_missing: bool = False) -> None:
    from .tensorfile import DTYPES, read_shapes

    found = read_shapes(file)
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise ValueError(f"{file} holds {_few(unknown)}, which the model does not have")
    missing = sorted(set(expected) - set(found))
    if missing and not some_missing:
        raise ValueError(f"{file} lacks {_few(missing)} of the model")
    # A parameter without gradients has no state; any other has all of it.
    broken = [name for name in missing if any(f"{state}/{name.partition('/')[2]}" in found for state in ADAMW)]
    if broken:
        raise ValueError(f"{file} lacks {_few(broken)}")
    for name, (shape, dtype) in found.items():
        wanted_shape, wanted_dtype = expected[name]
        if shape != list(wanted_shape) or dtype != DTYPES[wanted_dtype]:
            raise ValueError(f"{file}: {name} must be {DTYPES[wanted_dtype]} {list(wanted_shape)}, got {dtype} {shape}")


def _table(file: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{file}: {key} must be an object, got {kind(value)}")
    return value


def _list(file: Path, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{file}: {key} must be a list, got {kind(value)}")
    return value


def _whole_numbers(values: Any, low: int, high: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and low <= value <= high for value in values)


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and abs(value) < 2**63  # a larger integer does not fit into a float


def _few(names: Any) -> str:
    listed = sorted(map(str, names))
    return ", ".join(name[:80] for name in listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
