"""The backward in one kernel, on a GPU; in the interpreter, which has no Gluon, what stands around that kernel."""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.reference import reference_attention
from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused import alone, alone_backward, choose, cudnn, cudnn_backward, faint, side
from affine_attention.ops.fused.sum_table import block_of

from ...interpreter import run_in_the_interpreter
from .test_cudnn import AFFINE, ALL, DEVICE, DTYPES, INTERPRETED, assert_right, make, needs_triton, outside, results

needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")
BLOCK_N = 128


def stand_in(grad, query, key, value, row_numbers, later_sums, softmax_scale, beside_o):
    """What the kernel promises, in plain PyTorch: the formulas at its head, from the numbers that B7 has written."""
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    k, v = (x.double().repeat_interleave(heads // groups, 1) for x in (key, value))
    q, e = query.double(), grad.double()
    start, delta, beta = row_numbers.double()[..., :length].unbind(2)[:3]
    positions = torch.arange(length, device=query.device)
    visible = positions[:, None] >= positions[None, :]
    p = torch.where(visible, torch.exp((q @ k.mT + start[..., None]) * softmax_scale), 0.0)
    ds = p * (e @ v.mT + delta[..., None])
    weights = p
    if later_sums is not None:
        same_block = positions[:, None] // BLOCK_N == positions[None, :] // BLOCK_N
        weights = p + torch.where(visible & same_block, beta[..., None], 0.0)

    def of_group(x):
        return x.view(batch, groups, heads // groups, length, dim).sum(2)

    grad_value = of_group(weights.mT @ e)
    if later_sums is not None:
        blocks = later_sums.shape[2] - 1
        behind = blocks - (positions // BLOCK_N + 1) * (BLOCK_N // block_of(dim))
        grad_value = grad_value + later_sums[:, :, behind.clamp(min=0)]
    grads = (ds @ k * softmax_scale, of_group(ds.mT @ q) * softmax_scale, grad_value)
    return tuple(x.to(query.dtype) for x in grads)


@pytest.fixture
def always(monkeypatch):
    """Every call that can be served is, on the CPU too."""
    monkeypatch.setattr(cudnn_backward, "backwards_alone", lambda *args: True)
    monkeypatch.setattr(faint, "backwards_alone", lambda *args: True)
    if DEVICE == "cpu":
        monkeypatch.setattr(cudnn_backward, "input_gradients", stand_in)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 2, 2, 300, 300, 64), AFFINE),  # tiles of every kind
        ((2, 4, 2, 200, 200, 64), ALL),
        ((1, 6, 2, 257, 257, 128), AFFINE),
        ((1, 2, 1, 130, 130, 128), ALL),
        ((1, 4, 2, 131, 131, 96), ("alpha", "sink")),
        ((2, 2, 2, 127, 127, 40), ("beta", "gate")),
        ((3, 2, 2, 65, 65, 64), ("beta",)),
        ((1, 2, 2, 128, 128, 72), ("sink",)),
        ((8, 4, 2, 2, 2, 64), AFFINE),
        ((1, 2, 2, 64, 64, 64), ()),
    ],
)
@pytest.mark.parametrize("nonnegative_alpha", [True, False])
def test_matches_the_reference(always, shape, names, dtype, nonnegative_alpha):
    if nonnegative_alpha and "alpha" not in names:
        pytest.skip("a promise about alpha, without alpha")
    inputs, grad = make(*shape, names, dtype, nonnegative_alpha)
    visibility = Visibility(shape[0], shape[3], shape[4], grad.device, is_causal=True)
    others = [make(*shape, names, dtype, nonnegative_alpha, seed=n) for n in range(1, 3 if INTERPRETED else 8)]
    assert_right(inputs, grad, visibility, others, nonnegative_alpha=nonnegative_alpha)


@needs_triton
@pytest.mark.parametrize("forward", ["cudnn", "alone"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_faint_rows_are_marked_and_no_others(always, monkeypatch, dtype, forward):
    """A row is faint where its output is more than twice as long as alpha O; the first row is always marked."""
    monkeypatch.setattr(cudnn, "forwards_alone", lambda *args: forward == "alone")
    inputs, _ = make(2, 4, 2, 150, 150, 64, ("alpha", "beta", "sink"), dtype, nonnegative=True)
    inputs["alpha"][:, 1] = 1.0
    inputs["beta"][:, 1] = 0.0
    given = [inputs.get(name) for name in ("query", "key", "value", *ALL)]
    *_, marks = cudnn._forward(*given, True, 0.125, True, True)
    exact = {**dict.fromkeys(ALL), **{name: x.double() for name, x in inputs.items()}}
    visibility = Visibility(2, 150, 150, DEVICE, is_causal=True)
    whole, own = (
        reference_attention(**{**exact, **changed}, visibility=visibility, softmax_scale=0.125).norm(dim=-1)
        for changed in ({}, {"beta": None})
    )
    clear, faint_rows = whole < 1.99 * own, whole > 2.01 * own
    faint_rows[:, :, 0], clear[:, :, 0] = True, False
    assert marks[faint_rows].all()
    assert not marks[clear].any()
    assert clear[:, 1, 1:].all()
    assert 0.2 < faint_rows.double().mean() < 0.8


@needs_triton
def test_rows_regain_what_their_output_has_lost(always):
    """Marked rows get E . O and what follows from the scores, to fp32; nothing else is written."""
    inputs, grad = make(2, 4, 2, 333, 333, 64, ("sink",), DTYPES[0])
    query, key, value, sink = (inputs[name] for name in ("query", "key", "value", "sink"))
    exact = [x.double() for x in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))]
    scores = (exact[0] @ exact[1].mT * 0.125).masked_fill(
        torch.ones(333, 333, dtype=torch.bool, device=DEVICE).triu(1), float("-inf")
    )
    with_sink = torch.cat((scores, sink.double()[None, :, None, None].expand(2, 4, 333, 1)), -1)
    lse = with_sink.logsumexp(-1)
    right = ((scores - lse[..., None]).exp() @ exact[2] * grad.double()).sum(-1)
    generator = torch.Generator().manual_seed(0)
    marks = (torch.rand(2, 4, 333, generator=generator) < 0.4).to(DEVICE, torch.int8)
    marks[0, 1], marks[1, 2] = 0, 1
    alpha = torch.randn(2, 4, 333, generator=generator).to(DEVICE)
    numbers = torch.full_like(alone_backward.new_row_numbers(query), float("nan"))
    found, parts = torch.full_like(alpha, float("nan")), torch.full((2, 4, 8), float("nan"), device=DEVICE)
    faint.regain(
        grad, query, key, value, lse.float(), alpha, sink, marks, 0.125,
        grad_alpha=found, row_numbers=numbers, sink_parts=parts, signed=True,
    )  # fmt: skip
    marked = marks != 0
    torch.testing.assert_close(found[marked].double(), right[marked], rtol=1e-4, atol=1e-4)
    delta = numbers[:, :, 1, :333]
    assert torch.equal(delta[marked], (-alpha.sign() * found)[marked])
    assert found[~marked].isnan().all()
    assert delta[~marked].isnan().all()
    assert numbers[:, :, (0, 2, 3)].isnan().all()
    shares = (sink[:, None] - lse).exp() * alpha * right * marks
    assert faint.parts_of(333) == 6
    torch.testing.assert_close(parts[:, :, 2:].sum(2).double(), -shares.sum(2), rtol=1e-4, atol=1e-4)
    assert parts[:, :, :2].isnan().all()


@needs_triton
@pytest.mark.parametrize("scale", [1e-3, 1e-30, 0.0])
def test_small_alphas_keep_their_gradients(always, scale):
    inputs, grad = make(1, 2, 2, 150, 150, 64, AFFINE, DTYPES[0], nonnegative=True)
    inputs["alpha"] *= scale
    assert_right(inputs, grad, Visibility(1, 150, 150, grad.device, is_causal=True), nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
@pytest.mark.parametrize("dim", [64, 128])
def test_sharp_attention_keeps_its_gradients(always, dim, dtype):
    """Where one key has nearly all the weight E . v and E . O nearly cancel, and noise in the latter would show."""
    inputs, grad = make(1, 2, 2, 200, 200, dim, AFFINE, dtype, nonnegative=True)
    inputs["query"] = inputs["query"] * 8
    visibility = Visibility(1, 200, 200, grad.device, is_causal=True)
    sharp = reference_attention(
        **{**dict.fromkeys(ALL), **{name: inputs[name].double() for name in ("query", "key")}},
        value=torch.eye(200, dtype=torch.float64, device=DEVICE).expand(1, 2, 200, 200),
        visibility=visibility, softmax_scale=dim**-0.5,
    ).amax(-1)  # fmt: skip
    assert (sharp > 0.9).double().mean() > 0.3
    assert_right(inputs, grad, visibility, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("names", [AFFINE, ALL])
def test_takes_any_strides(always, names):
    inputs, grad = make(2, 4, 2, 140, 140, 64, names, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, 140, 140, DEVICE, is_causal=True)
    right = results(cudnn.cudnn_attention, inputs, grad, visibility, nonnegative_alpha=True)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.stack((grad, grad), 3).flatten(2, 3)[:, :, ::2]
    found = results(cudnn.cudnn_attention, inputs, apart, visibility, nonnegative_alpha=True)
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}")


@needs_triton
def test_a_wide_gradient_is_taken_as_it_is(always):
    """`out.sum().backward()` hands over one number for all."""
    inputs, grad = make(1, 2, 2, 140, 140, 64, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(1, 140, 140, DEVICE, is_causal=True)
    one = torch.ones((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    found = results(cudnn.cudnn_attention, inputs, one, visibility, nonnegative_alpha=True)
    right = results(cudnn.cudnn_attention, inputs, one.contiguous(), visibility, nonnegative_alpha=True)
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}")


@needs_triton
@pytest.mark.parametrize("block_m", [64, 128])
def test_tiles_come_back_in_order(block_m):
    """convert_kernel reads the order in which the threads of the matrix units hold a tile."""
    from affine_attention.ops.fused.alone_backward_kernels import convert_kernel

    block_d = 8192 // block_m
    rows, columns = torch.arange(block_m)[:, None], torch.arange(block_d)[None, :]
    parts = 128 // block_m
    # Counted by hand: part of the columns, warp, 16 columns, row // 8 % 2, thread, column // 8 % 2, column % 2.
    warp, thread = rows // 16, rows % 8 * 4 + columns // 2 % 4
    width = block_d // parts
    chunk = (columns // width * (block_m // 16) + warp) * (width // 16) + columns % width // 16
    place = ((chunk * 2 + rows // 8 % 2) * 32 + thread) * 4 + columns // 8 % 2 * 2 + columns % 2
    assert place.flatten().sort().values.equal(torch.arange(8192))
    right = torch.randn(3, 2 * block_m, block_d)
    sums = torch.empty(3, 2, 8192)
    sums[:, :, place.flatten()] = right.view(3, 2, 8192)
    length, dim = 2 * block_m - 3, block_d - 8
    out = torch.full((1, 4, length, dim), float("nan"), device=DEVICE)
    args = (out.stride(), 0.5, length, 2, 4, 1, block_m, dim, block_d)
    convert_kernel[(6,)](sums.to(DEVICE), out, *args, num_warps=4)
    assert out[0, 0].isnan().all()
    torch.testing.assert_close(out[0, 1:].cpu(), right[:, :length, :dim] * 0.5)


@needs_gpu
def test_nothing_is_read_that_was_not_written(always):
    """Every tensor is made where NaN was: sums that begin at 0, rows to their end, tiles beyond the end."""
    inputs, grad = make(1, 4, 2, 333, 333, 64, ALL, DTYPES[0])
    visibility = Visibility(1, 333, 333, DEVICE, is_causal=True)
    right = results(cudnn.cudnn_attention, inputs, grad, visibility)
    for _ in range(20):
        torch.cuda.empty_cache()
        torch.full((2**26,), float("nan"), device=DEVICE)
        for name, x in results(cudnn.cudnn_attention, inputs, grad, visibility).items():
            torch.testing.assert_close(x, right[name], rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


@needs_gpu
def test_a_thousand_times_the_same(always):
    """dK, dV and the rows to the bit; dQ is added in an order that may change, but never by more than its rounding."""
    inputs, grad = make(2, 8, 4, 500, 500, 64, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, 500, 500, DEVICE, is_causal=True)
    right = results(cudnn.cudnn_attention, inputs, grad, visibility, nonnegative_alpha=True)
    eps = torch.finfo(DTYPES[0]).eps
    for _ in range(1000):
        for name, x in results(cudnn.cudnn_attention, inputs, grad, visibility, nonnegative_alpha=True).items():
            if name == "grad of query":
                assert (x - right[name]).norm() <= eps * right[name].norm()
            else:
                assert torch.equal(x, right[name]), name


@needs_gpu
def test_in_a_cuda_graph(always):
    inputs, grad = make(2, 4, 2, 300, 300, 64, AFFINE, DTYPES[0])
    visibility = Visibility(2, 300, 300, DEVICE, is_causal=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        right = results(cudnn.cudnn_attention, inputs, grad, visibility)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(cudnn.cudnn_attention, inputs, grad, visibility)
    for _ in range(3):
        for x in captured.values():
            x.data.fill_(float("nan"))
        graph.replay()
        for name, x in captured.items():
            torch.testing.assert_close(x, right[name], rtol=1e-2, atol=1e-2)


@needs_gpu
@pytest.mark.parametrize("names", [AFFINE, ("alpha", "beta", "sink"), ALL])
def test_is_registered(always, names):
    inputs, grad = make(1, 4, 2, 70, 70, 64, names, DTYPES[0])
    given = {**dict.fromkeys(("query", "key", "value", *ALL)), **{n: x.requires_grad_() for n, x in inputs.items()}}
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (*given.values(), True, 0.25, False, True)
    ops = torch.ops.affine_attention
    torch.library.opcheck(ops.cudnn_forward.default, args, test_utils=utils)
    out, core, *kept = (x.detach() for x in ops.cudnn_forward(*args))
    assert (kept[-1].numel() > 0) == ("gate" not in names)
    rest = [None if x is None else x.detach() for x in given.values()]
    args = (grad, *rest[:3], core if core.numel() else out, *kept, *rest[3:], True, 0.25, False)
    torch.library.opcheck(ops.cudnn_backward.default, args, test_utils=utils)


@needs_gpu
def test_offsets_beyond_32_bits(always):
    """Two sequences that lie more than 2^31 elements apart."""
    heads, length, dim = 2, 200, 64
    apart = 2**31 + 4096
    memory = torch.empty(apart + 4 * heads * length * dim, dtype=DTYPES[0], device=DEVICE)
    inputs, grad = make(2, heads, heads, length, length, dim, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, length, length, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}

    def gradients():
        leaves = {name: given[name].requires_grad_() for name in inputs}
        out = cudnn.cudnn_attention(**given, nonnegative_alpha=True)
        return torch.autograd.grad(out, list(leaves.values()), grad)

    right = gradients()
    for place, name in enumerate(("query", "key", "value")):
        strides, offset = (apart, length * dim, dim, 1), place * heads * length * dim
        given[name] = memory.as_strided((2, heads, length, dim), strides, offset).copy_(inputs[name].detach())
    for x, expected in zip(gradients(), right, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-2)


@needs_gpu
def test_memory_is_that_of_plain_attention_and_rows():
    """At the peak and between forward and backward no more than cuDNN's plain attention, but for numbers a row."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for heads, groups, dim in ((16, 16, 64), (16, 4, 64), (12, 4, 128)):
        inputs, grad = make(4, heads, groups, 2048, 2048, dim, AFFINE, DTYPES[0], nonnegative=True)
        visibility = Visibility(4, 2048, 2048, DEVICE, is_causal=True)
        leaves = [inputs[name].requires_grad_() for name in ("query", "key", "value")]

        def plain(leaves=leaves, grouped=heads != groups):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)

        def ours(inputs=inputs, visibility=visibility):
            given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}
            return cudnn.cudnn_attention(**given, nonnegative_alpha=True)

        def memory(function, leaves=leaves, grad=grad):
            """(kept after the forward, peak of both), in bytes."""
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out = function()
                kept = torch.cuda.memory_allocated() - before
                torch.autograd.grad(out, leaves, grad)
                found = kept, torch.cuda.max_memory_allocated() - before
                del out
            return found

        a_row = 4 * 4 * heads * 2048  # bytes of one fp32 number for every row
        (kept, peak), (plain_kept, plain_peak) = memory(ours), memory(plain)
        assert kept <= plain_kept + 3 * a_row
        assert peak <= plain_peak + 12 * a_row


def test_which_calls_it_serves(monkeypatch):
    class Query(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(alone, "capability_of", lambda x: 90)
    monkeypatch.setattr(alone_backward, "capability_of", lambda x: 90)
    monkeypatch.setattr(alone_backward, "why_not_here", lambda: None)
    query = torch.zeros(1).as_subclass(Query).expand(1, 128, 1024, 64)

    def served(query=query, is_causal=True, softmax_scale=0.1):
        return alone_backward.backwards_alone(query, query, is_causal, softmax_scale)

    assert query.numel() == side.LARGE
    assert served()
    assert served(query=query[..., :1].expand(1, 128, 1024, 128))
    assert not served(is_causal=False)
    assert not served(softmax_scale=-0.1)
    assert not served(query=query[..., :1].expand(1, 128, 1024, 136))
    assert not served(query=query[:, :1, :, :1].expand(1, 512, 1024, 32))
    assert not served(query=query[:, :127])
    assert not served(query=query[:, :1].expand(1, 1024, 1024, 64)[:, :, :511])
    causal = Visibility(1, 1024, 1024, "cpu", is_causal=True)
    assert "one kernel forward, one kernel backward" in choose._why_cudnn(query, query, causal, True)
    assert "cuDNN forward, one kernel backward" in choose._why_cudnn(query, query, causal, False)
    assert "one kernel" not in choose._why_cudnn(query[:, :127], query, causal, True)
    monkeypatch.setattr(alone_backward, "why_not_here", lambda: "is written for Triton 3.6, got 4.0")
    assert not served()
    told = choose._why_cudnn(query, query, causal, True)
    assert "one kernel forward, cuDNN backward" in told
    assert "is written for Triton 3.6, got 4.0" in told
    monkeypatch.setattr(alone_backward, "capability_of", lambda x: 100)
    assert not served()


def test_other_versions_of_triton_are_refused(monkeypatch):
    why_not = alone_backward.why_not_here.__wrapped__
    monkeypatch.setattr(alone_backward.triton, "__version__", "4.0.1")
    assert why_not() == "is written for Triton 3.6 or 3.7, got 4.0.1"


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
