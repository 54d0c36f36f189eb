"""alpha, beta and their gradients from hidden states and W_a, against F.linear and PyTorch's formula."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.nn import scaling
from affine_attention.nn.coefficients import ALPHA_RULES
from affine_attention.nn.scaling import AffineScale, _CollectAlpha

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attention.ops.fused import projection  # noqa: E402
from affine_attention.ops.fused import projection_kernels as kernels  # noqa: E402
from affine_attention.ops.fused.projection import projected_coefficients  # noqa: E402

from ...interpreter import run_in_the_interpreter  # noqa: E402
from .flash.test_compile import local_memory  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
outside = pytest.mark.skipif(INTERPRETED, reason="starts a process of its own, or compiles")
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])  # the interpreter truncates to bf16
# PyTorch divides by a Python number exactly on the CPU; on a GPU it multiplies by the reciprocal, exact for 2^n.
DIVISOR = 7 if INTERPRETED else 64
SHAPES = [(2, 33, 40, 9), (1, 1, 144, 1), (3, 1, 40, 16), (1, 150, 144, 33), (2, 70, 300, 9)]  # B, T, M, H
EPS32 = torch.finfo(torch.float32).eps


def make(shape, dtype, seed=0):
    """hidden, weight, a running average and gradients of alpha and beta.

    Elements of hidden and weight are small multiples of 1/4: their products are summed without rounding errors in any
    order, and scores lie on both sides of the clipping.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, length, dim, heads = shape
    hidden = torch.randint(-8, 9, (batch, length, dim), generator=generator) / 4
    weight = torch.randint(-2, 3, (heads, dim), generator=generator) / 4
    running_alpha = torch.rand(heads, generator=generator)
    grads = [torch.randn(batch, heads, length, generator=generator) for _ in range(2)]
    found = hidden.to(dtype), weight.to(dtype), running_alpha, *grads
    return *(x.to(DEVICE) for x in found[:3]), [x.to(DEVICE) for x in found[3:]]


def formula(hidden, weight, activation, running_alpha=None, divisor=None, token_mask=None, collected=None):
    """PyTorch's operations, as AffineScale runs them without the kernels.

    The linear layer runs in fp32 and rounds once: in half precision cuBLAS may round partial sums too.
    """
    scores = F.linear(hidden.float(), weight.float()).to(hidden.dtype)
    alpha = ALPHA_RULES[activation].function(scores.float(), 0.5)
    if collected is not None:
        alpha = _CollectAlpha.apply(alpha, token_mask, collected)
    alpha = alpha.transpose(1, 2)
    return alpha, None if running_alpha is None else (running_alpha[:, None] - alpha) / divisor


def run(function, hidden, weight, activation, running_alpha, divisor, grads, token_mask=None):
    """alpha, beta, and the gradients of hidden, weight and collected."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    collected = torch.zeros(len(weight) + 1, dtype=torch.float64, device=DEVICE, requires_grad=True)
    alpha, beta = function(hidden, weight, activation, running_alpha, divisor, token_mask, collected)
    outputs = [x for x in (alpha, beta) if x is not None]
    torch.autograd.backward(outputs, grads[: len(outputs)])
    return alpha.detach(), None if beta is None else beta.detach(), hidden.grad, weight.grad, collected.grad


def score_gradients(hidden, weight, activation, grads, divisor):
    """|d score| [B, T, H] in fp64, from scores without rounding errors."""
    scores = F.linear(hidden.double(), weight.double()).requires_grad_()
    alpha = ALPHA_RULES[activation].function(scores.to(hidden.dtype).double(), 0.5)
    wanted = grads[0].double() - (0 if divisor is None else grads[1].double() / divisor)
    (grad,) = torch.autograd.grad(alpha, scores, wanted.transpose(1, 2))
    return grad.abs()


def assert_close(mine, right, hidden, weight, activation, grads, divisor):
    """Bitwise for alpha and beta with linear clipping; exp is rounded differently, so a sigmoid may differ.

    d hidden and d W are sums of n products in different orders: each has an error of at most n eps32 sum |a| |b|, and
    rounds once to its dtype. With a sigmoid, d score itself may differ by a few units in the last place of its dtype.
    """
    dtype, linear = hidden.dtype, activation == "linear_clipping"
    eps = torch.finfo(dtype).eps
    for x, y in zip(mine, right, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x.shape == y.shape and x.dtype == y.dtype)
    for x, y in zip(mine[:2], right[:2], strict=True):
        if y is not None:
            assert x.is_contiguous()
            torch.testing.assert_close(x, y, rtol=0 if linear else 4 * EPS32, atol=0 if linear else 4 * EPS32)
    grad = score_gradients(hidden, weight, activation, grads, divisor)
    tokens = hidden.shape[0] * hidden.shape[1]
    # A GPU's exp scales its argument before it rounds: the error of a sigmoid grows with the score.
    largest = float(F.linear(hidden.double(), weight.double()).abs().max())
    per_product = 0 if linear else 4 * (1 + largest) * eps
    sums = [grad @ weight.double().abs(), torch.einsum("bth,btm->hm", grad, hidden.double().abs())]
    for x, y, terms, size in zip(mine[2:4], right[2:4], (len(weight), tokens), sums, strict=True):
        bound = size * (2 * (terms + 2) * EPS32 + per_product) + eps * y.abs().double() + torch.finfo(dtype).tiny
        assert ((x.double() - y.double()).abs() <= bound).all()
    torch.testing.assert_close(mine[4], right[4], rtol=1e-12 if linear else 4 * EPS32, atol=0)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["linear_clipping", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape, activation, dtype):
    hidden, weight, running_alpha, grads = make(shape, dtype)
    for average, divisor in ((running_alpha, DIVISOR), (None, None)):
        arguments = hidden, weight, activation, average, divisor, grads
        mine, right = (run(function, *arguments) for function in (projected_coefficients, formula))
        assert_close(mine, right, hidden, weight, activation, grads, divisor)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_scores_are_rounded_once(dtype):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 50, 300, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(9, 300, generator=generator).to(DEVICE, dtype) / 4
    with torch.no_grad():
        alpha, _ = projected_coefficients(hidden, weight, "linear_clipping")
    exact = F.linear(hidden.double(), weight.double())
    size = F.linear(hidden.double().abs(), weight.double().abs())
    bound = 302 * EPS32 * size + torch.finfo(dtype).eps / 2 * exact.abs()
    error = (alpha.transpose(1, 2).double() - (0.1 * exact + 0.5).clamp(0, 1)).abs()
    assert (error <= 0.1 * bound + 2 * EPS32).all()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_on_the_boundaries_of_the_clipping_are_those_of_torch(dtype):
    edges = [-5.0, 5.0, 0.0, -5.03125, 5.03125, -4.96875, 4.96875, torch.inf, -torch.inf, torch.nan, 1e4, -1e4]
    # W_a selects column h of hidden for head h; columns with inf and NaN would also reach heads with a weight of 0.
    hidden = torch.zeros(12, 1, 16, device=DEVICE, dtype=dtype)
    hidden[:, 0, 0] = torch.tensor(edges, device=DEVICE).to(dtype)
    weight = torch.zeros(1, 16, device=DEVICE, dtype=dtype)
    weight[0, 0] = 1
    grads = [torch.randn(12, 1, 1, device=DEVICE) for _ in range(2)]
    average = torch.rand(1, device=DEVICE)
    mine, right = (
        run(function, hidden, weight, "linear_clipping", average, 64, grads)
        for function in (projected_coefficients, formula)
    )
    for x, y in zip(mine[:3], right[:3], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    flat = mine[2][:, 0, 0]
    assert (flat[[0, 1]] != 0).all(), "alpha of exactly 0 and 1 has a gradient"
    assert not flat[[3, 4]].any()


@needs_triton
def test_padding_is_replaced_and_not_counted():
    hidden, weight, running_alpha, grads = make((3, 40, 40, 5), torch.float32)
    mask = torch.rand(3, 80, device=DEVICE)[:, 40:] < 0.6
    mask[2] = False
    hidden[~mask] = torch.nan
    arguments = hidden, weight, "linear_clipping", running_alpha, DIVISOR, grads, mask
    mine, right = (run(function, *arguments) for function in (projected_coefficients, formula))
    for x, y in zip(mine[:2], right[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(mine[2], right[2])
    assert mine[2].isfinite().all()
    torch.testing.assert_close(mine[4], right[4], rtol=1e-12, atol=0)
    assert mine[4][-1] == mask.sum()
    assert mine[4].isfinite().all()


@needs_triton
@pytest.mark.parametrize("layout", ["transposed", "sliced", "unaligned", "expanded"])
def test_any_strides_and_addresses(layout):
    shape = (2, 21, 40, 6)
    hidden, weight, running_alpha, grads = make(shape, torch.float16)
    right = run(projected_coefficients, hidden, weight, "linear_clipping", running_alpha, 64, grads)
    if layout == "transposed":
        hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)
        grads = [grad.transpose(0, 2).contiguous().transpose(0, 2) for grad in grads]
    elif layout == "sliced":
        hidden = torch.cat([hidden, hidden], 1)[:, 21:]
        weight = torch.cat([weight, weight], 1)[:, 40:]
    elif layout == "unaligned":
        hidden, weight = (F.pad(x.flatten(), (1, 0))[1:].view(x.shape) for x in (hidden, weight))
        running_alpha = F.pad(running_alpha, (1, 0))[1:]
    else:
        grads = [grad[:, :1, :1].expand(2, 6, 21) for grad in grads]  # what .sum().backward() gives
        copies = [grad.contiguous() for grad in grads]
        right = run(projected_coefficients, hidden, weight, "linear_clipping", running_alpha, 64, copies)
    mine = run(projected_coefficients, hidden, weight, "linear_clipping", running_alpha, 64, grads)
    for x, y in zip(mine, right, strict=True):
        assert torch.equal(x, y)


@needs_triton
@pytest.mark.parametrize("which", ["alpha", "beta"])
def test_one_of_two_gradients(which):
    hidden, weight, running_alpha, grads = make((2, 9, 40, 3), torch.float32)
    results = []
    for function in (projected_coefficients, formula):
        leaf = hidden.clone().requires_grad_()
        alpha, beta = function(leaf, weight, "linear_clipping", running_alpha, 64)
        (alpha if which == "alpha" else beta).backward(grads[0])
        results.append(leaf.grad)
    torch.testing.assert_close(*results, rtol=8 * EPS32, atol=8 * EPS32)


@needs_triton
@pytest.mark.parametrize("wanted", ["hidden", "weight", "collected"])
def test_each_gradient_alone_is_bitwise_the_same(wanted):
    hidden, weight, running_alpha, grads = make((2, 70, 300, 9), torch.float16)
    whole = run(projected_coefficients, hidden, weight, "sigmoid", running_alpha, 64, grads)[2:]
    collected = torch.zeros(10, dtype=torch.float64, device=DEVICE, requires_grad=True)
    leaves = {"hidden": hidden, "weight": weight, "collected": collected if wanted == "collected" else None}
    if wanted != "collected":
        leaves[wanted].requires_grad_()
    outputs = projected_coefficients(hidden, weight, "sigmoid", running_alpha, 64, None, leaves["collected"])
    torch.autograd.backward(outputs, grads)
    expected = whole[list(leaves).index(wanted)]
    if wanted == "collected":  # other programs sum other token blocks
        torch.testing.assert_close(collected.grad, expected, rtol=1e-12, atol=0)
    else:
        assert torch.equal(leaves[wanted].grad, expected)


@needs_triton
def test_without_gradients_nothing_is_saved():
    hidden, weight, running_alpha, _ = make((1, 4, 40, 3), torch.float32)
    with torch.no_grad():
        alpha, beta = projected_coefficients(hidden, weight.requires_grad_(), "linear_clipping", running_alpha, 64)
    assert not alpha.requires_grad
    assert beta.grad_fn is None


@needs_triton
def test_one_launch_forward_and_two_backward():
    hidden, weight, running_alpha, grads = make((2, 300, 40, 4), torch.float32)
    projection._plans.clear()
    for _ in range(2):
        run(projected_coefficients, hidden, weight, "linear_clipping", running_alpha, 64, grads)
    groups = [launches for each in projection._plans.values() for launches in each.launches.groups.values()]
    assert [[launch.kernel for launch in launches] for launches in groups] == [
        [kernels.projection_kernel],
        [kernels.projection_backward_kernel, kernels.projection_sum_kernel],
    ]


@needs_triton
def test_compiled_is_bitwise_the_same():
    hidden, weight, running_alpha, grads = make((2, 33, 40, 9), torch.float16)
    mask = torch.rand(2, 33, device=DEVICE) < 0.5
    torch._dynamo.reset()
    compiled = torch.compile(projected_coefficients, backend="aot_eager", fullgraph=True)
    for average, divisor in ((running_alpha, 64), (None, None)):
        arguments = hidden, weight, "linear_clipping", average, divisor, grads, mask
        eager, traced = (run(function, *arguments) for function in (projected_coefficients, compiled))
        for x, y in zip(eager, traced, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)


class Layer(nn.Module):
    """AffineScale in an activation checkpoint or not."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale = AffineScale(Mechanism.named("affine", running_alpha_start=0.3), 16, 4)
        nn.init.normal_(self.scale.proj.weight, std=1.0)
        self.checkpointed = checkpointed

    def forward(self, hidden, mask=None):
        if self.checkpointed:
            return torch.utils.checkpoint.checkpoint(self.scale, hidden, 64, mask, use_reentrant=False)
        return self.scale(hidden, 64, mask)


def train(layer, call=None, parts=1):
    """Runs one step; returns (alpha, beta, gradients, running average)."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 50, 16, generator=generator).to(DEVICE).requires_grad_()
    mask = (torch.rand(4, 50, generator=generator) < 0.7).to(DEVICE)
    outputs = []
    for x, m in zip(hidden.chunk(parts), mask.chunk(parts), strict=True):
        alpha, beta = (layer if call is None else call)(x, m)
        (alpha * torch.arange(50, device=DEVICE) + 30 * beta.sin()).sum().backward()
        outputs.append((alpha, beta))
    commit_running_alpha(layer)
    alpha, beta = (torch.cat(x).detach() for x in zip(*outputs, strict=True))
    return alpha, beta, layer.scale.proj.weight.grad, hidden.grad, layer.scale.running_alpha


@needs_triton
def test_the_module_with_and_without_the_kernels(monkeypatch):
    mine = train(Layer().to(DEVICE))
    monkeypatch.setattr(scaling, "_is_served", lambda x: False)
    right = train(Layer().to(DEVICE))
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@needs_triton
def test_checkpointing_is_bitwise_the_same():
    plain, checkpointed = (train(Layer(x).to(DEVICE)) for x in (False, True))
    for x, y in zip(plain, checkpointed, strict=True):
        assert torch.equal(x, y)


@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_module_takes_two_operators(dynamic):
    torch._dynamo.reset()
    names = []

    def backend(graph, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def keep(traced, _):
            names.append([str(node.target) for node in traced.graph.nodes if node.op == "call_function"])
            return make_boxed_func(traced)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    eager, layer = Layer().to(DEVICE), Layer().to(DEVICE)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    for x, y in zip(train(eager), train(layer, compiled), strict=True):
        assert torch.equal(x, y)
    forward, backward = ([name for name in each if "getitem" not in name] for each in names)
    assert [name for name in forward if "sym_size" not in name] == ["affine_attention.projection.default"]
    assert "affine_attention.projection_backward.default" in backward
    assert not any("mm" in name for name in backward)


@needs_triton
def test_micro_batches_equal_one_batch():
    whole, split = (train(Layer().to(DEVICE), parts=parts)[-1] for parts in (1, 4))
    torch.testing.assert_close(whole, split, rtol=1e-6, atol=1e-7)


@needs_triton
def test_which_calls_take_the_kernels():
    scale = AffineScale(Mechanism.named("affine"), 16, 4).to(DEVICE)
    hidden = torch.randn(2, 3, 16, device=DEVICE)
    takes = scaling._can_project

    def name(num_keys=64):
        return type(scale(hidden, num_keys)[0].grad_fn).__name__

    assert "_Projection" in name()
    assert "_Projection" not in name(torch.full((2, 1, 3), 64, device=DEVICE)), "a divisor per query takes the formula"
    assert takes(scale.proj, hidden)
    assert not takes(scale.proj, hidden.half())
    assert not takes(scale.proj, hidden.double())
    assert not takes(scale.proj, hidden[:, :0])
    assert not takes(nn.Linear(16, 4, device=DEVICE), hidden), "a bias"
    assert not takes(nn.Linear(16, 65, bias=False, device=DEVICE), hidden), "too many heads for one tile"
    assert not takes(nn.Identity(), hidden)
    with torch.autocast(DEVICE, torch.float16):
        assert not takes(scale.proj, hidden)
        assert takes(nn.Linear(16, 4, bias=False, device=DEVICE, dtype=torch.float16), hidden.half())
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(scale.proj, f"register_{register}")(lambda *_: None)
        assert not takes(scale.proj, hidden), register
        handle.remove()
    scale.proj.forward = lambda x: x @ scale.proj.weight.T
    assert not takes(scale.proj, hidden), "a replaced forward"


@needs_triton
def test_words_for_wrong_calls():
    x, w = torch.zeros(1, 2, 16, device=DEVICE), torch.zeros(3, 16, device=DEVICE)
    with pytest.raises(ValueError, match="activation must be one of 'linear_clipping', 'sigmoid', got 'relu'"):
        projected_coefficients(x, w, "relu")
    with pytest.raises(ValueError, match="divisor is missing"):
        projected_coefficients(x, w, "sigmoid", torch.zeros(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"token_mask must have shape \[B, T\] = \[1, 2\], got \[1, 5\]"):
        projected_coefficients(x, w, "sigmoid", token_mask=torch.ones(1, 5, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match=r"weight must have the dtype of hidden, torch.float32, got torch.float16"):
        projected_coefficients(x, w.half(), "sigmoid")


@needs_triton
def test_a_second_backward_is_an_error():
    hidden, weight, _, _ = make((1, 2, 40, 3), torch.float32)
    alpha, _ = projected_coefficients(hidden.requires_grad_(), weight, "sigmoid")
    (grad,) = torch.autograd.grad(alpha.square().sum(), [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def _compiled(kernel, constants, dtype, capability, stages):
    """The kernel for a GPU that need not be here, with every tensor given at multiples of 16 bytes."""
    types = {"token_mask": "*i1", "partial_sums": "*fp64", "grad_collected": "*fp64", "divisor": "fp32",
             "partial_weight": "*fp32",
             **dict.fromkeys(("hidden", "weight", "scores", "grad_hidden", "grad_weight"), dtype),
             **dict.fromkeys(("alpha", "beta", "running_alpha", "grad_alpha", "grad_beta"), "*fp32")}  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(n,): constants[name] for n, name in enumerate(names) if name in constants}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    options = {"num_warps": kernels.NUM_WARPS, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@outside
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dim", "heads", "length"), [(576, 9, 2048), (2048, 32, 2048), (4096, 128, 2048), (2048, 32, 1)]
)
def test_compiles_without_spills_for_gpus_that_are_not_here(capability, dim, heads, length):
    given = {"NUM_HEADS": heads, "MODEL_DIM": dim, "SIGMOID": False}
    tile = ("BLOCK_T", "BLOCK_H", "BLOCK_M")
    forward = projection.forward_tile(length, heads, dim, torch.bfloat16)
    backward = projection.backward_tile(length, heads, dim, torch.bfloat16)
    chunks = -(-dim // backward[2])
    sums = {"WEIGHT_PROGRAMS": 64, "BLOCK_P": 64, "BLOCK_W": 64, "BLOCK_S": 16}
    for kernel, constants, stages in (
        (kernels.projection_kernel, {**given, **dict(zip(tile, forward, strict=True))}, 4),
        (kernels.projection_backward_kernel,
         {**given, "NUM_CHUNKS": chunks, **dict(zip(tile, backward, strict=True))}, 3),
        (kernels.projection_sum_kernel, {"NUM_HEADS": heads, "MODEL_DIM": dim, **sums}, 3),
    ):  # fmt: skip
        compiled = _compiled(kernel, constants, "*bf16", capability, stages)
        assert local_memory(compiled.asm["cubin"]) == 0, f"{kernel.__name__} spills registers"
        assert compiled.metadata.shared <= 101376, "more shared memory than compute capability 8.9 has"
        assert "fma.rn.f32" not in compiled.asm["ptx"], "0.1 * score + 0.5 must round twice, as in PyTorch"


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
