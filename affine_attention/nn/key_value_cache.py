"""Keeps the keys and values of a layer's earlier tokens for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..messages import shown
from ..ops.validation import check_layout

MIN_ROOM = 16  # free tokens in a new buffer, at least


class KeyValueCache:
    """Keys and values of one layer's earlier tokens. It can be cropped (rollback) and reordered (beam search).

    Under `torch.no_grad()` or `torch.inference_mode()` tokens are written into a buffer that grows by half when it is
    full, so appending n tokens one by one copies O(n) values. With gradients enabled, where tensors saved for backward
    must not be overwritten, and in compiled graphs, each append concatenates.
    """

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # (a view, the buffer whose filled part it is)

    def __getstate__(self) -> dict[str, Any]:
        """A copy gets buffers of its own: two caches that append to one buffer would overwrite each other."""
        return {"key": self.key, "value": self.value, "_buffers": {}}

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends [B, G, T, D] and returns all keys and values."""
        self._check_new(key, value)
        if self.key is not None and self.value is not None:
            if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(key) is not Tensor:
                key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
            else:
                key, value = self._write("key", self.key, key), self._write("value", self.value, value)
        self.key, self.value = key, value
        return key, value

    def _write(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        """Writes `new` after `held` into the buffer, or into a new buffer, and returns the view that holds both."""
        length, total = held.shape[2], held.shape[2] + new.shape[2]
        filled, buffer = self._buffers.get(name, (None, new))
        # After a crop, a reorder or an assignment, earlier results may still use the rest of the buffer.
        fits = filled is held and buffer.shape[2] >= total
        if not fits or (buffer.is_inference() and not torch.is_inference_mode_enabled()):
            buffer = new.new_empty(*new.shape[:2], total + max(total // 2, MIN_ROOM), new.shape[3])
            buffer[:, :, :length] = held
        buffer[:, :, length:total] = new
        self._buffers[name] = buffer[:, :, :total], buffer
        return self._buffers[name][0]

    def _check_new(self, key: Tensor, value: Tensor) -> None:
        for name, x, held in (("key", key, self.key), ("value", value, self.value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor [B, G, T, D], got {type(x).__name__}")
            check_layout(name, x)
            if x.dim() != 4:
                raise ValueError(f"{name} must have 4 dimensions [B, G, T, D], got {x.dim()}: {list(x.shape)}")
            if held is None:
                continue
            if x.shape[:2] != held.shape[:2] or x.shape[3] != held.shape[3]:
                batch, groups, _, dim = held.shape
                raise ValueError(
                    f"{name} must have shape [B, G, T, D] = [{batch}, {groups}, T, {dim}] to extend the cache, got "
                    f"{list(x.shape)}; use a new KeyValueCache for another batch"
                )
            if x.dtype != held.dtype or x.device != held.device:
                raise TypeError(
                    f"{name} must have the dtype and device of the cache ({held.dtype}, {held.device}), got "
                    f"({x.dtype}, {x.device}); use a new KeyValueCache"
                )
        if value.shape != key.shape:
            raise ValueError(f"value must have the shape of key {list(key.shape)}, got {list(value.shape)}")

    def check_holds(self, batch: int, groups: int, dim: int) -> None:
        """Raises if the cache does not fit a layer with these sizes; an empty cache fits every layer."""
        if self.key is None and self.value is None:
            return
        for name, x in (("keys", self.key), ("values", self.value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"cache must hold {name} as a tensor [B, G, S, D], got {type(x).__name__}")
            fits = x.dim() == 4 and (x.shape[0], x.shape[1], x.shape[3]) == (batch, groups, dim)
            if not fits or (isinstance(self.key, Tensor) and x.shape != self.key.shape):
                raise ValueError(
                    f"cache must hold {name} [B, G, S, D] = [{batch}, {groups}, S, {dim}], got {list(x.shape)}; use a "
                    "new KeyValueCache for another batch or layer"
                )

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        rule = f"length must be an integer from 0 to {self.length}, the number of cached tokens, got {shown(length)}"
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(rule)
        if not 0 <= length <= self.length:
            raise ValueError(rule)
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:, :, :length], self.value[:, :, :length]

    def reorder(self, rows: Tensor) -> None:
        """Replaces row i of the batch by the previous row rows[i]."""
        rule = "rows must be a tensor [B] of int32 or int64"
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{rule}, got {rows.dtype if isinstance(rows, Tensor) else shown(rows)}")
        check_layout("rows", rows)
        if rows.dim() != 1:
            raise ValueError(f"{rule}, got shape {list(rows.shape)}")
        if self.key is not None and self.value is not None:
            batch = self.key.shape[0]
            # Only on the CPU: reading values on a GPU would synchronise.
            if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
                raise ValueError(
                    f"rows must be 0 to {batch - 1}, the rows of the cache, got {int(rows.min())} to {int(rows.max())}"
                )
            self.key, self.value = self.key[rows], self.value[rows]
