"""flash-attention's functions equal the reference, forward and backward, and refuse what they do not compute."""

from __future__ import annotations

import pytest
import torch

from affine_attention import attention
from affine_attention.ops.flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

WINDOWS = [
    ({"causal": True}, {"is_causal": True}),
    ({"causal": True, "window_size": (3, 3)}, {"is_causal": True, "window": 4}),
    ({"window_size": (3, 0)}, {"is_causal": True, "window": 4}),
    ({"window_size": (-1, 0)}, {"is_causal": True}),
    ({"window_size": (2, 2)}, {"window": 3}),
    ({}, {}),
]


def make(batch=2, queries=9, keys=13, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = {"q": normal(batch, queries, 4, 16), "k": normal(batch, keys, 2, 16), "v": normal(batch, keys, 2, 16)}
    rows = {
        "s_aux": normal(4),
        "alpha": normal(batch, queries, 4),
        "beta": normal(batch, queries, 4),
        "gate": normal(batch, queries, 4, 16),
    }
    return tensors, rows


def reference(tensors, rows, **options):
    """The reference for tensors in flash-attention's layout, [B, T, H, D]."""
    names = {"q": "query", "k": "key", "v": "value", "s_aux": "sink"}
    moved = {names.get(name, name): x if x.dim() == 1 else x.transpose(1, 2) for name, x in (tensors | rows).items()}
    return attention(**moved, **options, impl="reference").transpose(1, 2)


def check(own, expected, leaves):
    grad = torch.randn(own.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    for name, a, b in zip(
        leaves, torch.autograd.grad(own, leaves.values(), grad), torch.autograd.grad(expected, leaves.values(), grad),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("flash", "own"), WINDOWS, ids=lambda x: str(x))
def test_flash_attn_func_equals_the_reference_with_every_gradient(flash, own):
    tensors, rows = make()
    out = flash_attn_func(*tensors.values(), softmax_scale=0.3, **flash, **rows)
    assert out.is_contiguous()
    check(out, reference(tensors, rows, softmax_scale=0.3, **own), tensors | rows)


@pytest.mark.parametrize(("flash", "own"), WINDOWS, ids=lambda x: str(x))
@pytest.mark.parametrize("key_lengths", [[5, 1, 7], [4, 9, 20]], ids=["as many keys", "more keys"])
def test_flash_attn_varlen_func_equals_the_reference_per_document(flash, own, key_lengths):
    lengths = [5, 1, 7] if key_lengths[0] == 5 else [4, 2, 3]
    tensors, rows = make(1, sum(lengths), sum(key_lengths))
    packed = {name: x[0] if x.dim() > 1 else x for name, x in (tensors | rows).items()}
    q, k, v = (packed.pop(name) for name in "qkv")
    cu_q, cu_k = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, key_lengths))
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(lengths), max(key_lengths), **flash, **packed)
    parts = []
    for d in range(3):
        queries, keys = slice(cu_q[d], cu_q[d + 1]), slice(cu_k[d], cu_k[d + 1])
        of_document = {name: x[:, keys if name in "kv" else queries] for name, x in tensors.items()}
        own_rows = {name: x if name == "s_aux" else x[:, queries] for name, x in rows.items()}
        parts.append(reference(of_document, own_rows, **own)[0])
    check(out, torch.cat(parts), tensors | rows)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window_size", [(-1, -1), (4, 0)])
@pytest.mark.parametrize("queries", [1, 3])
def test_flash_attn_with_kvcache_appends_and_attends(paged, window_size, queries):
    tensors, rows = make(2, queries, 16)
    tensors, rows = ({name: x.detach() for name, x in group.items()} for group in (tensors, rows))
    whole_k, whole_v = tensors["k"], tensors["v"]
    lengths = torch.tensor([11, 5], dtype=torch.int32)
    new = {name: torch.stack([x[b, n : n + queries] for b, n in enumerate(lengths)]) for name, x in
           (("k", whole_k), ("v", whole_v))}  # fmt: skip
    k_cache, v_cache = torch.full_like(whole_k, torch.nan), torch.full_like(whole_v, torch.nan)
    for b, n in enumerate(lengths.tolist()):
        k_cache[b, :n], v_cache[b, :n] = whole_k[b, :n], whole_v[b, :n]
    table = None
    if paged:  # pages of 4 slots in another order, shared by both sequences
        table = torch.tensor([[3, 0, 6, 1], [7, 2, 5, 4]])
        caches = []
        for cache in (k_cache, v_cache):
            pages = torch.empty(8, 4, 2, 16, dtype=cache.dtype)
            pages[table.flatten()] = cache.view(8, 4, 2, 16)
            caches.append(pages)
        k_cache, v_cache = caches
    out = flash_attn_with_kvcache(
        tensors["q"], k_cache, v_cache, **new, cache_seqlens=lengths, block_table=table, causal=True,
        window_size=window_size, **rows,
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        part = {
            "q": tensors["q"][b : b + 1],
            "k": whole_k[b : b + 1, : n + queries],
            "v": whole_v[b : b + 1, : n + queries],
        }
        own_rows = {name: x if name == "s_aux" else x[b : b + 1] for name, x in rows.items()}
        window = None if window_size[0] < 0 else window_size[0] + 1
        expected = reference(part, own_rows, is_causal=True, window=window)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=1e-12, atol=1e-12)
    # The cache now holds the new keys: the same call without them gives the same result.
    again = flash_attn_with_kvcache(
        tensors["q"], k_cache, v_cache, cache_seqlens=lengths + queries, block_table=table, causal=True,
        window_size=window_size, **rows,
    )  # fmt: skip
    assert torch.equal(out, again)


def test_a_length_may_be_an_integer_or_missing():
    tensors, _ = make(2, 1, 8)
    q, k, v = (x.detach() for x in tensors.values())
    whole = flash_attn_with_kvcache(q, k, v)
    assert torch.equal(whole, flash_attn_with_kvcache(q, k, v, cache_seqlens=8))
    expected = reference({"q": q, "k": k[:, :5], "v": v[:, :5]}, {})
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, cache_seqlens=5), expected, rtol=1e-12, atol=1e-12)


def refusal(function, *arguments, **keywords):
    with pytest.raises((TypeError, ValueError)) as error:
        function(*arguments, **keywords)
    return str(error.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("dropout_p", 0.1), ("softcap", 30.0), ("alibi_slopes", torch.zeros(4)), ("return_attn_probs", True)],
)
def test_what_is_not_computed_is_refused_by_name(argument, value):
    (q, k, v), _ = make(1, 5, 5)[0].values(), None
    ends = torch.tensor([0, 5], dtype=torch.int32)
    assert refusal(flash_attn_func, q, k, v, **{argument: value}).startswith(f"{argument} is not served")
    message = refusal(flash_attn_varlen_func, q[0], k[0], v[0], ends, ends, 5, 5, **{argument: value})
    assert message.startswith(f"{argument} is not served")
    if argument in ("softcap", "alibi_slopes"):
        assert refusal(flash_attn_with_kvcache, q, k, v, **{argument: value}).startswith(f"{argument} is not served")


def test_other_wrong_arguments_are_named():
    q, k, v = (x.detach() for x in make(2, 5, 5)[0].values())
    assert "window_size must be symmetric" in refusal(flash_attn_func, q, k, v, window_size=(3, 1))
    assert "window_size must be a pair" in refusal(flash_attn_func, q, k, v, window_size=3)
    assert "deterministic=True needs" in refusal(flash_attn_func, q, k, v, deterministic=True)
    assert "q must have 4 dimensions [B, T, H, D], got 3" in refusal(flash_attn_func, q[0], k, v)
    ends = torch.tensor([0, 5])
    assert "cu_seqlens_k must" in refusal(flash_attn_varlen_func, q[0], k[0], v[0], ends, torch.tensor([0, 6]), 5, 6)
    assert "block_table is not served" in refusal(
        flash_attn_varlen_func, q[0], k[0], v[0], ends, ends, 5, 5, block_table=torch.zeros(1, 1)
    )
    assert "causal must be True" in refusal(flash_attn_with_kvcache, q, k, v)
    assert "cache_seqlens must be given" in refusal(flash_attn_with_kvcache, q, k, v, k, v, causal=True)
    assert "leave room for 5 new keys in a cache of 5, got [1, 1]" in refusal(
        flash_attn_with_kvcache, q, k, v, k, v, cache_seqlens=1, causal=True
    )
    assert "together" in refusal(flash_attn_with_kvcache, q, k, v, k, cache_seqlens=0, causal=True)
    for name in ("rotary_cos", "cache_batch_idx", "cache_leftpad"):
        assert name in refusal(flash_attn_with_kvcache, q, k, v, causal=True, **{name: torch.zeros(2)})
