"""The decode kernel against the fp64 reference, in Triton's interpreter on the CPU and on a GPU if available."""

from __future__ import annotations

import os

import pytest
import torch

from affine_attention import attention, decode_attention, explain
from affine_attention.ops.call import AttentionCall
from affine_attention.ops.reference import reference_attention
from affine_attention.ops.visibility import Visibility

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attention.ops.fused.decode import attention as decode  # noqa: E402
from affine_attention.ops.fused.decode.kernels import merge_kernel, split_kernel  # noqa: E402
from affine_attention.ops.fused.decode.op import decode as run_decode  # noqa: E402
from affine_attention.ops.fused.plan import why_not_decode  # noqa: E402

from ....interpreter import run_in_the_interpreter  # noqa: E402
from ..routes import draw_rows  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter's bf16 matmuls are wrong, so bf16 is tested on a GPU only.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, and in the interpreter's own process"
)
outside = pytest.mark.skipif(INTERPRETED, reason="starts its own process")
ALL = ("alpha", "beta", "sink", "gate")
NO_SINK = ("alpha", "beta", "gate")
other_weights = pytest.mark.parametrize("weights", ["signed", "sigmoid"])


def make(batch, heads, groups, queries, keys, dim, names, dtype, seed=0):
    normal, extras = draw_rows(batch, heads, queries, keys, dim, dtype, seed)
    qkv = [normal(batch, n, length, dim).to(dtype) for n, length in ((heads, queries), (groups, keys), (groups, keys))]
    if "row sink" in names:
        names, extras["sink"] = (*names, "sink"), extras["sink"][:, None] + normal(batch, queries, heads).mT
    extras = {name: x.to(DEVICE) if name in names else None for name, x in extras.items()}
    return [x.to(DEVICE) for x in qkv], extras


def call_of(qkv, extras, visibility, weights="softmax", scale=None):
    scale = qkv[0].shape[-1] ** -0.5 if scale is None else scale
    return AttentionCall.of(*qkv, **extras, visibility=visibility, softmax_scale=scale)._replace(weights=weights)


def oracle(qkv, extras, visibility, weights="softmax", scale=None):
    extras = {name: None if x is None else x.double() for name, x in extras.items()}
    return reference_attention(call_of([x.double() for x in qkv], extras, visibility, weights, scale))


def run(qkv, extras, visibility, weights="softmax", scale=None, **kwargs):
    return run_decode(call_of(qkv, extras, visibility, weights, scale), **kwargs)


def assert_close(out, expected, dtype):
    """The oracle gets the rounded inputs, so the error comes from rounding the weights and the output."""
    assert out.dtype == dtype
    assert out.isfinite().all()
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    # fp32 sums are reordered; 16-bit dtypes round each weight and the output once: below one eps in relative norm.
    assert error < (8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps, float(error)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names", "is_causal", "window"),
    [
        ((2, 4, 2, 1, 300, 32), ALL, True, None),
        ((1, 3, 1, 1, 1, 16), ALL, True, None),
        ((1, 2, 2, 1, 129, 24), (), True, None),
        ((1, 4, 2, 5, 200, 16), ALL, True, None),
        ((1, 4, 2, 5, 200, 16), ("beta",), False, None),
        ((2, 2, 1, 3, 200, 16), ALL, True, 70),
        ((1, 2, 1, 3, 150, 16), ("alpha", "beta"), False, 40),
        ((1, 8, 1, 16, 40, 16), ALL, True, None),
        ((1, 2, 1, 6, 4, 16), ALL, True, None),
        ((1, 2, 2, 1, 70, 80), ("sink",), True, None),
        ((2, 4, 2, 1, 70, 16), ("row sink",), True, None),
        ((2, 4, 2, 5, 200, 16), (*ALL, "row sink"), True, None),
    ],
)
def test_matches_the_reference(shape, names, is_causal, window, dtype):
    qkv, extras = make(*shape, names, dtype)
    visibility = Visibility(shape[0], shape[3], shape[4], qkv[0].device, is_causal=is_causal, window=window)
    assert_close(run(qkv, extras, visibility), oracle(qkv, extras, visibility), dtype)


@needs_triton
@other_weights
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "names", "is_causal", "window", "scale"),
    [
        ((2, 4, 2, 1, 300, 32), NO_SINK, True, None, None),
        ((1, 3, 1, 1, 1, 16), NO_SINK, True, None, None),
        ((1, 2, 2, 1, 900, 24), (), True, None, None),
        ((1, 4, 2, 5, 600, 16), NO_SINK, True, None, None),
        ((1, 4, 2, 5, 200, 16), ("beta",), False, None, -0.4),
        ((2, 2, 1, 3, 200, 16), NO_SINK, True, 70, None),
        ((1, 2, 1, 3, 150, 16), ("alpha", "beta"), False, 40, None),
        ((1, 8, 1, 16, 40, 16), NO_SINK, True, None, 0.0),
        ((1, 2, 1, 6, 4, 16), NO_SINK, True, None, None),
    ],
)
def test_signed_and_sigmoid_weights_match_the_reference(shape, names, is_causal, window, scale, weights, dtype):
    qkv, extras = make(*shape, names, dtype)
    visibility = Visibility(shape[0], shape[3], shape[4], qkv[0].device, is_causal=is_causal, window=window)
    expected = oracle(qkv, extras, visibility, weights, scale)
    assert_close(run(qkv, extras, visibility, weights, scale), expected, dtype)


@needs_triton
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("weights", ["softmax", "signed", "sigmoid"])
def test_masked_keys_are_never_read(weights, window):
    qkv, extras = make(2, 4, 2, 2, 150, 16, ALL if weights == "softmax" else NO_SINK, torch.float32)
    key_mask = torch.rand(2, 150, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.4
    key_mask[1, :] = False
    visibility = Visibility(2, 2, 150, qkv[0].device, is_causal=True, window=window, key_mask=key_mask)
    expected = oracle(qkv, extras, visibility, weights)
    for x in qkv[1:]:
        x.masked_fill_(~key_mask[:, None, :, None], torch.nan)
    out = run(qkv, extras, visibility, weights)
    assert_close(out, expected, torch.float32)
    assert (out[1] == 0).all()


@needs_triton
@pytest.mark.parametrize("keys", [3, 900])
@pytest.mark.parametrize("weights", ["softmax", "signed", "sigmoid"])
def test_a_nan_query_is_nan_in_exactly_its_row(weights, keys):
    qkv, extras = make(2, 4, 2, 1, keys, 16, ALL if weights == "softmax" else NO_SINK, torch.float32)
    qkv[0][1, 2] = torch.nan
    out = run(qkv, extras, Visibility(2, 1, keys, qkv[0].device, is_causal=True), weights)
    expected = torch.zeros(2, 4, dtype=torch.bool, device=DEVICE)
    expected[1, 2] = True
    assert torch.equal(out.isnan().all(-1)[..., 0], expected)
    assert torch.equal(out.isnan().any(-1)[..., 0], expected)


@needs_triton
@pytest.mark.parametrize("keys", [60, 900])
@pytest.mark.parametrize(
    ("name", "weights"),
    [*((name, "softmax") for name in ALL), *((name, other) for name in NO_SINK for other in ("signed", "sigmoid"))],
)
def test_rows_that_see_no_key_are_zero_whatever_their_coefficients(name, weights, keys):
    names = NO_SINK if weights != "softmax" else (*ALL, "row sink") if name == "sink" else ALL
    qkv, extras = make(2, 4, 2, 1, keys, 16, names, torch.float32)
    key_mask = torch.ones(2, keys, dtype=torch.bool, device=DEVICE)
    key_mask[1] = False
    extras[name][1] = torch.nan
    qkv[0][1] = torch.nan
    out = run(qkv, extras, Visibility(2, 1, keys, qkv[0].device, is_causal=True, key_mask=key_mask), weights)
    assert out[0].isfinite().all()
    assert not out[1].any()


@needs_triton
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("length_dtype", "weights"),
    [(torch.int32, "softmax"), (torch.int64, "softmax"), (torch.int32, "signed"), (torch.int64, "sigmoid")],
)
def test_lengths_align_the_queries_and_hide_the_rest(window, length_dtype, weights):
    room, lengths = 200, [137, 3, 0, 200]
    qkv, extras = make(4, 4, 2, 3, room, 16, ALL if weights == "softmax" else NO_SINK, torch.float32)
    visibility = Visibility(4, 3, room, qkv[0].device, is_causal=True, window=window)
    expected = []
    for b, length in enumerate(lengths):
        one = [qkv[0][b : b + 1], *(x[b : b + 1, :, :length] for x in qkv[1:])]
        its = {n: x if x is None or x.dim() == 1 else x[b : b + 1] for n, x in extras.items()}
        seen = Visibility(1, 3, length, qkv[0].device, is_causal=True, window=window)
        expected.append(oracle(one, its, seen, weights))
        for x in qkv[1:]:
            x[b, :, length:] = torch.nan
    lengths = torch.tensor(lengths, dtype=length_dtype, device=DEVICE)
    assert_close(run(qkv, extras, visibility, weights, lengths=lengths), torch.cat(expected), torch.float32)


@needs_triton
@pytest.mark.parametrize(
    ("page_size", "weights"),
    [(16, "softmax"), (24, "softmax"), (64, "softmax"), (128, "softmax"), (64, "signed"), (24, "sigmoid"),
     (128, "sigmoid")],
)  # fmt: skip
def test_paged_equals_dense(page_size, weights):
    batch, groups, pages_each, dim = 2, 2, 7, 16
    room = pages_each * page_size
    qkv, extras = make(batch, 4, groups, 2, room, dim, ALL if weights == "softmax" else NO_SINK, torch.float32)
    visibility = Visibility(batch, 2, room, qkv[0].device, is_causal=True)
    lengths = torch.tensor([room - 5, 40], dtype=torch.int32, device=DEVICE)
    dense = run(qkv, extras, visibility, weights, lengths=lengths)
    order = torch.randperm(batch * pages_each, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    table = order.view(batch, pages_each).to(torch.int32)

    def paged(x):
        pages = torch.full((batch * pages_each + 1, page_size, groups, dim), torch.nan, device=DEVICE)
        pages[table.long()] = x.transpose(1, 2).unflatten(1, (pages_each, page_size))
        return pages

    out = run([qkv[0], *map(paged, qkv[1:])], extras, visibility, weights, lengths=lengths, block_table=table)
    assert torch.equal(out, dense)


@needs_triton
def test_supports_any_strides():
    qkv, extras = make(2, 4, 2, 3, 90, 16, ALL, torch.float32)
    visibility = Visibility(2, 3, 90, qkv[0].device, is_causal=True)
    expected = run(qkv, extras, visibility)
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    moved[2] = qkv[2].mT.contiguous().mT
    extras["alpha"] = extras["alpha"].mT.contiguous().mT
    extras["gate"] = extras["gate"].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(run(moved, extras, visibility), expected)


@needs_triton
def test_is_registered():
    qkv, extras = make(1, 2, 1, 2, 40, 16, ALL, torch.float32)
    lengths = torch.tensor([30], device=DEVICE)
    args = (*qkv, *extras.values(), None, lengths, None, True, 12, 40, 0.25)
    torch.library.opcheck(torch.ops.affine_attention.decode.default, (*args, "softmax"))
    no_sink = [x for name, x in extras.items() if name != "sink"]
    args = (*qkv, *no_sink[:2], None, no_sink[2], *args[7:])
    torch.library.opcheck(torch.ops.affine_attention.decode.default, (*args, "sigmoid"))


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_runs_in_a_cuda_graph_with_lengths_that_grow():
    qkv, extras = make(2, 8, 2, 1, 4096, 64, ALL, torch.bfloat16)
    visibility = Visibility(2, 1, 4096, qkv[0].device, is_causal=True)
    lengths = torch.tensor([100, 4000], device=DEVICE)
    run(qkv, extras, visibility, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(qkv, extras, visibility, lengths=lengths)
    lengths.copy_(torch.tensor([3001, 7]))
    graph.replay()
    assert torch.equal(out, run(qkv, extras, visibility, lengths=lengths))


def test_unsupported_calls_get_a_reason():
    x = torch.zeros(1, 2, 4, 16)
    call = AttentionCall.of(x, x, x, visibility=Visibility(1, 4, 4, x.device), softmax_scale=0.25)
    assert "CUDA" in why_not_decode(call, needs_gradient=False)
    with pytest.raises(ValueError, match="has no gradient"):
        run_decode(call._replace(query=x.requires_grad_()))


@needs_triton
@pytest.mark.parametrize("names", [(), ("beta",), ("sink",), ("row sink",), ALL])
@pytest.mark.parametrize("keys", [1, 40, 511, 513])
def test_short_caches_need_one_launch(names, keys):
    """With one query and a short cache the first kernel writes the output, which equals that of two kernels."""
    qkv, extras = make(2, 6, 2, 1, keys, 16, names, torch.float32)
    visibility = Visibility(2, 1, keys, qkv[0].device, is_causal=True)
    out = run(qkv, extras, visibility)
    assert_close(out, oracle(qkv, extras, visibility), torch.float32)
    from affine_attention.ops.fused.decode import op

    plan = list(op._plans.values())[-1]
    assert len(plan.launches.groups["decode"]) == (1 if keys <= 8 * 64 else 2)


@needs_triton
@pytest.mark.parametrize("weights", ["softmax", "signed", "sigmoid"])
def test_public_functions_take_the_decode_kernels(weights, monkeypatch):
    """`attention`, `decode_attention` and a compiled graph run the decode kernels; the interpreter has CPU tensors."""
    from affine_attention.ops import api, decoding
    from affine_attention.ops.fused import plan as planning

    def without_device(call, needs_gradient):
        reason = why_not_decode(call, needs_gradient)
        return None if INTERPRETED and reason is not None and "CUDA" in reason else reason

    for module in (api, decoding, planning):
        monkeypatch.setattr(module, "why_not_decode", without_device)
    api.forget_plans()
    (query, key, value), extras = make(2, 4, 2, 3, 90, 16, NO_SINK, torch.float32)
    given = {"query": query, "key": key, "value": value, **extras, "weights": weights, "is_causal": True}
    assert explain(**given).kernels == ("decode",)
    expected = attention(**given, impl="reference")
    torch.testing.assert_close(attention(**given), expected, rtol=1e-4, atol=1e-5)
    del given["is_causal"]
    torch.testing.assert_close(decode_attention(**given), expected, rtol=1e-4, atol=1e-5)

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda **x: attention(**x, window=80, is_causal=True), fullgraph=True, backend=keep)
    found = compiled(**given)
    assert [str(node.target) for node in graphs[0].graph.nodes if "affine_attention" in str(node.target)] == [
        "affine_attention.decode"
    ]
    expected = attention(**given, is_causal=True, window=80, impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    api.forget_plans()


def test_splits_fill_the_sms_and_are_never_empty():
    for programs in (1, 7, 64, 5000):
        for steps in (1, 2, 3, 33, 512, 100_000):
            splits = decode.choose_splits(programs, steps, 528)
            each = -(-steps // splits)
            assert (splits - 1) * each < steps <= splits * each


@outside
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("page_size", "weights"), [(1, 0), (16, 0), (128, 0), (1, 1), (128, 1), (1, 2), (128, 2)])
def test_kernels_compile(capability, page_size, weights):
    """Compiles with ptxas, without a GPU: all inputs, head dim 128, with and without pages, every weight function."""
    pointers = {
        **dict.fromkeys(("query", "key", "value", "gate", "out"), "*bf16"),
        **dict.fromkeys(("part_max", "part_sum", "part_acc", "alpha", "beta", "sink"), "*fp32"),
        **{"key_mask": "*i8", "lengths": "*i32", "block_table": "*i32", "scale_log2": "fp32"},
    }
    one_page = page_size == 128
    constants = {"CAUSAL": True, "WINDOW": not one_page, "PAGE_SIZE": page_size, "ONE_PAGE": one_page}
    constants |= {"HEAD_DIM": 128, "BLOCK_M": 16, "FINISH": one_page, "sink_strides": None, "WEIGHTS": weights}
    constants |= {"sink": None} if weights else {}
    constants |= {"BLOCK_N": 64, "BLOCK_D": 128, "BLOCK_C": 16} | ({"block_table": None} if page_size == 1 else {})
    for kernel in (split_kernel, merge_kernel):
        signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names}
        values = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
        source = ASTSource(kernel, signature, constexprs=values)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert "cubin" in compiled.asm


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
