"""Checks the arguments of the modules; every error names the argument, the rule, the value and a fix."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import shown
from ..ops.validation import DTYPES, MAX_HEAD_DIM, SEGMENT_DTYPES, check_layout

MAX_SIZE = 2**24  # largest width or number of heads: far above any model, and small enough to avoid overflow
THETA_RANGE = (1.0, 1e30)  # keeps all frequencies and angles finite in fp32


def check_size(name: str, value: Any, most: int = MAX_SIZE) -> None:
    """Checks an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer of at least 1, got {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {shown(value)}")


def check_sizes(embed_dim: Any, num_heads: Any, head_dim: Any) -> None:
    """Checks the width of a model, its number of query heads and their size."""
    check_size("embed_dim", embed_dim)
    check_size("num_heads", num_heads)
    check_size("head_dim", head_dim, MAX_HEAD_DIM)


def check_place(device: Any, dtype: Any) -> None:
    """Checks the device and the floating-point dtype of parameters; None means PyTorch's default."""
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
    """Checks the base of the rotary frequencies, or None."""
    if rope_theta is None:
        return
    rule = "rope_theta must be None (no rotary positions) or a number from {:g} to {:g}".format(*THETA_RANGE)
    if isinstance(rope_theta, bool) or not isinstance(rope_theta, int | float):
        raise TypeError(f"{rule}, got {shown(rope_theta)}")
    if not THETA_RANGE[0] <= rope_theta <= THETA_RANGE[1]:  # NaN fails too
        raise ValueError(f"{rule}, got {shown(rope_theta)}")


def check_hidden(hidden: Any, embed_dim: int | None = None) -> None:
    """Checks that hidden is a dense floating-point tensor [B, T, M] of the model's width."""
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
    """Checks that hidden has the device of a layer's weight and, without autocast, its dtype."""
    if type(layer) is not nn.Linear:
        return  # a quantised or adapted layer does its own checks
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


def check_padding(name: str, mask: Any, letters: str, shape: tuple[int, int], like: Tensor, note: str = "") -> None:
    """Checks a boolean mask of tokens on the device of `like`, or None."""
    rule = f"{name} must be a boolean tensor {letters}, True for real tokens"
    _check_tokens(name, mask, rule, (torch.bool,), f"use {name}.bool() for 0/1 masks", like)
    if mask is not None and tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape {letters} = {list(shape)}{note}, got {list(mask.shape)}")


def check_segment_ids(segment_ids: Any, hidden: Tensor) -> None:
    """Checks integers [B, T], one id per document, or None."""
    rule = "segment_ids must be a tensor [B, T] of integers, one id per document"
    _check_tokens("segment_ids", segment_ids, rule, SEGMENT_DTYPES, "convert them with .long()", hidden)
    shape = list(hidden.shape[:2])
    if segment_ids is not None and list(segment_ids.shape) != shape:
        raise ValueError(f"segment_ids must have shape [B, T] = {shape}, got {list(segment_ids.shape)}")


def check_positions(positions: Any, hidden: Tensor) -> None:
    """Checks real numbers [B, T], or [1, T] for all rows, or None."""
    rule = "positions must be a tensor [B, T] of integers or floats"
    _check_tokens("positions", positions, rule, (*SEGMENT_DTYPES, *DTYPES), "convert them with .long()", hidden)
    shape = list(hidden.shape[:2])
    if positions is not None and list(positions.shape) not in (shape, [1, shape[1]]):
        raise ValueError(
            f"positions must have shape [B, T] = {shape}, or [1, T] for all rows, got {list(positions.shape)}"
        )


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


def _check_tokens(name: str, x: Any, rule: str, dtypes: tuple[torch.dtype, ...], fix: str, like: Tensor) -> None:
    """Checks type, layout, dtype and device of a tensor with one value per token; None is valid."""
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{rule}, got {type(x).__name__}")
    check_layout(name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{rule}, got {_name(x)}; {fix}")
    if x.device != like.device:
        raise ValueError(
            f"{name} must be on the device of hidden ({like.device}), got {x.device}; move it with "
            f"{name}.to(hidden.device)"
        )


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
