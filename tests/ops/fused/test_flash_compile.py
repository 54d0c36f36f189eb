"""Compiles the shipped configurations for GPUs that are not here, and holds them to the shared memory those have.

Runs this file as a script in a process of its own: the stand-in for a driver must not meet the real one, nor the
interpreter that other tests switch on.
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

# Bytes of shared memory a program may take: of sm_89 for the table that sm_80, sm_86, sm_89 and sm_100 share.
SHARED_MEMORY = {80: 101376, 90: 232448, 100: 101376}


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
    assert ("regain_kernel 128" in shared) == (capability == 90)
    assert all(size <= SHARED_MEMORY[capability] for size in shared.values()), shared


def _local_memory(cubin: bytes) -> int:
    """Bytes of a thread's stack: where registers do not suffice, their contents go there."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(number) for number in re.findall(r"STACK:(\d+)", usage))


def _compile(capability: int, dims: tuple[int, ...]) -> dict[str, int]:
    """Shared memory in bytes by kernel and head dim, of one forward and backward for each head dim."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from affine_attention.ops.fused import alone, alone_backward, configs, faint, launch, sum_table
    from affine_attention.ops.fused.backward import launch_backward
    from affine_attention.ops.fused.forward import launch_forward

    class Driver:
        """As much of a driver as compiling needs."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    shared: dict[str, int] = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        name = f"{kernel.name} {dim}"
        shared[name] = max(kernel.metadata.shared, shared.get(name, 0))
        if kernel.name in ("gradients_kernel", "regain_kernel"):
            assert _local_memory(kernel.asm["cubin"]) == 0, f"{name} spills registers: it would be half as fast"

    driver.set_active(Driver())
    JITFunction.run = compile_only
    launch.chosen_config = lambda kernel, head_dim, dtype, device: configs.table_config(
        kernel, head_dim, dtype.itemsize, divmod(capability, 10)
    )
    alone.INTERPRETER = alone.HOPPER  # what tensors on the CPU get
    for dim in dims:
        query = torch.zeros(1, 2, 256, dim, dtype=torch.bfloat16)
        key, value = query[:, :1].clone(), query[:, :1].clone()
        row = torch.zeros(1, 2, 256)
        parts = {"alpha": row, "beta": row, "sink": row[0, :, 0].clone(), "gate": query if dim == 64 else None}
        segments = torch.zeros(1, 256, dtype=torch.int64) if dim == 64 else None
        rule = launch.make_rule(256, 256, True, 100 if dim == 256 else None, segments, segments, None)
        call = launch.Call(query, key, value, rule, 0.1)
        _, _, lse = launch_forward(call, **parts, keep_softmax=True, like=query)
        inputs = {"query": query, "key": key, "value": value, **parts}
        grads = {name: torch.empty_like(x) for name, x in inputs.items() if x is not None}
        launch_backward(call, query, query, lse, **parts, grads=grads)
        if capability == 90 and dim <= alone.MAX_HEAD_DIM:
            table = sum_table.new_table(value)
            given = {"softmax_scale": 0.1, "table": table, "shift": False}
            alone.forward_alone(query, key, value, **parts, **given, marks=None, keeps=True)
            parts["gate"] = None
            alone.forward_alone(query, key, value, **parts, **given, marks=faint.new_marks(query), keeps=False)
        if capability == 90 and dim in alone_backward.HEAD_DIMS:
            numbers = alone_backward.new_row_numbers(query)
            faint.regain(
                query, query, key, value, lse, row, None, faint.new_marks(query), 0.1,
                grad_alpha=row, row_numbers=numbers, sink_parts=None, signed=True,
            )  # fmt: skip
            for table in (sum_table.new_table(value), None):
                alone_backward.input_gradients(query, query, key, value, numbers, table, 0.1, beside_o=False)
    return shared


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(json.dumps(_compile(number, {80: (128,), 90: (64, 128, 256), 100: (64,)}[number])))
