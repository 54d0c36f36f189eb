"""Padding, packing, windows and caches reach the operator without an unnecessary T x S mask."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from affine_attention import Mechanism
from affine_attention.hf import interface, masks
from affine_attention.hf.masks import compact_mask, read_mask

from .models import SLIDING, WINDOW, make_model, make_tokens, oracle
from .test_attach import EXACT, assert_equals_oracle

LENGTHS = (12, 5, 1)


def padded_rows(side: str):
    tokens = make_tokens(3)
    column = torch.arange(12)[None]
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = column >= 12 - lengths if side == "left" else column < lengths
    return tokens, mask.long()


def packed_positions():
    return torch.cat([torch.arange(n) for n in (3, 7, 1, 1)])[None].expand(2, -1)


def run_real(model, tokens, mask, **more):
    """Logits and gradients at real tokens; the outputs of padding are undefined."""
    model.zero_grad()
    logits = model(tokens, attention_mask=mask, use_cache=False, **more).logits[mask.bool()]
    (logits * torch.sin(torch.arange(logits.numel()).view_as(logits))).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bias_length", [4, "visible"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine_gated"])
def test_padding_equals_the_oracle(mechanism, side, bias_length):
    model = make_model(mechanism=Mechanism.named(mechanism, bias_length=bias_length), dtype=torch.float64)
    tokens, mask = padded_rows(side)
    logits, gradients = run_real(model, tokens, mask)
    with oracle():
        expected, truth = run_real(model, tokens, mask)
    torch.testing.assert_close(logits, expected, **EXACT)
    for mine, theirs in zip(gradients, truth, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_each_padded_row_equals_the_unpadded_row():
    model = make_model(dtype=torch.float64)
    for side in ("left", "right"):
        tokens, mask = padded_rows(side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        for row, length in enumerate(LENGTHS):
            unpadded = model(tokens[row, mask[row].bool()][None]).logits[0]
            torch.testing.assert_close(logits[row, mask[row].bool()], unpadded, **EXACT)
            assert length == len(unpadded)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt_neox", "phi3", "gemma"])
@pytest.mark.parametrize("bias_length", [4, "visible"])
def test_packed_documents_equal_the_oracle(family, bias_length):
    model = make_model(family, Mechanism.named("affine_gated", bias_length=bias_length), torch.float64)
    assert_equals_oracle(model, input_ids=make_tokens(), position_ids=packed_positions())


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_equal_separate_documents(use_cache, batch):
    """Transformers itself ignores the packing if use_cache is on, which is its default."""
    model = make_model(mechanism=Mechanism.named("affine_gated", bias_length=4), dtype=torch.float64)
    tokens = make_tokens(batch)
    packed = model(tokens, position_ids=packed_positions()[:1], use_cache=use_cache).logits
    for part, document in zip(packed.split([3, 7, 1, 1], 1), tokens.split([3, 7, 1, 1], 1), strict=True):
        torch.testing.assert_close(part, model(document).logits, **EXACT)
    by_position = model.model(tokens, None, packed_positions()[:1], use_cache=use_cache).last_hidden_state
    torch.testing.assert_close(model.lm_head(by_position), packed, **EXACT)


def test_a_flattening_collator_feeds_the_model():
    from transformers import DataCollatorWithFlattening

    model = make_model(dtype=torch.float64)
    documents = [make_tokens(1, n, seed=n)[0] for n in (4, 6, 1)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    logits = model(**batch).logits[0]
    for part, document in zip(logits.split([4, 6, 1]), documents, strict=True):
        torch.testing.assert_close(part, model(document[None]).logits[0], **EXACT)


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("bias_length", [3, "visible"])
def test_sliding_windows_equal_the_oracle(family, kind, bias_length):
    mechanism = Mechanism.named("affine_gated", bias_length=bias_length)
    model = make_model(family, mechanism, torch.float64, **SLIDING[family])
    tokens, mask = padded_rows("left")
    if kind == "plain":
        assert_equals_oracle(model, input_ids=tokens)
    elif kind == "packed":
        assert_equals_oracle(model, input_ids=make_tokens(), position_ids=packed_positions())
    else:
        logits, gradients = run_real(model, tokens, mask)
        with oracle():
            expected, truth = run_real(model, tokens, mask)
        torch.testing.assert_close(logits, expected, **EXACT)
        for mine, theirs in zip(gradients, truth, strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_dense_mask_of_the_user(dtype):
    model = make_model(dtype=torch.float64)
    allowed = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed = (allowed | torch.eye(12).bool()).tril()
    mask = allowed
    if dtype != torch.bool:
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    logits = model(make_tokens(), attention_mask=mask, use_cache=False).logits
    with oracle():
        expected = model(make_tokens(), attention_mask=allowed, use_cache=False).logits
    torch.testing.assert_close(logits, expected, **EXACT)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.full((2, 1, 12, 12), -0.5), "no mechanism supports a bias on the scores"),
        (torch.ones(2, 1, 12, 12, dtype=torch.int32), "must be boolean, got torch.int32"),
        (torch.ones(3, 1, 12, 12, dtype=torch.bool), "[2, 1 or H, 12, 12], got [3, 1, 12, 12]"),
    ],
)
def test_invalid_masks_raise_clear_errors(mask, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        make_model()(make_tokens(), attention_mask=mask)
    assert words in str(caught.value)


CACHES = {
    "dynamic": lambda model: DynamicCache(),
    "dynamic of the config": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=30),
    "static, exact": lambda model: StaticCache(config=model.config, max_cache_len=20),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("changes", [{}, SLIDING["mistral"]], ids=["full", "sliding"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("steps", [(20,), (1, 1, 8, 10), (7, 1, 1, 6, 5)], ids=str)
def test_cached_steps_equal_one_forward(cache, changes, padded, steps):
    """Prefill, chunked prefill, decoding and continued conversations, for growing and preallocated caches."""
    mechanism = Mechanism.named("affine_gated", bias_length=4)
    model = make_model("mistral", mechanism, torch.float64, **changes)
    tokens = make_tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    if padded:
        mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), oracle():
        whole = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    past, parts, seen = CACHES[cache](model), [], 0
    for step in steps:
        seen += step
        now = slice(seen - step, seen)
        with torch.no_grad():
            out = model(tokens[:, now], attention_mask=mask[:, :seen] if padded else None,
                        position_ids=positions[:, now], past_key_values=past)  # fmt: skip
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], **EXACT)


def spy_masks(monkeypatch):
    """Sizes of every mask that reaches a layer."""
    sizes = []

    def spy(mask, *rest):
        sizes.append(0 if mask is None else mask.untyped_storage().nbytes())
        return read_mask(mask, *rest)

    monkeypatch.setattr(interface, "read_mask", spy)
    return sizes


@pytest.mark.parametrize("kind", ["plain", "ones", "padded", "packed", "sliding", "cached"])
def test_no_t_by_s_mask_is_created(kind, monkeypatch):
    length = 64
    model = make_model("mistral", **(SLIDING["mistral"] if kind == "sliding" else {}))
    monkeypatch.setattr(masks, "sdpa_mask", lambda **_: pytest.fail("a dense mask was created"))
    sizes = spy_masks(monkeypatch)
    tokens = make_tokens(2, length)
    inputs = {}
    if kind in ("ones", "padded"):
        inputs["attention_mask"] = torch.ones(2, length)
        inputs["attention_mask"][1, : 10 if kind == "padded" else 0] = 0
    if kind == "packed":
        inputs["position_ids"] = torch.arange(length)[None] % 16
    if kind == "cached":
        inputs["past_key_values"] = model(tokens, use_cache=True).past_key_values
    model(tokens, **inputs)
    # A causal call without a mask has nothing to read.
    assert max(sizes, default=0) <= {"plain": 0, "ones": 0, "sliding": 0, "cached": 0}.get(kind, 2 * length * 8)


def test_a_decoding_step_keeps_its_shapes():
    codes = [
        compact_mask(2, 1, 10, torch.tensor(offset), 0, attention_mask=torch.ones(2, offset + 1, dtype=torch.bool))
        for offset in (3, 4, 5)
    ]
    assert len({code.shape for code in codes}) == 1
    assert [int(code[0].sum()) for code in codes] == [4, 5, 6]


def test_a_decoding_step_with_a_preallocated_cache_sees_its_window():
    class Config:
        sliding_window = WINDOW

    sliding = masks.sliding_mask_function(WINDOW)
    code = compact_mask(1, 1, 12, torch.tensor(8), 0, sliding, local_size=WINDOW, config=Config)
    assert code[0, 0, 0].nonzero().flatten().tolist() == [4, 5, 6, 7, 8]


def test_read_mask_decodes_compact_mask():
    query, key = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 9, 8)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, :4] = False

    class Config:
        sliding_window = WINDOW

    sliding = masks.sliding_mask_function(WINDOW)
    code = compact_mask(2, 6, 9, 3, 0, sliding, keep, local_size=WINDOW, config=Config)
    arguments, num_keys, token_mask = read_mask(code, query, key, True, None)
    assert arguments["window"] == WINDOW
    assert arguments["is_causal"]
    assert torch.equal(arguments["mask"], keep)
    assert num_keys == 9
    assert token_mask is None


def test_padding_is_detected_in_a_dense_mask():
    query, key = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool).tril(2)
    mask[1, :, :, 2] = False  # the first of the three queries is padding in row 1
    _, _, token_mask = read_mask(mask, query, key, True, None)
    assert token_mask.tolist() == [[True, True, True], [False, True, True]]


def test_an_unknown_pattern_gets_the_dense_mask():
    def every_second(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((q_idx - kv_idx) % 2 == 0)

    mask = compact_mask(1, 4, 4, mask_function=every_second)
    assert mask.dtype == torch.bool
    assert mask[0, 0, 3].tolist() == [False, True, False, True]


def test_one_exported_graph_serves_every_length():
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens, use_cache=False).logits

    model = make_model()
    length = torch.export.Dim("length", min=2, max=64)
    graph = torch.export.export(Logits(model), (make_tokens(2, 12),), dynamic_shapes={"tokens": {1: length}})
    with torch.no_grad():
        for tokens in (make_tokens(2, 31), make_tokens(2, 2)):
            torch.testing.assert_close(graph.module()(tokens), model(tokens).logits)
