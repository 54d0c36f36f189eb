"""Generation: every cache, batch and search method gives the tokens and logits of one full forward."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from affine_attention import Mechanism, attention
from affine_attention.hf import interface
from affine_attention.nn import PRESETS

from .models import SLIDING, make_model, make_tokens, running_alphas

GREEDY = {"do_sample": False, "num_beams": 1, "pad_token_id": 0, "eos_token_id": None}
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch._dynamo.reset()


def prompts(count: int, seed: int = 0):
    """Prompts of `count` different lengths."""
    return [make_tokens(1, 3 + 2 * i, seed + i) for i in range(count)]


def left_padded(rows):
    longest = max(row.shape[1] for row in rows)
    tokens = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=0) for row in rows])
    mask = torch.arange(longest)[None] >= torch.tensor([longest - row.shape[1] for row in rows])[:, None]
    return tokens, mask.long()


def compile_config(backend="aot_eager"):
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True  # otherwise transformers compiles on accelerators only
    return config


def each(model, rows, new, **options):
    return [model.generate(r, max_new_tokens=new, **GREEDY, **options)[0, r.shape[1] :].tolist() for r in rows]


def batched(model, rows, new, **options):
    tokens, mask = left_padded(rows)
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=new, **GREEDY, **options)
    return out[:, tokens.shape[1] :].tolist()


def compiled_batch(model, rows, new, backend="aot_eager"):
    """A left-padded batch whose decoding steps all run in one compiled graph."""
    torch._dynamo.reset()
    counters.clear()
    out = batched(model, rows, new, cache_implementation="static", compile_config=compile_config(backend))
    assert 1 <= counters["stats"]["unique_graphs"] <= 4, "decoding was not compiled, or recompiled at every step"
    return out


def full_forward_tokens(model, rows, told):
    """The greedy tokens of one full forward over prompt and answer, without generate and without a cache."""
    result = []
    for row, answer in zip(rows, told, strict=True):
        whole = torch.cat([row, torch.tensor([answer])], 1)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits
        result.append(logits[0, row.shape[1] - 1 : -1].argmax(-1).tolist())
    return result


def assert_all_caches_agree(model, rows, new, backend="aot_eager"):
    told = each(model, rows, new)
    assert full_forward_tokens(model, rows, told) == told, "dynamic cache"
    assert len({tuple(answer) for answer in told}) > 1, "all continuations are equal: the test shows nothing"
    assert each(model, rows, new, cache_implementation="static", disable_compile=True) == told
    assert each(model, rows, new, use_cache=False) == told
    assert batched(model, rows, new) == told
    assert batched(model, rows, new, use_cache=False) == told
    assert batched(model, rows, new, cache_implementation="static", disable_compile=True) == told
    assert compiled_batch(model, rows, new, backend) == told


# Of the mechanisms after the paper's and its controls, one for each part that a cache may break.
LATER = ("affine_centred", "token_sink", "exclusive_gated", "differential", "softplus_weights")


@pytest.mark.parametrize(
    "mechanism",
    [name if i < 8 or name in LATER else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(PRESETS)],
)
def test_greedy_tokens_do_not_depend_on_cache_batch_or_compilation(mechanism):
    model = make_model("qwen3", Mechanism.named(mechanism, bias_length=16))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert_all_caches_agree(model, prompts(3), 12)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items()), "generation changed the model"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", PRESETS)
def test_greedy_128_tokens_for_16_prompts(mechanism):
    model = make_model("llama", Mechanism.named(mechanism, bias_length=64))
    assert_all_caches_agree(model, prompts(16), 128)


@pytest.mark.slow
def test_decoding_compiled_by_inductor():
    rows, model = prompts(3), make_model("llama", Mechanism.named("affine_gated", bias_length=16))
    assert compiled_batch(model, rows, 16, "inductor") == batched(model, rows, 16)


@pytest.mark.parametrize("family", SLIDING)
@pytest.mark.parametrize("bias_length", [3, "visible"])
def test_sliding_window_caches(family, bias_length):
    model = make_model(family, Mechanism.named("affine_gated", bias_length=bias_length), **SLIDING[family])
    rows = prompts(3)
    told = each(model, rows, 12)
    assert full_forward_tokens(model, rows, told) == told
    assert each(model, rows, 12, cache_implementation="static", disable_compile=True) == told
    assert batched(model, rows, 12) == told
    assert batched(model, rows, 12, cache_implementation="static", disable_compile=True) == told
    assert compiled_batch(model, rows, 12) == told


@pytest.mark.parametrize("mechanism", ["sink", "affine", "affine_gated"])
def test_beam_search_does_not_depend_on_the_cache(mechanism):
    """Beams reorder the cache; without one every step is a full forward."""
    model = make_model(mechanism=Mechanism.named(mechanism, bias_length=8))
    tokens, mask = left_padded(prompts(3))
    options = GREEDY | {"num_beams": 4, "max_new_tokens": 10}
    told = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(model.generate(tokens, attention_mask=mask, use_cache=False, **options), told)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(tokens, attention_mask=mask, **static, **options), told)
    assert not torch.equal(told, model.generate(tokens, attention_mask=mask, **(options | {"num_beams": 1})))


@pytest.mark.parametrize("changes", [{}, SLIDING["mistral"]], ids=["full", "sliding"])
def test_assisted_decoding_rolls_the_cache_back(changes):
    model = make_model("mistral", Mechanism.named("affine", bias_length=8), **changes)
    assistant = make_model("mistral", Mechanism.named("affine", bias_length=8), seed=9, **changes)
    row = make_tokens(1, 7)
    told = each(model, [row], 20)
    assert each(model, [row], 20, assistant_model=assistant) == told
    assert each(model, [row], 20, prompt_lookup_num_tokens=3) == told


def test_chunked_prefill():
    model = make_model(mechanism=Mechanism.named("affine_gated", bias_length=8))
    row = make_tokens(1, 23)
    told = each(model, [row], 8)
    assert each(model, [row], 8, prefill_chunk_size=5, disable_compile=True) == told
    assert each(model, [row], 8, prefill_chunk_size=5, cache_implementation="static", disable_compile=True) == told


def test_a_conversation_continues_from_its_cache():
    model = make_model(mechanism=Mechanism.named("affine_gated", bias_length=8))
    cache = DynamicCache()
    first = model.generate(make_tokens(1, 6), max_new_tokens=5, past_key_values=cache, **GREEDY)
    asked = torch.cat([first, make_tokens(1, 9, seed=3)], 1)
    second = model.generate(asked, max_new_tokens=5, past_key_values=cache, **GREEDY)
    assert torch.equal(second, model.generate(asked, max_new_tokens=5, **GREEDY))


def test_logits_of_every_step_equal_one_forward():
    model = make_model(mechanism=Mechanism.named("affine_gated", bias_length=8))
    tokens, mask = left_padded(prompts(3))
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=9, output_logits=True,
                         return_dict_in_generate=True, **GREEDY)  # fmt: skip
    for row, prompt in enumerate(prompts(3)):
        answer = out.sequences[row, tokens.shape[1] :]
        with torch.no_grad():
            whole = model(torch.cat([prompt[0], answer])[None], use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
        torch.testing.assert_close(torch.stack(out.logits, 1)[row], whole, **CLOSE)


def test_sampling_evaluation_and_generation_do_not_update_the_average():
    model = make_model().train()
    before = running_alphas(model)
    model.generate(make_tokens(), max_new_tokens=4, do_sample=True, pad_token_id=0)
    model.eval()
    model(make_tokens())
    assert torch.equal(running_alphas(model), before)
    assert all(layer.collected.grad is None for layer in model.modules() if hasattr(layer, "collected"))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("changes", [{}, SLIDING["mistral"]], ids=["full", "sliding"])
def test_every_step_is_a_call_that_the_decode_kernel_supports(cache, changes, monkeypatch):
    """With one query and only a key mask [B, S] and a window, the operator selects its decode kernel."""
    model = make_model("mistral", Mechanism.named("affine", bias_length=8), **changes)
    steps = []

    def spy(query, key, value, **arguments):
        steps.append((query.shape[2], arguments))
        return attention(query, key, value, **arguments)

    monkeypatch.setattr(interface, "attention", spy)
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    batched(model, prompts(3), 9, **options)
    decoding = [arguments for queries, arguments in steps if queries == 1]
    assert len(decoding) == 2 * 8
    for arguments in decoding:
        assert "segment_ids" not in arguments
        mask = arguments.get("mask")
        assert mask is None or mask.dim() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_offloaded_cache covers it on a GPU")
def test_offloaded_cache_without_a_gpu(monkeypatch):
    """Offloading and prefetching of transformers, with a stub in place of its streams, which wait for each other."""

    class NoStream(contextlib.nullcontext):
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: NoStream())
    monkeypatch.setattr(torch, "Stream", NoStream)
    for mechanism in ("affine_gated", "sink"):
        model, row = make_model(mechanism=mechanism), make_tokens(1, 7)
        told = each(model, [row], 12)
        assert each(model, [row], 12, cache_implementation="offloaded") == told
        assert each(model, [row], 12, cache_implementation="offloaded_static", disable_compile=True) == told


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers offloads caches of a CUDA device only")
def test_offloaded_cache():
    model, row = make_model().cuda(), make_tokens(1, 7).cuda()
    told = each(model, [row], 12)
    assert each(model, [row], 12, cache_implementation="offloaded") == told
    assert each(model, [row], 12, cache_implementation="offloaded_static", disable_compile=True) == told


def test_output_attentions_are_the_weights_that_were_used():
    from affine_attention.hf import WeightsNotice

    model = make_model(mechanism=Mechanism.named("affine", bias_length="visible"))
    tokens, mask = left_padded(prompts(3))
    with pytest.warns(WeightsNotice, match="holds"):
        out = model.generate(tokens, attention_mask=mask, max_new_tokens=3, output_attentions=True,
                             return_dict_in_generate=True, **GREEDY)  # fmt: skip
    first, last = out.attentions[0][1], out.attentions[-1][1]
    assert first.shape == (3, 4, 7, 7)
    assert last.shape == (3, 4, 1, 9)
    average = model.model.layers[1].self_attn.affine.scale.running_alpha
    torch.testing.assert_close(last.sum(-1), average[None, :, None].expand(3, -1, 1), **CLOSE)


@pytest.mark.parametrize("mechanism", ["affine", "differential"])
def test_output_attentions_have_the_length_of_a_preallocated_cache(mechanism):
    model = make_model(mechanism=Mechanism.named(mechanism))
    tokens = make_tokens(2, 5)
    cache = StaticCache(config=model.config, max_cache_len=9)
    with torch.no_grad():
        expected = model(tokens, output_attentions=True).attentions
        found = model(tokens, past_key_values=cache, output_attentions=True).attentions
    for mine, truth in zip(found, expected, strict=True):
        assert mine.shape == (*truth.shape[:-1], 9)
        torch.testing.assert_close(mine[..., :5], truth, **CLOSE)
        assert not mine[..., 5:].any()
