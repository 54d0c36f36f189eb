"""The cuDNN route against the fp64 reference: output and all gradients, in the interpreter and on a GPU (routes.py)."""

from __future__ import annotations

import math
import os

import pytest
import torch

from affine_attention.ops.visibility import Visibility
from affine_attention.testing import MAX_ERROR_RATIO, error_ratio, naive_attention, sdpa_attention

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attention.ops.call import AttentionCall  # noqa: E402
from affine_attention.ops.fused import plan as planning  # noqa: E402
from affine_attention.ops.fused.cudnn import kernels  # noqa: E402
from affine_attention.ops.fused.shared import prologue, value_sums  # noqa: E402

from ....interpreter import run_in_the_interpreter  # noqa: E402
from ..routes import by_route, draw_rows, reference, use_cpu_kernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter's bf16 matmuls are wrong, and cuDNN does not support fp32.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
outside = pytest.mark.skipif(INTERPRETED, reason="starts its own process")
OTHER_SEEDS = range(1, 1 if INTERPRETED else 8)
ALL = ("alpha", "beta", "sink", "gate")
AFFINE = ("alpha", "beta")
by_cudnn = by_route("cudnn", "cudnn")


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    use_cpu_kernels(monkeypatch)


def make(batch, heads, groups, queries, keys, dim, names, dtype, nonnegative=False, seed=0):
    normal, extras = draw_rows(batch, heads, queries, keys, dim, dtype, seed)
    if nonnegative:
        extras["alpha"] = extras["alpha"].clamp(0, 1)  # half of the values are exactly 0, as with linear clipping
    inputs = {
        "query": normal(batch, heads, queries, dim).to(dtype),
        "key": normal(batch, groups, keys, dim).to(dtype),
        "value": normal(batch, groups, keys, dim).to(dtype),
        **{name: extras[name] for name in names},
    }
    grad = normal(batch, heads, queries, dim).to(dtype)
    return {name: x.to(DEVICE) for name, x in inputs.items()}, grad.to(DEVICE)


def results(function, inputs, grad, visibility, dtype=None, **kwargs):
    """Output and the gradient of every input, by name."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    scale = inputs["query"].shape[-1] ** -0.5
    given = {**dict.fromkeys(ALL), **leaves}
    out = function(**given, visibility=visibility, softmax_scale=scale, **kwargs)
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out, **{f"grad of {name}": x for name, x in zip(leaves, grads, strict=True)}}


def plain(formula):
    """A baseline of `affine_attention.testing` with the arguments of the kernels."""
    return lambda *, visibility, softmax_scale, **inputs: formula(
        {n: x for n, x in inputs.items() if x is not None}, visibility, softmax_scale
    )


def errors(inputs, grad, visibility, function, **kwargs):
    """The error of the output and of every gradient against fp64, and that of plain PyTorch in the same dtype."""
    expected = results(reference, inputs, grad, visibility, torch.float64)
    plains = [results(plain(formula), inputs, grad, visibility) for formula in (naive_attention, sdpa_attention)]
    ours = results(function, inputs, grad, visibility, **kwargs)
    rows = visibility.batch * visibility.num_queries
    found = {}
    for name, right in expected.items():
        right, terms = right.detach(), rows if "sink" in name else 1
        error = float((ours[name].detach().double() - right).norm())
        ratio = error_ratio(ours[name].detach(), [each[name].detach() for each in plains], right, terms)
        found[name] = (error, error / ratio if ratio else 1.0)
    return found


def assert_right(inputs, grad, visibility, others=(), function=by_cudnn, **kwargs):
    """At most twice the error of plain PyTorch in the same dtype, for the output and every gradient.

    The gradient of the sink has few elements, so its error has a high variance: it is pooled with that of `others`,
    more draws of inputs and grad, as in `affine_attention.testing`.
    """
    found = errors(inputs, grad, visibility, function, **kwargs)
    if "sink" in inputs and others:
        more = [found, *(errors(*draw, visibility, function, **kwargs) for draw in others)]
        found["grad of sink"] = tuple(math.hypot(*(each["grad of sink"][n] for each in more)) for n in (0, 1))
    for name, (ours, unit) in found.items():
        assert ours <= MAX_ERROR_RATIO * unit, f"{name}: error ratio {ours / unit:.2f}"


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names", "is_causal"),
    [
        ((2, 4, 2, 130, 130, 24), ALL, True),
        ((1, 2, 2, 130, 130, 16), ALL, True),
        ((1, 6, 2, 100, 100, 16), AFFINE, True),
        ((2, 2, 2, 64, 64, 16), AFFINE, True),
        ((1, 2, 1, 2, 2, 16), ALL, True),
        ((1, 4, 2, 70, 130, 16), ALL, False),
        ((1, 2, 2, 130, 70, 16), AFFINE, False),
        ((1, 2, 1, 90, 90, 16), ("sink",), True),
        ((1, 2, 1, 90, 90, 16), ("gate",), True),
        ((1, 2, 1, 90, 90, 16), ("alpha",), True),
        ((1, 2, 1, 90, 90, 16), ("beta",), True),
        ((1, 2, 1, 90, 90, 16), ("beta", "sink"), True),
        ((1, 2, 1, 90, 90, 16), (), True),
    ],
)
def test_matches_the_reference(shape, names, is_causal, dtype):
    inputs, grad = make(*shape, names, dtype)
    visibility = Visibility(shape[0], shape[3], shape[4], grad.device, is_causal=is_causal)
    assert_right(inputs, grad, visibility, others=[make(*shape, names, dtype, seed=n) for n in OTHER_SEEDS])


@needs_triton
@pytest.mark.parametrize("scale", [1e-3, 1e-30, 0.0])
def test_small_alphas_keep_their_gradients(scale):
    """O is saved, so there is no division by alpha, and its gradient is as accurate for alpha = 0 as for alpha = 1."""
    inputs, grad = make(1, 2, 2, 100, 100, 16, AFFINE, DTYPES[0], nonnegative=True)
    inputs["alpha"] *= scale
    visibility = Visibility(1, 100, 100, grad.device, is_causal=True)
    assert_right(inputs, grad, visibility, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("names", [AFFINE, ALL])
@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_gradient_the_output_overwrites_o(names, groups):
    dim = 72  # too large for the Hopper forward
    inputs, grad = make(1, 2, groups, 70, 70, dim, names, DTYPES[0], nonnegative=True)
    visibility = Visibility(1, 70, 70, grad.device, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": dim**-0.5}
    expected = results(by_cudnn, inputs, grad, visibility, nonnegative_alpha=True)["out"]
    assert torch.equal(by_cudnn(**given, nonnegative_alpha=True), expected)


@needs_triton
@pytest.mark.parametrize("names", [AFFINE, ("alpha", "sink"), ALL])
@pytest.mark.parametrize("with_side_stream", [False, True])
def test_alpha_through_the_log_sum_exp(monkeypatch, names, with_side_stream):
    if with_side_stream:
        for part in ("forward", "backward"):
            monkeypatch.setattr(f"affine_attention.ops.fused.cudnn.{part}.WORTH_A_STREAM", 0)
    inputs, grad = make(1, 4, 2, 100, 100, 72, names, DTYPES[0], nonnegative=True)
    visibility = Visibility(1, 100, 100, grad.device, is_causal=True)
    assert_right(inputs, grad, visibility, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("names", [(), AFFINE, ALL])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_supports_any_strides(names, nonnegative):
    inputs, grad = make(2, 4, 2, 70, 70, 16, names, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, 70, 70, grad.device, is_causal=True)
    inputs = {n: x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x for n, x in inputs.items()}
    if "alpha" in inputs:
        inputs["alpha"] = inputs["alpha"].mT.contiguous().mT
    inputs["value"] = inputs["value"].mT.contiguous().mT
    for strange in (grad, grad.mT.contiguous().mT, grad[:1, :1, :1, :1].expand_as(grad)):
        assert_right(inputs, strange, visibility, nonnegative_alpha=nonnegative)


@needs_triton
def test_later_tokens_do_not_affect_earlier_rows():
    inputs, grad = make(1, 2, 1, 150, 150, 16, ALL, DTYPES[0])
    visibility = Visibility(1, 150, 150, grad.device, is_causal=True)
    before = results(by_cudnn, inputs, grad, visibility)["out"]
    for name in ("query", "key", "value"):
        inputs[name][:, :, 101:] *= -3
    after = results(by_cudnn, inputs, grad, visibility)["out"]
    assert torch.equal(before[:, :, :101], after[:, :, :101])


@needs_triton
def test_a_constant_sink_needs_no_prologue():
    inputs, grad = make(1, 2, 1, 40, 40, 16, ("sink",), DTYPES[0])
    visibility = Visibility(1, 40, 40, grad.device, is_causal=True)
    full = results(by_cudnn, inputs, grad, visibility)
    sink = inputs.pop("sink")
    leaves = {n: x.requires_grad_() for n, x in inputs.items()}
    given = {**dict.fromkeys(ALL), **leaves, "sink": sink}
    out = by_cudnn(**given, visibility=visibility, softmax_scale=0.25)
    for name, x in zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True):
        assert torch.equal(x, full[f"grad of {name}"])


@needs_triton
@pytest.mark.parametrize("table_rows", [1, 100])
def test_long_tables_are_scanned(monkeypatch, table_rows):
    """Readers add the rows of a short table themselves; both ways give the same sums."""
    monkeypatch.setattr(value_sums, "is_scanned", lambda *_: table_rows == 1)
    inputs, grad = make(1, 4, 2, 130, 130, 16, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(1, 130, 130, grad.device, is_causal=True)
    assert_right(inputs, grad, visibility, nonnegative_alpha=True)


def call_of(x, **changes):
    given = {"batch": 1, "num_queries": 4, "num_keys": 4, "device": x.device, **changes}
    return AttentionCall.of(x, x, x, visibility=Visibility(**given), softmax_scale=0.25)


def test_unsupported_calls_get_a_reason():
    assert "CUDA" in planning.why_not_plain(call_of(torch.zeros(1, 2, 4, 16)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("changes", "word"),
    [({}, None), ({"window": 3}, "window"), ({"num_keys": 5, "is_causal": True}, "as many queries")],
)
def test_unsupported_calls_on_a_gpu(changes, word):
    x = torch.zeros(1, 2, 4, 16, device="cuda", dtype=torch.bfloat16)
    reason = planning.why_not_plain(call_of(x, **changes))
    assert reason is None if word is None else word in reason


@outside
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability):
    """Compiles with ptxas, without a GPU: 2 heads per group, all inputs, head dim 128."""
    pointers = {
        **dict.fromkeys(
            ("core", "corrected", "out", "value", "gate", "grad_out", "grad_core", "grad_gate", "grad_value"), "*bf16"
        ),
        **dict.fromkeys(("weighted", "source"), "*bf16"),
        **dict.fromkeys(("lse", "table", "alpha", "beta", "sink", "grad_alpha", "grad_beta"), "*fp32"),
        **dict.fromkeys(("sink_parts", "weighted_table", "row_numbers", "zeroed"), "*fp32"),
        "marks": "*i8",
        "softmax_scale": "fp32",
    }
    constants = {"HEADS": 2, "SHIFT": True, "CAUSAL": True, "HEAD_DIM": 128, "BLOCK": 16, "BLOCK_D": 128}
    constants |= {"EARLY": capability >= 90, "SCANNED": False, "ZERO_CHUNK": 2048}
    constants |= {"rule": None, "RULED": False, "LSE_IN_LOG2": False}
    for kernel in (
        value_sums.block_sums_kernel, value_sums.scan_kernel, kernels.epilogue_kernel, prologue.prologue_kernel,
        kernels.add_later_kernel,
    ):  # fmt: skip
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
        values = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
        source = ASTSource(kernel, signature, constexprs=values)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 2})
        assert "cubin" in compiled.asm, kernel.__name__


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


@outside
def test_a_compiled_graph_takes_cudnn_only_where_it_is_allowed_and_there(monkeypatch):
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    visibility = Visibility(1, 64, 64, x.device, is_causal=True)
    call = AttentionCall.of(x, x, x, visibility=visibility, softmax_scale=0.125)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(planning, "_cudnn_takes", lambda *_: False)
    assert "does not take" in (planning.why_not_cudnn(call) or "")
    monkeypatch.setattr(planning, "_cudnn_takes", lambda *_: True)
    assert planning.why_not_cudnn(call) is None
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert "disabled" in (planning.why_not_cudnn(call) or "")
