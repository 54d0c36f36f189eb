"""Checks the arguments of the modules before any work is done; every error names argument, rule, value and way out."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.validation import DTYPES, MAX_HEAD_DIM, SEGMENT_DTYPES, check_layout, shown

MAX_SIZE = 2**24  # of a width or a number of heads: far above any model, and below what no machine can allocate
THETA_RANGE = (1.0, 1e30)  # all frequencies and angles stay finite in fp32


def check_size(name: str, value: Any, most: int = MAX_SIZE) -> None:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer of at least 1, got {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {shown(value)}")


def check_sizes(embed_dim: Any, num_heads: Any, head_dim: Any) -> None:
    """The width of a model, its query heads and their size."""
    check_size("embed_dim", embed_dim)
    check_size("num_heads", num_heads)
    check_size("head_dim", head_dim, MAX_HEAD_DIM)


def check_place(device: Any, dtype: Any) -> None:
    """What PyTorch takes for the device of a parameter, and a floating-point dtype; None means PyTorch's default."""
    if device is not None and not isinstance(device, torch.device):
        rule = 'device must be a torch.device, a name such as "cpu" or "cuda:0", or None'
        if isinstance(device, bool) or not isinstance(device, str | int):
            raise TypeError(f"{rule}, got {shown(device)}")
        try:
            torch.device(device)
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{rule}, got {shown(device)}") from error
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
        raise TypeError(
            f"dtype must be torch.float64, float32, bfloat16, float16 or None (the default dtype), got {shown(dtype)}"
        )


def check_rope_theta(rope_theta: Any) -> None:
    """The base of the rotary frequencies, or None."""
    if rope_theta is None:
        return
    rule = "rope_theta must be None (no positions) or a number from {:g} to {:g}".format(*THETA_RANGE)
    if isinstance(rope_theta, bool) or not isinstance(rope_theta, int | float):
        raise TypeError(f"{rule}, got {shown(rope_theta)}")
    if not THETA_RANGE[0] <= rope_theta <= THETA_RANGE[1]:  # NaN fails too
        raise ValueError(f"{rule}, got {shown(rope_theta)}")


def check_hidden(hidden: Any, embed_dim: int | None = None) -> None:
    """hidden [B, T, M]: a dense floating-point tensor of the model's width."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"hidden must be a tensor [B, T, M], got {type(hidden).__name__}")
    check_layout("hidden", hidden)
    if hidden.dim() != 3:
        raise ValueError(f"hidden must have 3 dimensions [B, T, M], got {hidden.dim()}: {list(hidden.shape)}")
    if hidden.dtype not in DTYPES:
        raise TypeError(f"hidden must be float64, float32, bfloat16 or float16, got {_name(hidden)}; convert it")
    if embed_dim is not None and hidden.shape[2] != embed_dim:
        raise ValueError(
            f"hidden must have shape [B, T, M] with M = {embed_dim}, the embed_dim of the layer, got "
            f"{list(hidden.shape)}"
        )


def check_fits_weights(hidden: Tensor, layer: nn.Module) -> None:
    """hidden has the dtype and device of a layer's weight; autocast converts the dtype itself."""
    if type(layer) is not nn.Linear:
        return  # a layer that was put in its place (quantized, adapted) knows what it takes
    weight = layer.weight
    if hidden.device != weight.device:
        raise ValueError(
            f"hidden must be on the device of the layer ({weight.device}), got {hidden.device}; move one of them"
        )
    if hidden.dtype != weight.dtype and not _converts(hidden.device.type):
        raise TypeError(
            f"hidden must have the dtype of the layer ({_name(weight)}), got {_name(hidden)}; convert one of them, for "
            f"instance layer.to(hidden.dtype)"
        )


def _converts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)


def check_padding(name: str, mask: Any, letters: str, shape: tuple[int, int], like: Tensor, told: str = "") -> None:
    """A boolean mask of tokens on the device of `like`, or None."""
    if mask is None:
        return
    rule = f"{name} must be a boolean tensor {letters}, True for real tokens"
    if not isinstance(mask, Tensor):
        raise TypeError(f"{rule}, got {type(mask).__name__}")
    check_layout(name, mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"{rule}, got {_name(mask)}; use {name}.bool() for 0/1 masks")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {letters} = {list(shape)}{told}, got {list(mask.shape)}")
    _check_device(name, mask, like)


def check_segment_ids(segment_ids: Any, hidden: Tensor) -> None:
    """Integers [B, T], one id a document, or None."""
    if segment_ids is None:
        return
    rule = "segment_ids must be a tensor [B, T] of integers, one id a document"
    if not isinstance(segment_ids, Tensor):
        raise TypeError(f"{rule}, got {type(segment_ids).__name__}")
    check_layout("segment_ids", segment_ids)
    if segment_ids.dtype not in SEGMENT_DTYPES:
        raise TypeError(f"{rule}, got {_name(segment_ids)}; convert them with .long()")
    if segment_ids.shape != hidden.shape[:2]:
        raise ValueError(
            f"segment_ids must have shape [B, T] = {list(hidden.shape[:2])}, got {list(segment_ids.shape)}"
        )
    _check_device("segment_ids", segment_ids, hidden)


def check_positions(positions: Any, hidden: Tensor) -> None:
    """Real numbers [B, T], or [1, T] for all rows, or None."""
    if positions is None:
        return
    rule = "positions must be a tensor [B, T] of integers or floats"
    if not isinstance(positions, Tensor):
        raise TypeError(f"{rule}, got {type(positions).__name__}")
    check_layout("positions", positions)
    if positions.dtype not in (*SEGMENT_DTYPES, *DTYPES):
        raise TypeError(f"{rule}, got {_name(positions)}; convert them with .long()")
    batch, queries = hidden.shape[:2]
    if tuple(positions.shape) not in ((batch, queries), (1, queries)):
        raise ValueError(
            f"positions must have shape [B, T] = [{batch}, {queries}], or [1, T] for all rows, got "
            f"{list(positions.shape)}"
        )
    _check_device("positions", positions, hidden)


def check_no_context_parallel() -> None:
    """Raises inside torch's context_parallel, which cuts the sequence and replaces SDPA alone."""
    if torch.compiler.is_compiling():
        return
    module: Any = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if module is not None and torch.nn.functional.scaled_dot_product_attention in module._replaced_functions:
        raise ValueError(
            "torch.distributed.tensor.experimental.context_parallel is active: it cuts the sequence over ranks and "
            "exchanges keys in scaled_dot_product_attention only, so a mechanism would see its own part alone; use "
            "affine_attention.sequence_parallel, or affine_attention.hf.sequence_parallel for a transformers model"
        )


def _check_device(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(
            f"{name} must be on the device of hidden ({like.device}), got {x.device}; move it with "
            f"{name}.to(hidden.device)"
        )


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
