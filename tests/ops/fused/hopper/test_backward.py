"""The Hopper backward on a GPU, or in the interpreter with its Gluon kernel simulated (routes.py)."""

from __future__ import annotations

import pytest
import torch

from affine_attention.ops.call import AttentionCall, CallSpec, TensorSpec
from affine_attention.ops.visibility import Visibility

pytest.importorskip("triton")
from affine_attention.ops.fused.hopper import backward as hopper_backward
from affine_attention.ops.fused.hopper import recompute
from affine_attention.ops.fused.plan import Plan, inputs_of
from affine_attention.ops.fused.shared.launch import LaunchSet, Slot
from affine_attention.ops.fused.shared.workspace import Workspace

from ....interpreter import run_in_the_interpreter, skip_for_time
from ..cudnn.test_cudnn import (
    AFFINE,
    ALL,
    DEVICE,
    INTERPRETED,
    assert_right,
    make,
    needs_triton,
    on_this_device,  # noqa: F401
    outside,
    results,
)
from ..routes import by_route, make_route, reference

DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]  # those of the kernels
needs_gpu = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs a GPU")
# A small call saves O in addition to its output; a large call recomputes it where it is lost to cancellation.
small, large = by_route("hopper", "hopper"), by_route("hopper", "hopper", large=True)
after_cudnn = by_route("cudnn", "hopper", large=True)
ordered = by_route("hopper", "hopper", ordered=True)
WAYS = [small, large, after_cudnn]
NAMES_OF_WAYS = ["small", "large", "after cuDNN"]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((1, 2, 2, 300, 300, 64), AFFINE),  # all kinds of tiles
        ((2, 4, 2, 200, 200, 64), ALL),
        ((1, 6, 2, 257, 257, 128), AFFINE),
        ((1, 2, 1, 130, 130, 128), ALL),
        ((1, 4, 2, 131, 131, 96), ("alpha", "sink")),
        ((2, 2, 2, 127, 127, 40), ("beta", "gate")),
        ((3, 2, 2, 65, 65, 64), ("beta",)),
        ((1, 2, 2, 128, 128, 72), ("sink",)),
        ((8, 4, 2, 2, 2, 64), AFFINE),
    ],
)
@pytest.mark.parametrize("nonnegative_alpha", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=NAMES_OF_WAYS)
def test_matches_the_reference(shape, names, dtype, nonnegative_alpha, way):
    if nonnegative_alpha and "alpha" not in names:
        pytest.skip("nonnegative_alpha without alpha")
    is_long = shape[0] * shape[1] * shape[3] > 1000
    if shape[3] == 257 or (way is not large and (is_long or not nonnegative_alpha or shape[0] == 8)):
        skip_for_time()
    inputs, grad = make(*shape, names, dtype, nonnegative_alpha)
    visibility = Visibility(shape[0], shape[3], shape[4], grad.device, is_causal=True)
    others = [make(*shape, names, dtype, nonnegative_alpha, seed=n) for n in range(1, 2 if INTERPRETED else 8)]
    assert_right(inputs, grad, visibility, others, way, nonnegative_alpha=nonnegative_alpha)


@needs_triton
@pytest.mark.parametrize(
    ("shape", "names"),
    [((1, 2, 2, 300, 300, 64), AFFINE), ((1, 4, 2, 257, 257, 128), ("alpha", "sink")), ((2, 2, 1, 65, 65, 64), ALL)],
)
def test_sums_in_a_fixed_order_are_bitwise_equal(shape, names):
    """On a CPU each run has another order of its asynchronous operations."""
    inputs, grad = make(*shape, names, DTYPES[0], nonnegative=True)
    visibility = Visibility(shape[0], shape[3], shape[4], grad.device, is_causal=True)
    assert_right(inputs, grad, visibility, function=ordered, nonnegative_alpha=True)
    first = results(ordered, inputs, grad, visibility, nonnegative_alpha=True)
    for _ in range(3 if INTERPRETED else 100):
        for name, x in results(ordered, inputs, grad, visibility, nonnegative_alpha=True).items():
            assert torch.equal(x, first[name]), name


@needs_triton
@pytest.mark.parametrize("forward", ["cudnn", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_cancellation_are_marked_and_no_others(dtype, forward):
    """A row is marked if the norm of its output is more than twice that of alpha O; the first row is always marked."""
    inputs, _ = make(2, 4, 2, 150, 150, 64, ("alpha", "beta", "sink"), dtype, nonnegative=True)
    inputs["alpha"][:, 1] = 1.0
    inputs["beta"][:, 1] = 0.0
    visibility = Visibility(2, 150, 150, DEVICE, is_causal=True)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    call = AttentionCall.of(**leaves, visibility=visibility, softmax_scale=0.125, nonnegative_alpha=True)
    plan = Plan(call, make_route(forward, "hopper", call, large=True))
    with torch.no_grad():
        *_, state = plan.run_forward(plan.prepared(inputs_of(call)))
    marks = plan.forward.state.views(state)[plan.forward.state.index("marks")]
    exact = {**dict.fromkeys(ALL), **{name: x.detach().double() for name, x in inputs.items()}}
    whole, own = (
        reference(**{**exact, **changed}, visibility=visibility, softmax_scale=0.125).norm(dim=-1)
        for changed in ({}, {"beta": None})
    )
    clear, lost = whole < 1.99 * own, whole > 2.01 * own
    lost[:, :, 0], clear[:, :, 0] = True, False
    assert marks[lost].all()
    assert not marks[clear].any()
    assert clear[:, 1, 1:].all()
    assert 0.2 < lost.double().mean() < 0.8


@needs_triton
def test_marked_rows_are_recomputed():
    """For marked rows E . O and its results are recomputed from the scores in fp32; nothing else is written."""
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
    found, parts = torch.full_like(alpha, float("nan")), torch.full((2, 4, 8), float("nan"), device=DEVICE)
    visibility = Visibility(2, 333, 333, DEVICE, is_causal=True)
    call = CallSpec.of(AttentionCall.of(query, key, value, alpha=alpha, sink=sink, visibility=visibility,
                                        softmax_scale=0.125))  # fmt: skip
    workspace = Workspace(
        {"row_numbers": ((2, 4, 4, 336), torch.float32), "listed": ((8, 333), torch.int32),
         "counts": ((8,), torch.int32)}, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"),
    )  # fmt: skip
    at = hopper_backward
    tensors = [None] * at.NUM_TENSORS
    for index, x in ((at.GRAD, grad), (at.QUERY, query), (at.KEY, key), (at.VALUE, value), (at.ALPHA, alpha),
                     (at.SINK, sink), (at.LSE, lse.float()), (at.DALPHA, found), (at.SINK_PARTS, parts)):  # fmt: skip
        tensors[index] = x
    slots = {name: Slot(at.NUM_TENSORS + 1 + n) for n, name in enumerate(workspace.arrays)}
    launches = recompute.launches(
        call, TensorSpec.of(grad), Slot(at.LSE), (4 * 333, 333, 1), Slot(at.NUM_TENSORS), slots, num_sink_parts=8,
        wants_sink=True,
    )  # fmt: skip
    buffer = workspace.new().fill_(float("nan"))
    run = LaunchSet({"recompute": launches}, workspace)
    run.run("recompute", run.values([*tensors, marks], buffer), query.get_device())
    numbers = workspace.views(buffer)[0]
    marked = marks != 0
    torch.testing.assert_close(found[marked].double(), right[marked], rtol=1e-4, atol=1e-4)
    delta = numbers[:, :, 1, :333]
    assert torch.equal(delta[marked], (-alpha.sign() * found)[marked])
    assert found[~marked].isnan().all()
    assert delta[~marked].isnan().all()
    assert numbers[:, :, (0, 2, 3)].isnan().all()
    shares = (sink[:, None] - lse).exp() * alpha * right * marks
    assert recompute.num_parts(333) == 6
    torch.testing.assert_close(parts[:, :, 2:].sum(2).double(), -shares.sum(2), rtol=1e-4, atol=1e-4)
    assert parts[:, :, :2].isnan().all()


@needs_triton
@pytest.mark.parametrize("scale", [1e-3, 1e-30, 0.0])
@pytest.mark.parametrize("way", WAYS, ids=NAMES_OF_WAYS)
def test_small_alphas_keep_their_gradients(scale, way):
    inputs, grad = make(1, 2, 2, 150, 150, 64, AFFINE, DTYPES[0], nonnegative=True)
    inputs["alpha"] *= scale
    visibility = Visibility(1, 150, 150, grad.device, is_causal=True)
    assert_right(inputs, grad, visibility, function=way, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_sharp_attention_keeps_its_gradients(dim, dtype):
    """If one key has nearly all the weight, E . v and E . O nearly cancel, and an error in E . O would be visible."""
    inputs, grad = make(1, 2, 2, 200, 200, dim, AFFINE, dtype, nonnegative=True)
    inputs["query"] = inputs["query"] * 8
    visibility = Visibility(1, 200, 200, grad.device, is_causal=True)
    sharp = reference(
        **{**dict.fromkeys(ALL), **{name: inputs[name].double() for name in ("query", "key")}},
        value=torch.eye(200, dtype=torch.float64, device=DEVICE).expand(1, 2, 200, 200),
        visibility=visibility, softmax_scale=dim**-0.5,
    ).amax(-1)  # fmt: skip
    assert (sharp > 0.9).double().mean() > 0.3
    assert_right(inputs, grad, visibility, function=large, nonnegative_alpha=True)


@needs_triton
@pytest.mark.parametrize("names", [AFFINE, ALL])
def test_takes_any_strides(names):
    inputs, grad = make(2, 4, 2, 140, 140, 64, names, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, 140, 140, DEVICE, is_causal=True)
    right = results(large, inputs, grad, visibility, nonnegative_alpha=True)
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.stack((grad, grad), 3).flatten(2, 3)[:, :, ::2]
    found = results(large, inputs, apart, visibility, nonnegative_alpha=True)
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}")


@needs_triton
def test_an_expanded_gradient():
    """`out.sum().backward()` passes an expanded scalar."""
    inputs, grad = make(1, 2, 2, 140, 140, 64, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(1, 140, 140, DEVICE, is_causal=True)
    one = torch.ones((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    found = results(large, inputs, one, visibility, nonnegative_alpha=True)
    right = results(large, inputs, one.contiguous(), visibility, nonnegative_alpha=True)
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}")


@needs_triton
@pytest.mark.parametrize("block_m", [64, 128])
def test_convert_kernel_restores_the_row_order(block_m):
    """convert_kernel reads a tile in the order in which the threads hold the result of an MMA."""
    from affine_attention.ops.fused.hopper.backward_kernels import convert_kernel

    block_d = 8192 // block_m
    rows, columns = torch.arange(block_m)[:, None], torch.arange(block_d)[None, :]
    parts = 128 // block_m
    # The order written out: part of the columns, warp, 16 columns, row // 8 % 2, thread, column // 8 % 2, column % 2.
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
def test_no_uninitialised_memory_is_read():
    """All new tensors reuse memory that contains NaN, including sums that must start at 0 and tiles beyond the end."""
    inputs, grad = make(1, 4, 2, 333, 333, 64, ALL, DTYPES[0])
    visibility = Visibility(1, 333, 333, DEVICE, is_causal=True)
    right = results(large, inputs, grad, visibility)
    for _ in range(20):
        torch.cuda.empty_cache()
        torch.full((2**26,), float("nan"), device=DEVICE)
        for name, x in results(large, inputs, grad, visibility).items():
            torch.testing.assert_close(x, right[name], rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


@needs_gpu
def test_a_thousand_runs_agree():
    """dK, dV and the row gradients are bitwise equal; dQ, which is added in no fixed order, agrees up to rounding."""
    inputs, grad = make(2, 8, 4, 500, 500, 64, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, 500, 500, DEVICE, is_causal=True)
    right = results(large, inputs, grad, visibility, nonnegative_alpha=True)
    eps = torch.finfo(DTYPES[0]).eps
    for _ in range(1000):
        for name, x in results(large, inputs, grad, visibility, nonnegative_alpha=True).items():
            if name == "grad of query":
                assert (x - right[name]).norm() <= eps * right[name].norm()
            else:
                assert torch.equal(x, right[name]), name


@needs_gpu
def test_in_a_cuda_graph():
    inputs, grad = make(2, 4, 2, 300, 300, 64, AFFINE, DTYPES[0])
    visibility = Visibility(2, 300, 300, DEVICE, is_causal=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        right = results(large, inputs, grad, visibility)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(large, inputs, grad, visibility)
    for _ in range(3):
        for x in captured.values():
            x.data.fill_(float("nan"))
        graph.replay()
        for name, x in captured.items():
            torch.testing.assert_close(x, right[name], rtol=1e-2, atol=1e-2)


@needs_gpu
def test_offsets_beyond_32_bits():
    """Two sequences that are more than 2^31 elements apart in memory."""
    heads, length, dim = 2, 200, 64
    apart = 2**31 + 4096
    memory = torch.empty(apart + 4 * heads * length * dim, dtype=DTYPES[0], device=DEVICE)
    inputs, grad = make(2, heads, heads, length, length, dim, AFFINE, DTYPES[0], nonnegative=True)
    visibility = Visibility(2, length, length, DEVICE, is_causal=True)
    given = {**dict.fromkeys(ALL), **inputs, "visibility": visibility, "softmax_scale": 0.125}

    def gradients():
        leaves = {name: given[name].requires_grad_() for name in inputs}
        out = large(**given, nonnegative_alpha=True)
        return torch.autograd.grad(out, list(leaves.values()), grad)

    right = gradients()
    for place, name in enumerate(("query", "key", "value")):
        strides, offset = (apart, length * dim, dim, 1), place * heads * length * dim
        given[name] = memory.as_strided((2, heads, length, dim), strides, offset).copy_(inputs[name].detach())
    for x, expected in zip(gradients(), right, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-2)


@needs_gpu
def test_memory_is_that_of_plain_attention_plus_row_values():
    """Peak memory and memory kept for the backward exceed those of cuDNN's plain attention by a few values per row."""
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
            return large(**given, nonnegative_alpha=True)

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

        a_row = 4 * 4 * heads * 2048  # bytes of one fp32 value per row
        (kept, peak), (plain_kept, plain_peak) = memory(ours), memory(plain)
        assert kept <= plain_kept + 3 * a_row
        assert peak <= plain_peak + 12 * a_row


def test_other_versions_of_triton_are_rejected(monkeypatch):
    why_not = hopper_backward.why_not_here.__wrapped__
    monkeypatch.setattr(hopper_backward.triton, "__version__", "4.0.1")
    assert why_not() == "needs Triton 3.6 or 3.7, got 4.0.1"


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


@outside
@pytest.mark.slow
def test_every_case_in_the_interpreter():
    run_in_the_interpreter(__file__, in_full=True)
