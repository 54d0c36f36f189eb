"""The Triton kernel equals the PyTorch version: in Triton's interpreter on the CPU, and on a GPU if there is one."""

from __future__ import annotations

import os

import pytest
import torch

from affine_attention.lab.distill.chunks import Head, chunked_loss, row_loss
from affine_attention.lab.distill.terms import LogitRows, Terms

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attention.lab.distill.row_loss_kernel import fused_row_loss, row_loss_kernel  # noqa: E402

from ...interpreter import run_in_the_interpreter  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])  # not in the interpreter
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
outside = pytest.mark.skipif(INTERPRETED, reason="starts a process of its own")
TERMS = [
    Terms(),
    Terms(0.7, 0.3, 2.5),
    Terms(0.7, 0.3, divergence="soft_cross_entropy"),
    Terms(1.0, 0.0, 0.5, "soft_cross_entropy"),
    Terms(0.0, 2.0),
]


def rows_of(function, dtype, terms, vocabulary, caps, grad=True, tokens=5):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        (4 * torch.randn(tokens, vocabulary, generator=generator)).to(dtype).to(DEVICE) for _ in range(2)
    )
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator).to(DEVICE)
    labels[0], labels[1] = vocabulary - 1, 0
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    kd, ce = (torch.zeros(tokens, dtype=sums, device=DEVICE) for _ in range(2))
    function(LogitRows(student, teacher if terms.kd_weight else None, labels, terms, *caps, kd, ce), grad)
    return {"kd": kd, "ce": ce, "grad": student}


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize(("vocabulary", "caps"), [(5000, (None, None)), (33, (3.0, 2.0)), (4096, (None, 5.0))])
def test_the_kernel_equals_the_pytorch_version(dtype, terms, vocabulary, caps):
    found, expected = (rows_of(f, dtype, terms, vocabulary, caps) for f in (fused_row_loss, row_loss))
    for name in ("kd", "ce"):
        torch.testing.assert_close(found[name], expected[name], rtol=2e-5, atol=2e-5, msg=name)
    rtol = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(
        found["grad"], expected["grad"], rtol=rtol, atol=2e-7 if dtype != torch.float32 else 1e-6
    )


@needs_triton
def test_without_gradients_the_logits_stay():
    found = rows_of(fused_row_loss, torch.float32, TERMS[1], 100, (None, None), grad=False)
    before = rows_of(lambda *_: None, torch.float32, TERMS[1], 100, (None, None))
    assert torch.equal(found["grad"], before["grad"])
    torch.testing.assert_close(found["kd"], rows_of(row_loss, torch.float32, TERMS[1], 100, (None, None))["kd"])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_the_whole_loss_on_a_gpu(terms):
    """bf16 on the GPU against fp64 of the same numbers on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (300, 64), "weight": (1003, 64), "teacher_hidden": (300, 32), "teacher_weight": (1003, 32)}
    numbers = {n: (torch.randn(s, generator=generator) * 0.4).bfloat16() for n, s in shapes.items()}
    labels = torch.randint(0, 1003, (300,), generator=generator)
    labels[::7] = -100
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        given = {n: x.to(device, dtype).requires_grad_(not n.startswith("teacher")) for n, x in numbers.items()}
        parts = chunked_loss(
            given["hidden"], Head(given["weight"]), labels.to(device), given["teacher_hidden"],
            Head(given["teacher_weight"]), terms, chunk_bytes=2**18,
        )  # fmt: skip
        parts.total_sum.backward()
        results.append([parts.total_sum, given["hidden"].grad, given["weight"].grad])
    for found, exact in zip(*results, strict=True):
        assert (found.double().cpu() - exact).norm() < 0.01 * exact.norm()


@outside
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles(capability):
    """Through ptxas, without the hardware."""
    constants = {"TEACHER": True, "HOT": True, "KL": True, "CAP": True, "TEACHER_CAP": True, "GRAD": True,
                 "BLOCK": 4096}  # fmt: skip
    pointers = {"student_CV": "*bf16", "teacher_CV": "*bf16", "labels_C": "*i64", "kd_C": "*fp32", "ce_C": "*fp32"}
    whole = ("vocabulary", "stride", "teacher_stride")
    kinds = pointers | dict.fromkeys(whole, "i32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "fp32") for name in row_loss_kernel.arg_names}
    values = {(i,): constants[name] for i, name in enumerate(row_loss_kernel.arg_names) if name in constants}
    source = ASTSource(row_loss_kernel, signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert "cubin" in compiled.asm


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
