"""Packed documents equal one call per document: the output and every gradient."""

from __future__ import annotations

import os

import pytest
import torch

from affine_attention import attention, attention_varlen
from tests.interpreter import run_in_the_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SAME = [5, 0, 1, 23, 8]
# Fewer queries than keys (chunked prefill), as many, none, no keys, and more queries than keys.
QUERIES, KEYS = [3, 4, 0, 5, 2, 7], [9, 4, 6, 31, 0, 3]
VISIBILITIES = [{}, {"is_causal": True}, {"window": 4}, {"is_causal": True, "window": 4}]
ROWS = {
    "softmax": (),
    "sink": ("sink",),
    "affine": ("alpha", "beta"),
    "all": ("alpha", "beta", "sink", "gate"),
    "finish": ("alpha", "row_sink", "gate", "exclusion", "norm_weight"),
}


def cumulative(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def make(queries, keys, names, dtype=torch.float64, device="cpu", tail=0, dim=16):
    """Leaves of a call, in the packed layout, with `tail` tokens of padding, and a gradient of its output."""
    generator = torch.Generator().manual_seed(0)
    total, total_keys = sum(queries) + tail, sum(keys) + tail

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {
        "query": normal(total, 4, dim),
        "key": normal(total_keys, 2, dim),
        "value": normal(total_keys, 2, dim) + 0.2,
        "alpha": normal(total, 4).sigmoid(),
        "beta": 0.1 * normal(total, 4),
        "sink": torch.linspace(-1, 3, 4, dtype=torch.float64),
        "gate": normal(total, 4, dim).sigmoid(),
        "row_sink": normal(total, 4),
        "exclusion": normal(total, 4),
        "norm_weight": normal(4, dim),
    }
    kept = {"query", "key", "value", *names}
    leaves = {
        name.removeprefix("row_"): x.to(device, dtype).requires_grad_() for name, x in tensors.items() if name in kept
    }
    return leaves, normal(total, 4, dim).to(device, dtype)


def per_document(leaves, queries, keys, **options):
    """One call of the reference per document, put together; zeros for padding."""
    outs, at, at_key = [], 0, 0
    for num, num_keys in zip(queries, keys, strict=True):
        parts = {}
        for name, x in leaves.items():
            if name == "norm_weight" or x.dim() == 1:
                parts[name] = x
            else:
                own = slice(at_key, at_key + num_keys) if name in ("key", "value") else slice(at, at + num)
                parts[name] = x[own].transpose(0, 1)[None]
        outs.append(attention(**parts, **options, impl="reference")[0].transpose(0, 1))
        at, at_key = at + num, at_key + num_keys
    outs.append(torch.zeros_like(leaves["query"][at:]))
    return torch.cat(outs)


def with_gradients(out, leaves, grad_out):
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def check(leaves, grad_out, queries, keys, cu_seqlens, options, tolerance=1e-12, impl="auto"):
    own = with_gradients(attention_varlen(**leaves, **cu_seqlens, **options, impl=impl), leaves, grad_out)
    expected = with_gradients(per_document(leaves, queries, keys, **options), leaves, grad_out)
    for name, x in expected.items():
        torch.testing.assert_close(
            own[name], x, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("options", VISIBILITIES, ids=lambda x: "+".join(x) or "full")
def test_packed_documents_equal_one_call_per_document(device, names, options):
    leaves, grad_out = make(SAME, SAME, names, device=device)
    check(leaves, grad_out, SAME, SAME, {"cu_seqlens": cumulative(SAME, device)}, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("options", VISIBILITIES, ids=lambda x: "+".join(x) or "full")
def test_other_numbers_of_keys_are_aligned_to_the_end_of_each_document(device, names, options):
    leaves, grad_out = make(QUERIES, KEYS, names, device=device)
    ends = {"cu_seqlens": cumulative(QUERIES, device), "cu_seqlens_key": cumulative(KEYS, device, torch.int64)}
    check(leaves, grad_out, QUERIES, KEYS, ends, options)


@pytest.mark.parametrize("keys", [None, KEYS])
def test_other_functions_of_the_scores_are_served(keys):
    queries = SAME if keys is None else QUERIES
    leaves, grad_out = make(queries, keys or queries, ROWS["affine"])
    ends = {"cu_seqlens": cumulative(queries)} | ({} if keys is None else {"cu_seqlens_key": cumulative(keys)})
    check(leaves, grad_out, queries, keys or queries, ends, {"is_causal": True, "weights": "sigmoid"})


@pytest.mark.parametrize("options", VISIBILITIES, ids=lambda x: "+".join(x) or "full")
@pytest.mark.parametrize("keys", [None, KEYS])
def test_padding_after_the_last_document_sees_nothing_and_is_not_seen(options, keys):
    queries = SAME if keys is None else QUERIES
    leaves, grad_out = make(queries, keys or queries, ROWS["all"], tail=4)
    for name in ("query", "key", "value", "alpha"):
        leaves[name].data[-4:] = torch.nan
    ends = {"cu_seqlens": cumulative(queries)} | ({} if keys is None else {"cu_seqlens_key": cumulative(keys)})
    out = attention_varlen(**leaves, **ends, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    assert out[-4:].eq(0).all()
    cut = {name: x if name == "sink" else x[:-4] for name, x in leaves.items()}
    torch.testing.assert_close(out[:-4], per_document(cut, queries, keys or queries, **options), rtol=1e-12, atol=1e-12)
    for name, grad in zip(leaves, grads, strict=True):
        assert name == "sink" or grad[-4:].eq(0).all(), name


@pytest.mark.parametrize("queries", [[], [0, 0]])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packs_without_documents_or_tokens_are_zeros(queries, is_causal):
    leaves, _ = make(queries, [*queries, 3][: len(queries)], ROWS["all"], tail=2)
    empty = cumulative(queries)
    assert attention_varlen(**leaves, cu_seqlens=empty, is_causal=is_causal).eq(0).all()
    assert attention_varlen(**leaves, cu_seqlens=empty, cu_seqlens_key=empty.clone(), is_causal=is_causal).eq(0).all()


@pytest.mark.parametrize("keys", [None, KEYS])
def test_the_compiler_captures_one_graph(keys):
    queries = SAME if keys is None else QUERIES
    leaves, grad_out = make(queries, keys or queries, ROWS["all"], torch.float32)
    ends = {"cu_seqlens": cumulative(queries)} | ({} if keys is None else {"cu_seqlens_key": cumulative(keys)})

    def run():
        return attention_varlen(**leaves, **ends, is_causal=True)

    eager = with_gradients(run(), leaves, grad_out)
    graph = with_gradients(torch.compile(run, backend="aot_eager", fullgraph=True)(), leaves, grad_out)
    for name, x in eager.items():
        torch.testing.assert_close(graph[name], x, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_gpu_is_not_synchronised(keys):
    queries = SAME if keys is None else QUERIES
    leaves, grad_out = make(queries, keys or queries, ROWS["affine"], torch.bfloat16, "cuda", dim=64)
    ends = {"cu_seqlens": cumulative(queries, "cuda")}
    ends |= {} if keys is None else {"cu_seqlens_key": cumulative(keys, "cuda")}
    with_gradients(attention_varlen(**leaves, **ends, is_causal=True), leaves, grad_out)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with_gradients(attention_varlen(**leaves, **ends, is_causal=True), leaves, grad_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: see the next test")
@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize("options", VISIBILITIES[1:], ids=lambda x: "+".join(x))
def test_fused_kernels(keys, options):
    queries = SAME if keys is None else QUERIES
    leaves, grad_out = make(queries, keys or queries, ROWS["all"], torch.float32)
    ends = {"cu_seqlens": cumulative(queries)} | ({} if keys is None else {"cu_seqlens_key": cumulative(keys)})
    check(leaves, grad_out, queries, keys or queries, ends, options, tolerance=1e-4, impl="fused")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter")
def test_fused_kernels_in_the_interpreter():
    run_in_the_interpreter(__file__, "-k", "test_fused_kernels")


def message_of(**changed):
    leaves, _ = make(SAME, SAME, ROWS["all"])
    arguments = leaves | {"cu_seqlens": cumulative(SAME)} | changed
    with pytest.raises((TypeError, ValueError)) as error:
        attention_varlen(**arguments)
    return str(error.value)


def test_wrong_arguments_are_named():
    total = sum(SAME)
    assert "cu_seqlens must start with 0" in message_of(cu_seqlens=torch.tensor([1, total]))
    assert f"number of tokens, {total}, got [0, 38]" in message_of(cu_seqlens=torch.tensor([0, total + 1]))
    assert "not decrease" in message_of(cu_seqlens=torch.tensor([0, 9, 5, total]))
    assert "got list" in message_of(cu_seqlens=[0, total])
    assert "int32 or int64, got float32" in message_of(cu_seqlens=torch.tensor([0.0, total]))
    assert "[documents + 1], got [1, 2]" in message_of(cu_seqlens=torch.tensor([[0, total]]))
    assert "as many entries as cu_seqlens [6]" in message_of(cu_seqlens_key=torch.tensor([0, total]))
    assert "alpha must have shape [total, H] = [37, 4], got [4, 37]" in message_of(alpha=torch.rand(4, total).double())
    assert "query must have 3 dimensions [total, H, D], got 4" in message_of(query=torch.rand(1, 4, total, 16).double())
    assert "G a divisor of the 4 heads" in message_of(key=torch.rand(total, 3, 16), value=torch.rand(total, 3, 16))
    assert "cu_seqlens_key must be given" in message_of(key=torch.rand(9, 2, 16), value=torch.rand(9, 2, 16))
    assert "window must be at least 1" in message_of(window=0)
    assert "sink must have shape [H] = [4]" in message_of(sink=torch.zeros(5).double())
    assert "is_causal must be True or False" in message_of(is_causal=1)
