"""One batch of continuous batching: where its keys are, what its requests see, and the output of every kind of call."""

from __future__ import annotations

import os

import pytest
import torch

from affine_attention import Mechanism, attention
from affine_attention.hf.paged import PagedBatch, store_of
from affine_attention.ops import decoding
from tests.interpreter import run_in_the_interpreter

from .models import SLIDING, make_model
from .test_continuous_batching import greedy, pages

PAGE_SIZE, WINDOW = 8, 5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """In Triton's interpreter decoding takes the GPU's kernel, which the dispatch keeps away from CPU tensors."""
    if INTERPRETED:
        for name in ("why_not_fused", "why_not_decode"):
            monkeypatch.setattr(decoding, name, lambda *_, **__: None)


@pytest.fixture(scope="module")
def caches():
    """Real caches of transformers: of full attention, and of a full and a sliding layer."""
    made = {}
    for name, family in (("full", "llama"), ("sliding", "qwen2")):
        model = make_model(family, "affine", **SLIDING.get(family, {}))
        manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages())
        made[name] = manager._create_batch_processor().cache
        model.set_attn_implementation("affine_attention")
    return made


def batch_of(cache, requests, kind="full_attention", **given) -> PagedBatch:
    """A batch of requests (tokens, keys)."""
    tokens, keys = (torch.tensor([0, *numbers]).cumsum(0).int() for numbers in zip(*requests, strict=True))
    positions = torch.cat([torch.arange(k - t, k) for t, k in requests])[None]
    given = {"cache": cache, "position_ids": positions, "cu_seq_lens_q": tokens, "cu_seq_lens_k": {kind: keys}} | given
    return PagedBatch(None, given)


def test_the_pages_of_a_layer(caches):
    store = store_of(caches["full"], 1)
    assert (store.kind, store.window, store.page_size) == ("full_attention", None, PAGE_SIZE)
    assert (store.heads, store.head_dim) == (2, 8)
    for pages_of_layer in store.pages:
        assert pages_of_layer.shape[1:] == (PAGE_SIZE, 2, 8)
        assert store.trash < pages_of_layer.shape[0] * PAGE_SIZE
    windows = {store_of(caches["sliding"], layer).window for layer in (0, 1)}
    assert windows == {None, WINDOW}


def test_layers_have_pages_of_their_own(caches):
    first, second = (store_of(caches["full"], layer).pages for layer in (0, 1))
    first[0][3].fill_(1.0)
    second[0][3].fill_(2.0)
    assert float(first[0][3].max()) == 1.0


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ("visible", [1, 2, 3, 10, 6, 7]),
        (4, [4, 4, 4, 10, 6, 7]),
        (10, 10),  # no request has more keys: one number
        (2048, 2048),
    ],
)
def test_the_divisor_follows_each_request(caches, length, expected):
    batch = batch_of(caches["full"], [(3, 3), (1, 10), (2, 7)])
    divisor = batch.divisor(Mechanism.named("affine", bias_length=length), 0)
    assert divisor == expected if isinstance(divisor, int) else divisor.tolist() == [[expected]]


def test_the_divisor_of_a_window(caches):
    layer = next(n for n in (0, 1) if store_of(caches["sliding"], n).window is not None)
    batch = batch_of(
        caches["sliding"], [(3, 3), (1, 5)], "sliding_attention", position_ids=torch.tensor([[0, 1, 2, 9]])
    )
    assert batch.divisor(Mechanism.named("affine", bias_length="visible"), layer).tolist() == [[[1, 2, 3, WINDOW]]]
    assert batch.divisor(Mechanism.named("affine", bias_length=5), layer) == 5
    assert batch.divisor(Mechanism.named("sink"), layer) is None


def test_a_batch_of_every_kind_equals_one_request_at_a_time(caches):
    """A prompt, a decoding request and a chunk after cached keys, in one row with padding at its end."""
    cache, generator = caches["full"], torch.Generator().manual_seed(0)
    store = store_of(cache, 0)
    requests = [(3, 3), (1, 10), (4, 13)]
    # Pages of each request, in any order. In newer caches the pages of 2 layers, of keys and of values alternate.
    tables = [[20], [36, 8], [16, 44]]

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    history = [(draw(1, 2, keys, 8), draw(1, 2, keys, 8)) for _, keys in requests]
    index = [[page * PAGE_SIZE + slot for page in table for slot in range(PAGE_SIZE)] for table in tables]
    for (keys, values), slots, (tokens, length) in zip(history, index, requests, strict=True):
        for pool, x in zip(store.pages, (keys, values), strict=True):
            for n in range(length - tokens):
                pool[slots[n] // PAGE_SIZE, slots[n] % PAGE_SIZE] = x[0, :, n]
    read = torch.tensor([slot for slots, (_, n) in zip(index, requests, strict=True) for slot in slots[:n]])
    write = torch.tensor([s for slots, (t, n) in zip(index, requests, strict=True) for s in slots[n - t : n]])
    padding = 2
    write = torch.cat([write, torch.full((padding,), store.trash)])
    query = draw(1, 4, 8 + padding, 8)
    unused = torch.full((1, 2, padding, 8), 7.0)
    key, value = (
        torch.cat([*(x[:, :, n - t :] for x, (t, n) in zip(side, requests, strict=True)), unused], 2)
        for side in zip(*history, strict=True)
    )
    rows = {"alpha": draw(1, 4, 10).sigmoid(), "beta": draw(1, 4, 10) / 10, "sink": draw(4), "gate": draw(1, 4, 10, 8)}
    batch = batch_of(cache, [*requests, (0, 0)], read_index=[read], write_index=[write])
    out = batch.attend(0, query, key, value, rows, 0.5).transpose(1, 2)
    first = 0
    for (keys, values), (tokens, _) in zip(history, requests, strict=True):
        own = slice(first, first + tokens)
        mine = {name: x if x.dim() == 1 else x[:, :, own] for name, x in rows.items()}
        told = attention(query[:, :, own], keys, values, **mine, is_causal=True, softmax_scale=0.5)
        torch.testing.assert_close(out[:, :, own], told, rtol=2e-5, atol=2e-5)
        first += tokens
    assert not out[:, :, first:].any()
    for slots, (keys, _), (_, length) in zip(index, history, requests, strict=True):
        last = slots[length - 1]
        assert torch.equal(store.pages[0][last // PAGE_SIZE, last % PAGE_SIZE], keys[0, :, length - 1])


def test_a_block_table_equals_one_request_at_a_time(caches):
    """Every request decodes; two rows are padding, as in a CUDA graph, and write where nothing is read."""
    cache, generator = caches["full"], torch.Generator().manual_seed(1)
    store = store_of(cache, 1)
    lengths, tables = [1, 8, 13], [[20, -1, -1], [36, -1, -1], [16, 44, -1]]

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    history = [(draw(1, 2, n, 8), draw(1, 2, n, 8)) for n in lengths]
    for (keys, values), table, length in zip(history, tables, lengths, strict=True):
        for pool, x in zip(store.pages, (keys, values), strict=True):
            for n in range(length - 1):
                pool[table[n // PAGE_SIZE], n % PAGE_SIZE] = x[0, :, n]
    kept = [pool[20].clone() for pool in store.pages]
    unused = torch.full((1, 2, 2, 8), 7.0)
    key, value = (torch.cat([*(x[:, :, -1:] for x in side), unused], 2) for side in zip(*history, strict=True))
    query = draw(1, 4, 5, 8)
    alpha = draw(1, 5, 4).sigmoid().mT  # strided, as a projection gives it
    rows = {"alpha": alpha, "beta": draw(1, 4, 5) / 10, "sink": draw(4), "gate": draw(1, 5, 4, 8).transpose(1, 2)}
    padded = torch.tensor([[*tables, [-1] * 3, [-1] * 3]], dtype=torch.int32)
    batch = batch_of(cache, [*((1, n) for n in lengths), (0, 0), (0, 0)], block_table=padded)
    out = batch.attend(1, query, key, value, rows, 0.5).transpose(1, 2)
    for n, (keys, values) in enumerate(history):
        mine = {name: x if x.dim() == 1 else x[:, :, n : n + 1] for name, x in rows.items()}
        told = attention(query[:, :, n : n + 1], keys, values, **mine, is_causal=True, softmax_scale=0.5)
        torch.testing.assert_close(out[:, :, n : n + 1], told, rtol=2e-5, atol=2e-5)
    for pool, before, (new, _) in zip(store.pages, kept, [history[0], history[0][::-1]], strict=True):
        assert torch.equal(pool[20, 1:], before[1:]), "padding was written into a page of a request"
        assert torch.equal(pool[20, 0], new[0, :, 0])


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts its own process")
def test_the_decode_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    run_in_the_interpreter(__file__, "-k", "one_request_at_a_time")


def test_a_forward_outside_of_continuous_batching_is_refused():
    class Config:
        _attn_implementation = "affine_attention_paged|flash"

    with pytest.raises(ValueError, match="no paged cache; stop the manager of continuous batching first"):
        PagedBatch(Config(), {})


def test_keys_that_do_not_fit_the_cache_are_refused(caches):
    batch = batch_of(caches["full"], [(3, 3)])
    key = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="must have the 2 heads of 8 channels"):
        batch.attend(0, key, key, key, {}, None)
