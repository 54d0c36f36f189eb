"""Launches a kernel that is fixed in everything but the addresses of its tensors, at the cost of the driver call.

Triton's own launcher inspects every argument of every call to find the compiled variant, and encodes every tensor
descriptor in Python: 20 to 100 us of host time for the kernels here. A `Launch` is made once for a signature (kernel,
grid, numbers, options). Its first call goes through Triton, which compiles the variant. Later calls pack the addresses
into one buffer, in the layout that the driver reports for the function, and call cuLaunchKernelEx. Addresses that come
a second time keep their buffer for the next time.

A `Launch` belongs to one GPU: the function handle is valid in one context, so the keys under which launches are kept
contain the device (plan.py). Where the driver's layout and Triton's signature disagree, Triton launches every time.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import INTERPRETED
from .workspace import Workspace

ALIGNMENT = 16  # bytes: Triton compiles a variant for addresses at multiples of 16, and TMA requires them
MAX_SINGLE_LAUNCHES = 4096  # launches outside of plans that are kept
MAX_PACKED = 1024  # lists of addresses whose launches a LaunchSet keeps; one has 1 to 6 KiB
MAX_DESCRIPTORS = 4096  # encoded descriptors of one argument that are kept; one has 176 bytes
_MAX_ARGUMENT_BYTES = 4096  # CUDA's limit on the parameters of a kernel on every GPU so far
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
            "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}  # fmt: skip
_CONFIG = struct.Struct("7I4xQQI4x")  # CUlaunchConfig: grid, block, shared memory, stream, attributes


class Descriptor(NamedTuple):
    """How a kernel addresses a tensor through TMA: shape and strides of the tensor, a tile, a Gluon layout or None."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any = None

    def of(self, x: Tensor) -> Any:
        """Triton's descriptor of a tensor, for a launch by Triton."""
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(x, list(self.shape), list(self.strides), list(self.block_shape))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(x, list(self.shape), list(self.strides), list(self.block_shape), self.layout)


@dataclass(frozen=True)
class Slot:
    """A tensor among the arguments of a `Launch`: its index in the list of a call, and how the kernel addresses it."""

    index: int
    descriptor: Descriptor | None = None


class Launch:
    """One launch: a kernel, its grid, and all of its arguments but the tensors.

    Args:
        kernel: a function of Triton or Gluon.
        grid: one to three numbers of CTAs.
        arguments: in the order of the kernel's parameters. A `Slot` stands for a tensor; everything else is fixed.
        options: what Triton takes at a launch, for example num_warps.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **options: Any):
        self.kernel, self.arguments, self.options = kernel, tuple(arguments), options
        self.grid: tuple[int, ...] = (*grid, 1, 1)[:3]
        self.bound: _Bound | None = None

    def by_triton(self, tensors: Sequence[Tensor | None]) -> None:
        """Launches through Triton, which compiles the variant for these tensors, and binds it for later launches.

        A slot whose tensor is None now must be None at every launch: Triton compiles such an argument away.
        """
        full = [_filled(argument, tensors) for argument in self.arguments]
        compiled = self.kernel[self.grid](*full, **self.options)
        if compiled is not None and not INTERPRETED:
            self.bound = _bind(compiled, self.arguments)

    def once(self, bound: _Bound, addresses: Sequence[int], stream: int) -> None:
        """Launches with addresses that may not come back, from buffers of this thread."""
        arena = _arena
        bound.layout.pack_into(arena.arguments, 0, *bound.arguments(addresses))
        arena.size.value = bound.layout.size
        _CONFIG.pack_into(arena.config, 0, *self.grid, *bound.config(stream))
        _check(bound.launch(arena.config_address, bound.function, None, arena.extra_address), bound.name)

    def packed(self, bound: _Bound, addresses: Sequence[int], stream: int) -> Packed:
        """The launch with addresses that come back, in buffers of its own."""
        arguments, config = (ctypes.create_string_buffer(size) for size in (bound.layout.size, _CONFIG.size))
        bound.layout.pack_into(arguments, 0, *bound.arguments(addresses))
        _CONFIG.pack_into(config, 0, *self.grid, *bound.config(stream))
        size = ctypes.c_size_t(bound.layout.size)
        extra = _extra(arguments, size)
        return Packed(
            bound.launch, ctypes.addressof(config), bound.function, ctypes.addressof(extra), bound.name,
            (arguments, config, size, extra),
        )  # fmt: skip


class Packed(NamedTuple):
    """A launch with all of its arguments: what cuLaunchKernelEx takes."""

    launch: Any  # cuLaunchKernelEx
    config: int  # addresses, of CUlaunchConfig and of the argument buffer
    function: int
    extra: int
    name: str
    buffers: tuple[Any, ...]  # what the addresses point to


class LaunchSet:
    """The launches of a forward or a backward, in named groups, over one list of tensors.

    Args:
        groups: the launches of each group, in order. Slots count the tensors of the call first, then the arrays of each
            workspace.
        workspaces: the arrays that the launches use in addition to the tensors of the call.
    """

    def __init__(self, groups: dict[str, list[Launch]], *workspaces: Workspace):
        self.groups, self.workspaces = groups, workspaces
        self._is_bound = False
        self._packed: dict[tuple[Any, ...], list[Packed]] = {}
        self._seen: set[tuple[Any, ...]] = set()  # addresses that came once at least

    def values(self, tensors: Sequence[Tensor | None], *buffers: Tensor) -> list[Any]:
        """What `run` takes: addresses once every launch is bound, tensors before."""
        if self._is_bound:
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            for workspace, buffer in zip(self.workspaces, buffers, strict=True):
                base = buffer.data_ptr()
                addresses += [base + offset for offset in workspace.offsets]
            return addresses
        views = list(tensors)
        for workspace, buffer in zip(self.workspaces, buffers, strict=True):
            views += workspace.views(buffer)
        return views

    def run(self, group: str, values: list[Any], device: int) -> None:
        """Runs a group on the current stream of a device, which must be the current one."""
        if self._is_bound and type(values[0]) is int:
            key = (group, torch._C._cuda_getCurrentRawStream(device), *values)
            packed = self._packed.get(key) or self._pack(key)
            if packed is None:
                return
            for launch, config, function, extra, name, _ in packed:
                _check(launch(config, function, None, extra), name)
            return
        launches = self.groups[group]
        for launch in launches:
            launch.by_triton(values)
        self._is_bound = all(launch.bound is not None for each in self.groups.values() for launch in each)

    def _pack(self, key: tuple[Any, ...]) -> list[Packed] | None:
        """The launches of a group with these addresses, to be kept; None where they come first and were launched here.

        In a training loop the allocator returns the same addresses in every step. With other lengths in every step it
        does not, and buffers that are never used again would cost more than they save.
        """
        group, stream, *addresses = key
        if key not in self._seen:
            if len(self._seen) >= MAX_PACKED:
                self._seen.clear()
            self._seen.add(key)
            for launch in self.groups[group]:
                launch.once(launch.bound, addresses, stream)  # type: ignore[arg-type]
            return None
        if len(self._packed) >= MAX_PACKED:
            self._packed.clear()
        packed = [launch.packed(launch.bound, addresses, stream) for launch in self.groups[group]]  # type: ignore[arg-type]
        self._packed[key] = packed
        return packed


_single_launches: dict[tuple[Any, ...], LaunchSet] = {}


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: tuple[Any, ...], **options: Any
) -> None:
    """kernel[grid](*tensors, *numbers, **options) on the device of the tensors, which must be the current one.

    For a kernel that is launched outside of a plan: the launch is found by everything that its variant depends on.
    """
    device = next(x.get_device() for x in tensors if x is not None)
    kinds = [None if x is None else (x.dtype, x.data_ptr() % ALIGNMENT == 0) for x in tensors]
    key = (id(kernel), grid, numbers, device, *kinds, *options.items())
    found = _single_launches.get(key)
    if found is None:
        if len(_single_launches) >= MAX_SINGLE_LAUNCHES:
            _single_launches.clear()
        launch = Launch(kernel, grid, (*map(Slot, range(len(tensors))), *numbers), **options)
        found = _single_launches[key] = LaunchSet({"single": [launch]})
    found.run("single", found.values(tensors), device)


class _Bound(NamedTuple):
    """A compiled variant, ready to be launched with addresses."""

    name: str
    launch: Any  # cuLaunchKernelEx
    function: int
    threads: int
    shared: int
    attributes: int  # the address of an array of CUlaunchAttribute
    num_attributes: int
    layout: struct.Struct
    values: list[tuple[int | None, Callable[[int], bytes] | None, bytes]]

    def arguments(self, addresses: Sequence[int]) -> list[Any]:
        """What goes into the argument buffer."""
        return [
            constant if slot is None else addresses[slot] if encode is None else encode(addresses[slot])
            for slot, encode, constant in self.values
        ]

    def config(self, stream: int) -> tuple[int, ...]:
        """CUlaunchConfig behind the grid."""
        return self.threads, 1, 1, self.shared, stream, self.attributes, self.num_attributes


def _filled(argument: Any, tensors: Sequence[Tensor | None]) -> Any:
    """An argument with its slots replaced by tensors and descriptors, inside tuples too."""
    if isinstance(argument, Slot):
        tensor = tensors[argument.index]
        return tensor if tensor is None or argument.descriptor is None else argument.descriptor.of(tensor)
    if isinstance(argument, tuple):
        parts = [_filled(part, tensors) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    return argument


def _bind(compiled: Any, arguments: tuple[Any, ...]) -> _Bound | None:
    """The variant with its argument buffer laid out, None where a launch by Triton has to do."""
    meta = compiled.metadata
    simple = meta.num_ctas == 1 and not meta.launch_cooperative_grid
    if not simple or meta.global_scratch_size or getattr(meta, "profile_scratch_size", 0):
        return None
    placed = _parameter_layout(compiled.function)
    fields = _fields(compiled.src.signature.values(), arguments, list(meta.tensordesc_meta or ()))
    if placed is None or fields is None:
        return None
    # Triton adds two pointers to scratch memory, which are null for kernels that use none.
    fields += [_Field(8, None, None, bytes(8)), _Field(8, None, None, bytes(8))]
    if [size for _, size in placed] != [field.size for field in fields]:
        return None
    layout, values = _packing(placed, fields)
    if layout.size > _MAX_ARGUMENT_BYTES:
        return None
    attributes = ctypes.addressof(_early_launch()) if meta.launch_pdl else 0
    return _Bound(
        meta.name, _driver().cuLaunchKernelEx, compiled.function, 32 * meta.num_warps, meta.shared,
        attributes, 1 if meta.launch_pdl else 0, layout, values,
    )  # fmt: skip


def _packing(
    placed: list[tuple[int, int]], fields: list[_Field]
) -> tuple[struct.Struct, list[tuple[int | None, Callable[[int], bytes] | None, bytes]]]:
    """The format of the argument buffer and what fills it; fixed neighbours are one run of bytes."""
    codes: list[str] = []
    values: list[tuple[int | None, Callable[[int], bytes] | None, bytes]] = []
    end = 0
    for (offset, size), field in zip(placed, fields, strict=True):
        gap = bytes(offset - end)
        if field.slot is None and values and values[-1][0] is None:
            run = values[-1][2] + gap + field.constant
            codes[-1], values[-1] = f"{len(run)}s", (None, None, run)
        else:
            is_address = field.slot is not None and field.encode is None
            codes += [f"{len(gap)}x"] if gap else []
            codes.append("Q" if is_address else f"{size}s")
            values.append((field.slot, field.encode, field.constant))
        end = offset + size
    return struct.Struct("<" + "".join(codes)), values


class _Field(NamedTuple):
    """One parameter of the compiled function."""

    size: int
    slot: int | None  # the tensor whose address goes there; None: `constant` does
    encode: Callable[[int], bytes] | None  # turns an address into the bytes of a descriptor
    constant: bytes


def _fields(signature: Any, arguments: tuple[Any, ...], descriptor_metas: list[Any]) -> list[_Field] | None:
    """The parameters of a compiled function, in its order; None for an unknown type."""
    fields: list[_Field] = []
    for kind, argument in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            inner = _fields(kind, tuple(argument), descriptor_metas)
            if inner is None:
                return None
            fields += inner
        elif kind == "constexpr":
            continue
        elif kind.startswith("tensordesc"):
            meta = descriptor_metas.pop(0) if descriptor_metas else None
            if meta is None or meta.get("fp4_padded"):
                return None
            encode = _encoder(argument.descriptor, meta)
            fields.append(_Field(128, argument.index, encode, b""))
            fields += [_Field(4, None, None, struct.pack("<i", size)) for size in argument.descriptor.shape]
            fields += [_Field(8, None, None, struct.pack("<q", stride)) for stride in argument.descriptor.strides]
        elif kind.startswith("*"):
            fields.append(_Field(8, argument.index, None, b""))
        elif kind in _FORMATS:
            constant = struct.pack(f"<{_FORMATS[kind]}", argument)
            fields.append(_Field(len(constant), None, None, constant))
        else:
            return None
    return fields


def _encoder(descriptor: Descriptor, meta: dict[str, Any]) -> Callable[[int], bytes]:
    """A function that turns an address into the 128 bytes of a CUtensorMap.

    In a training loop the allocator returns the same addresses in every step: a descriptor is encoded once for each.
    """
    rank, size = len(descriptor.shape), meta["elem_size"]
    # The driver counts dimensions from the innermost one, and wants the strides of all but that one in bytes.
    shape = (ctypes.c_uint64 * 5)(*reversed(descriptor.shape))
    strides = (ctypes.c_uint64 * 5)(*(size * stride for stride in reversed(descriptor.strides[:-1])))
    box = (ctypes.c_uint32 * 5)(*reversed(meta["block_size"]))
    steps = (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)
    # The numbers of Triton's device code and of the driver differ for three types.
    kind = {8: 10, 9: 8, 10: 9}.get(meta["elem_type"], meta["elem_type"])
    known: dict[int, bytes] = {}

    def encode(address: int) -> bytes:
        found = known.get(address)
        if found is not None:
            return found
        arena = _arena
        error = _driver().cuTensorMapEncodeTiled(
            arena.tensor_map, kind, rank, address, shape, strides, box, steps, 0, meta["swizzle"], 2, 0
        )
        if error:
            raise RuntimeError(f"a tensor of shape {descriptor.shape} has no descriptor: {_describe(error)}")
        if len(known) >= MAX_DESCRIPTORS:
            known.clear()
        known[address] = found = ctypes.string_at(arena.tensor_map, 128)
        return found

    return encode


@functools.lru_cache(maxsize=4096)
def _parameter_layout(function: int) -> list[tuple[int, int]] | None:
    """(offset, bytes) of every parameter of a function, as the driver reports them; None where it does not."""
    driver = _driver()
    if not hasattr(driver, "cuFuncGetParamInfo"):
        return None
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[tuple[int, int]] = []
    while not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append((offset.value, size.value))
    return found


class _Arena(threading.local):
    """Buffers of one thread for the driver's calls: autograd runs backward passes in threads of its own."""

    def __init__(self) -> None:
        self.arguments = (ctypes.c_char * _MAX_ARGUMENT_BYTES)()
        self.config = (ctypes.c_char * _CONFIG.size)()
        self.size = ctypes.c_size_t(0)
        self._extra = _extra(self.arguments, self.size)
        self.config_address, self.extra_address = ctypes.addressof(self.config), ctypes.addressof(self._extra)
        self._room = (ctypes.c_char * 192)()
        # The driver requires a multiple of 64.
        self.tensor_map = ctypes.c_void_p((ctypes.addressof(self._room) + 63) // 64 * 64)


def _extra(arguments: Any, size: Any) -> Any:
    """CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END with their values."""
    return (ctypes.c_void_p * 5)(1, ctypes.addressof(arguments), 2, ctypes.addressof(size), 0)


_arena = _Arena()


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuTensorMapEncodeTiled.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library


@functools.cache
def _early_launch() -> Any:
    """The launch attribute with which a kernel may start before the previous one has ended (launch_pdl)."""
    attribute = (ctypes.c_char * 72)()
    struct.pack_into("<I4xI", attribute, 0, 6, 1)
    return attribute


def _check(error: int, name: str) -> None:
    if error:
        raise RuntimeError(f"launching {name} failed: {_describe(error)}")


def _describe(error: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(error, ctypes.byref(text))
    return f"CUDA error {error} ({(text.value or b'unknown').decode()})"
