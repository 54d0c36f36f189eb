"""The kernels of exclusion, norm and gate against fp64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from affine_attention import attention, explain
from affine_attention.ops.finish import EMPTY, UNSEEN, Finish, finish
from affine_attention.testing import MAX_ERROR_RATIO, Case, error_ratio, make_inputs

from ...interpreter import run_in_the_interpreter

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attention.ops.fused.finish import (  # noqa: E402
    BACKWARD_TILE,
    NUMBERS,
    ROWS,
    TILE,
    finish_backward_kernel,
    finish_kernel,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
outside = pytest.mark.skipif(INTERPRETED, reason="starts its own process")
PARTS = [
    x for x in itertools.product([None, "number", "rows"], [None, "shared", "by head"], [False, True]) if any(x[:2])
]


def make(exclusion, norm, gate, marked, dtype, shape=(2, 4, 2, 37, 20)):
    """(tensors by name, number, marks, gradient of the output); heads last in memory, as in a model."""
    batch, heads, groups, length, dim = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator).to(DEVICE)

    tensors = {"y": draw(batch, length, heads, dim).transpose(1, 2).to(dtype)}
    if exclusion is not None:
        tensors["own"] = draw(batch, length, groups, dim).transpose(1, 2).to(dtype)
        tensors["own"][0, 0, 3] = 0
    if exclusion == "rows":
        tensors["exclusion"] = draw(batch, length, heads).mT
    if norm is not None:
        tensors["norm_weight"] = 1 + 0.3 * draw(*((dim,) if norm == "shared" else (heads, dim)))
    if gate:
        tensors["gate"] = draw(batch, heads, length, dim).sigmoid().to(dtype)
    marks = None
    if marked:
        marks = torch.zeros(batch, 1, length, dtype=torch.uint8, device=DEVICE)
        marks[:, :, :3], marks[1, :, 30:] = EMPTY, UNSEEN
        tensors["y"][:, :, :3] = 0
    return tensors, 0.8 if exclusion == "number" else None, marks, draw(batch, heads, length, dim).to(dtype)


def run(tensors, number, marks, grad_out, *, kernels, dtype=None):
    leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in tensors.items()}
    exclusion = leaves.get("exclusion", number)
    parts = Finish(exclusion, leaves.get("norm_weight"), 1e-5, leaves.get("gate"))
    out = finish(leaves["y"], leaves.get("own"), marks, parts, kernels=kernels)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@needs_triton
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("exclusion", "norm", "gate"), PARTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_every_gradient(exclusion, norm, gate, marked, dtype):
    if INTERPRETED and dtype != torch.float32 and not (gate and marked):
        pytest.skip("16 bits in the interpreter: the largest kernels, for time")
    given = make(exclusion, norm, gate, marked, dtype)
    truth = run(*given, kernels=False, dtype=torch.float64)
    found, plain = run(*given, kernels=True), run(*given, kernels=False)
    for name, expected in truth.items():
        terms = 2 * 37 * (4 if expected.dim() == 1 else 1) if name == "norm_weight" else 1
        assert found[name].dtype == plain[name].dtype
        ratio = error_ratio(found[name], [plain[name], plain[name]], expected, terms)
        assert ratio <= MAX_ERROR_RATIO, f"{name}: {ratio:.2f}"


@needs_triton
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_marked_rows_may_hold_anything(bad):
    tensors, number, marks, grad_out = make("rows", "shared", True, True, torch.float32)
    clean = run(tensors, number, marks, grad_out, kernels=True)
    for rows in (slice(0, 3), slice(30, None)):
        hidden = (1,) if rows.start else (0, 1)
        for name in ("own", "exclusion", *(() if rows.start else ("gate",))):
            tensors[name][list(hidden), :, rows] = bad
    found = run(tensors, number, marks, grad_out, kernels=True)
    assert not found["out"][:, :, :3].any()
    for name, x in found.items():
        assert torch.equal(x, clean[name]), name


@needs_triton
@pytest.mark.parametrize("dim", [1, 3, 64, 80, 256])
def test_head_dims(dim):
    given = make("rows", "by head", True, False, torch.float32, (1, 2, 1, 5, dim))
    truth = run(*given, kernels=False, dtype=torch.float64)
    found, plain = run(*given, kernels=True), run(*given, kernels=False)
    for name, expected in truth.items():
        assert error_ratio(found[name], [plain[name], plain[name]], expected, 5) <= MAX_ERROR_RATIO, name


@needs_triton
@pytest.mark.parametrize("gate", [False, True])
def test_rows_of_several_programs_with_several_blocks_each(gate):
    given = make(None, "by head", gate, False, torch.float32, (2, 2, 2, 2 * ROWS + 37, 64))
    truth = run(*given, kernels=False, dtype=torch.float64)
    found, plain = run(*given, kernels=True), run(*given, kernels=False)
    for name, expected in truth.items():
        terms = 2 * (2 * ROWS + 37) if name == "norm_weight" else 1
        assert error_ratio(found[name], [plain[name], plain[name]], expected, terms) <= MAX_ERROR_RATIO, name
    assert all(torch.equal(x, found[name]) for name, x in run(*given, kernels=True).items())


@needs_triton
@pytest.mark.parametrize("heads_last", [False, True])
def test_outputs_have_the_layout_of_their_inputs(heads_last):
    tensors, number, marks, grad_out = make("rows", "by head", True, True, torch.float32)
    tensors["gate"] = tensors["gate"].transpose(1, 2).contiguous().transpose(1, 2)
    if heads_last:
        tensors["y"] = tensors["y"].contiguous()
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    assert grad_out.stride() != tensors["y"].stride()
    found = run(tensors, number, marks, grad_out, kernels=True)
    assert found["out"].stride() == tensors["y"].stride()
    assert found["y"].stride() == grad_out.stride(), "the layout of attention's gradient without a finish"
    for name in ("own", "gate"):
        assert found[name].stride() == tensors[name].stride(), name


@needs_triton
@pytest.mark.parametrize("visibility", ["causal", "causal+padding"])
def test_auto_runs_the_kernels_after_attention(visibility):
    inputs = make_inputs(Case("gated", visibility, queries=33, keys=33, extra="exclusion+head_norm", device=DEVICE))
    tensors = {n: x for n, x in inputs.tensors.items() if x is not None}
    choice = explain(**tensors, **inputs.visible)
    assert choice.kernels[-1] == "finish"
    assert "then exclusion, norm, gate in one pass of a kernel" in choice.reason
    torch.testing.assert_close(
        attention(**tensors, **inputs.visible), attention(**tensors, **inputs.visible, impl="composed"),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


@outside
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", [finish_kernel, finish_backward_kernel], ids=lambda x: x.__name__)
def test_kernels_compile_without_spills(kernel, capability):
    """Compiles with ptxas, without a GPU: all parts, head dim 128."""
    from .flash.test_compile import local_memory

    pointers = dict.fromkeys(("y", "own", "gate", "out", "grad_out", "grad_y", "grad_own", "grad_gate"), "*bf16")
    pointers |= dict.fromkeys(("gamma", "weight", "grad_gamma", "partial"), "*fp32")
    pointers |= {"marks": "*u8", "number": "fp32", "norm_eps": "fp32"}
    block = (BACKWARD_TILE if kernel is finish_backward_kernel else TILE) // 128
    constants = {"REPEATS": 4, "STEPS": 1, "HEAD_DIM": 128, "BLOCK": block, "BLOCK_D": 128}
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
    values = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
    whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
             if n not in (*constants, *NUMBERS, "gamma_t", "marks_t")}  # fmt: skip
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=values, attrs=whole), target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4},
    )  # fmt: skip
    assert local_memory(compiled.asm["cubin"]) == 0
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4" in ptx or "cp.async.cg" in ptx, "rows are read in vectors of 16 bytes"


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
