"""Compiles the shipped configurations for other GPUs and checks that they fit into their shared memory.

This file runs as a script in its own process, because it replaces Triton's driver and the interpreter must be off.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Bytes of shared memory per CTA: that of sm_89 for the table shared by sm_80, sm_86, sm_89 and sm_100.
SHARED_MEMORY = {80: 101376, 90: 232448, 100: 101376}
# Accesses to spilled registers that a loop over masked tiles of documents or padding may have. Most of them are in the
# branch of irregular sequences, which compares 64-bit ids.
MASKED_SPILLS = 48


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_shipped_configurations_compile_and_fit(capability: int) -> None:
    pytest.importorskip("triton")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    shared = json.loads(result.stdout.splitlines()[-1])
    assert {name.split()[0] for name in shared} >= {"_forward_kernel", "_query_grad_kernel", "_key_grad_kernel"}
    assert ("causal_kernel 64" in shared) == (capability == 90)
    assert ("gradients_kernel 128" in shared) == (capability == 90)
    assert ("attend_kernel 128" in shared) == (capability == 90)
    assert ("recompute_kernel 128" in shared) == (capability == 90)
    assert all(f"_forward_kernel {name}" in shared for name in ("signed", "sigmoid"))
    assert all(size <= SHARED_MEMORY[capability] for size in shared.values()), shared


def disassemble(cubin: bytes, option: str) -> str:
    """The output of cuobjdump, which Triton ships."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def local_memory(cubin: bytes) -> int:
    """Bytes of the stack of a thread, which holds spilled registers."""
    return max(int(number) for number in re.findall(r"STACK:(\d+)", disassemble(cubin, "-res-usage")))


def spills_in_mma_loops(cubin: bytes) -> tuple[int, int]:
    """Accesses to spilled registers in the innermost loops with MMAs: (most in a loop without loads, in another one).

    In loops that load limits or segments, which are those over masked tiles, a few do not matter.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", disassemble(cubin, "-sass"))
    code = [(int(address, 16), text) for address, text in lines]
    loops = []
    for address, text in code:
        # Unconditional jumps back end the waits for mbarriers, whose code is behind that of the loops.
        target = re.search(r"^@.*\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            inside = [each for at, each in code if int(target[1], 16) <= at <= address]
            if any("GMMA" in each for each in inside):
                loops.append((int(target[1], 16), address, inside))
    innermost = [
        inside for first, last, inside in loops
        if not any((first, last) != (a, b) and first <= a and b <= last for a, b, _ in loops)
    ]  # fmt: skip
    assert innermost, "the kernel has a loop over tiles"
    most = [0, 0]
    for inside in innermost:
        loads = any("LDG" in each for each in inside)
        most[loads] = max(most[loads], sum("LDL" in each or "STL" in each for each in inside))
    return most[0], most[1]


def _compile(capability: int, dims: tuple[int, ...]) -> dict[str, int]:
    """Shared memory in bytes by kernel and head dim, for a forward and a backward of each head dim."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from affine_attention.ops.call import AttentionCall, CallSpec, TensorSpec
    from affine_attention.ops.fused.flash.backward import FlashBackward
    from affine_attention.ops.fused.flash.forward import FlashForward
    from affine_attention.ops.fused.hopper import backward as hopper_backward
    from affine_attention.ops.fused.hopper import forward as hopper_forward
    from affine_attention.ops.fused.hopper import gluon_forward
    from affine_attention.ops.fused.shared.tile_sizes import KERNELS, table_config
    from affine_attention.ops.fused.shared.value_sums import MAX_UNSCANNED, block_of
    from affine_attention.ops.visibility import Visibility

    class Driver:
        """The part of a driver that compilation needs."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    shared: dict[str, int] = {}
    label = kind = ""
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        name = f"{kernel.name} {label}"
        shared[name] = max(kernel.metadata.shared, shared.get(name, 0))
        if kernel.name == "recompute_kernel":
            assert local_memory(kernel.asm["cubin"]) == 0, f"{name} spills registers"
        if kernel.name in ("gradients_kernel", "attend_kernel"):
            # Registers may be spilled elsewhere, for example where non-finite values are replaced.
            without_mask, with_mask = spills_in_mma_loops(kernel.asm["cubin"])
            found = f"{name}, {kind}: {without_mask} and {with_mask} accesses to spilled registers in a loop over tiles"
            assert without_mask == 0, found
            assert with_mask <= (MASKED_SPILLS if kind in ("documents", "padding") else 0), found

    def call_of(query, key, names, visibility):
        row = torch.zeros(query.shape[:3])
        rows = {"alpha": row, "beta": row, "sink": row[0, :, 0].clone(), "gate": query}
        rows = {name: x for name, x in rows.items() if name in names}
        inputs = [query, key, key, *(rows.get(name) for name in ("alpha", "beta", "sink", "gate"))]
        mask = visibility.key_mask
        inputs += [visibility.query_segments, visibility.key_segments, None if mask is None else mask.view(torch.int8)]
        given = {"visibility": visibility, "softmax_scale": 0.1, "nonnegative_alpha": True}
        return CallSpec.of(AttentionCall.of(query, key, key, **rows, **given)), inputs

    driver.set_active(Driver())
    JITFunction.run = compile_only
    hopper_forward.tile_sizes = lambda dim, device: hopper_forward.NARROW if dim <= 64 else hopper_forward.WIDE
    for dim in dims:
        label = str(dim)
        sizes = {kernel: table_config(kernel, dim, 2, divmod(capability, 10)) for kernel in KERNELS}
        query = torch.zeros(1, 2, 256, dim, dtype=torch.bfloat16)
        segments = torch.zeros(1, 256, dtype=torch.int64) if dim == 64 else None
        seen = Visibility(1, 256, 256, query.device, True, 100 if dim == 256 else None, segments, segments)
        everything = ("alpha", "beta", "sink", *(("gate",) if dim == 64 else ()))
        call, inputs = call_of(query, query[:, :1].clone(), everything, seen)
        forward = FlashForward(call, keeps_core=True, sizes=sizes)
        state = forward(*inputs)[3]
        grad = TensorSpec.of(query)
        FlashBackward(call, grad, grad, forward.state, sizes)(query, query, state, *inputs)
        if dim == dims[0]:
            for label in ("signed", "sigmoid"):
                # Sigmoid weights take their bias in the place of a sink per row.
                rows = call.rows._replace(sink=TensorSpec.of(inputs[3]) if label == "sigmoid" else None)
                other = call._replace(rows=rows, weights=label)
                given = [*inputs[:5], inputs[3] if label == "sigmoid" else None, *inputs[6:]]
                forward = FlashForward(other, keeps_core=True, sizes=sizes)
                state = forward(*given)[3]
                FlashBackward(other, grad, grad, forward.state, sizes)(query, query, state, *given)
            label = str(dim)
        if capability != 90 or dim not in hopper_backward.HEAD_DIMS:
            continue
        blocks = MAX_UNSCANNED + 2
        kind = "causal"
        for length in (256, block_of(dim) * blocks):  # the second one has a scanned table
            query = torch.zeros(1, 2, length, dim, dtype=torch.bfloat16)
            seen = Visibility(1, length, length, query.device, is_causal=True)
            for names, marks in ((everything, False), (("alpha", "beta"), True), (("sink",), False)):
                call, inputs = call_of(query, query[:, :1].clone(), names, seen)
                settings = {"keeps_core": not marks, "keeps_marks": marks, "shift": False}
                forward = hopper_forward.HopperForward(call, **settings)
                state = forward(*inputs[:7])[3]
                grad = TensorSpec.of(query)
                backward = hopper_backward.HopperBackward(
                    call, grad, grad, None, forward.state, shift=False, halves=False, wants_sink="sink" in names
                )
                backward(query, query, None, state, *inputs)
                if kind == "causal" and not marks:
                    ordered = hopper_backward.HopperBackward(
                        call, grad, grad, None, forward.state, shift=False, halves=False, wants_sink=False, ordered=True
                    )
                    ordered(query, query, None, state, *inputs)
        ids = torch.zeros(1, 256, dtype=torch.int64)
        query = torch.zeros(1, 2, 256, dim, dtype=torch.bfloat16)
        for name, options in {
            "window": {"window": 100},
            "documents": {"query_segments": ids, "key_segments": ids},
            "padding": {"key_mask": torch.ones(1, 256, dtype=torch.bool)},
        }.items():
            kind = name
            seen = Visibility(1, 256, 256, query.device, is_causal=True, **options)
            call, inputs = call_of(query, query[:, :1].clone(), everything, seen)
            forward = FlashForward(call, keeps_core=True, sizes=sizes)
            state = forward(*inputs)[3]
            grad = TensorSpec.of(query)
            backward = hopper_backward.HopperBackward(
                call, grad, grad, None, forward.state, shift=False, halves=False, wants_sink=True, lse_in_log2=True
            )
            backward(query, query, None, state, *inputs)
        if dim in gluon_forward.HEAD_DIMS:
            kind = "more keys"
            seen = Visibility(1, 128, 256, query.device, is_causal=True)
            call, inputs = call_of(query[:, :, :128].clone(), query[:, :1].clone(), everything, seen)
            gluon_forward.GluonForward(call, keeps_core=True, keeps_marks=True, shift=True, num_ctas=2)(*inputs[:7])
    return shared


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(json.dumps(_compile(number, {80: (128,), 90: (64, 128, 256), 100: (64,)}[number])))
