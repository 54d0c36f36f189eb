"""Tiles, scalars and pointers of a simulated kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Value(Tensor):
    """A tile or a scalar. Differs from a tensor where the compiler differs: division truncates, nothing is in place."""

    def __floordiv__(self, other: Any) -> Value:
        return torch.div(self, other, rounding_mode="trunc")

    def __rfloordiv__(self, other: Any) -> Value:
        return torch.div(value(other), self, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Value:
        return torch.fmod(self, other)

    def __rmod__(self, other: Any) -> Value:
        return torch.fmod(value(other), self)

    def __iadd__(self, other: Any) -> Value:
        return self + other

    def __isub__(self, other: Any) -> Value:
        return self - other

    def __imul__(self, other: Any) -> Value:
        return self * other

    def __itruediv__(self, other: Any) -> Value:
        return self / other

    def __iand__(self, other: Any) -> Value:
        return self & other

    def __ior__(self, other: Any) -> Value:
        return self | other

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return self.view(dtype) if bitcast else super().to(dtype)


def value(x: Any) -> Value:
    """A number or tensor as a value; Python numbers become int32 or fp32, as in a kernel."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        x = torch.tensor(x)
    elif isinstance(x, int):
        x = torch.tensor(x, dtype=torch.int32 if -(2**31) <= x < 2**31 else torch.int64)
    elif isinstance(x, float):
        x = torch.tensor(x, dtype=torch.float32)
    return x.as_subclass(Value)


class PointerType:
    """The dtype of a pointer."""

    def __init__(self, element_ty: torch.dtype):
        self.element_ty = element_ty


class Pointer:
    """Addresses in the memory of a tensor: its storage and offsets in elements."""

    def __init__(self, storage: Tensor, offsets: Tensor):
        self.storage, self.offsets = storage, offsets

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        whole = x.untyped_storage().nbytes() // x.element_size()
        storage = torch.as_strided(x.detach(), (whole,), (1,), 0)
        return cls(storage, value(torch.tensor(x.storage_offset(), dtype=torch.int64)))

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.storage.dtype)

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.storage, self.offsets + offsets)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.storage, self.offsets[index])

    def load(self, mask: Any, other: Any) -> Value:
        offsets, inside = self._checked(mask)
        fill = torch.zeros((), dtype=self.storage.dtype) if other is None else value(other).to(self.storage.dtype)
        return value(torch.where(inside, self.storage[torch.where(inside, offsets, 0)], fill))

    def store(self, x: Any, mask: Any) -> None:
        offsets, inside = self._checked(mask)
        x = plain(value(x)).to(self.storage.dtype).expand(offsets.shape)
        self.storage[offsets[inside]] = x[inside]

    def _checked(self, mask: Any) -> tuple[Tensor, Tensor]:
        offsets = plain(self.offsets).long()
        inside = torch.ones_like(offsets, dtype=torch.bool)
        if mask is not None:
            offsets, inside = torch.broadcast_tensors(offsets, plain(value(mask)))
        used = offsets[inside]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= len(self.storage)):
            raise IndexError(f"address {int(used.min())} to {int(used.max())} of {len(self.storage)} elements")
        return offsets, inside


def plain(x: Tensor) -> Tensor:
    """A value as an ordinary tensor."""
    return x.as_subclass(Tensor)
