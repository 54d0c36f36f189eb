"""Continuous batching: requests that share batches and pages get the tokens that `generate` gives them one by one."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from affine_attention import Mechanism, hf
from affine_attention.hf.accelerate import OPERATOR, PAGED_OPERATOR
from affine_attention.hf.interface import IMPLEMENTATION, PAGED
from affine_attention.hf.paged import PagedBatch
from benchmarks import serving

from .models import FAMILIES, SLIDING, make_model, make_tokens, mechanisms, plain_model, running_alphas
from .test_accelerate import make as make_own

MECHANISMS = {
    "affine": Mechanism.named("affine", bias_length=6),
    "affine visible": Mechanism.named("affine", bias_length="visible"),
    "affine long": Mechanism.named("affine", bias_length=2048),
    "affine_gated": Mechanism.named("affine_gated", bias_length=9),
    "sink": Mechanism.named("sink"),
    "everything": Mechanism("everything", activation="per_head", bias="free", sink="token", exclusion="learned",
                            head_norm=True, gate=True, bias_length="visible"),
    "softplus difference": Mechanism("x", weights="softplus", differential=True),
}  # fmt: skip
NEW = 6


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Prompts of many different lengths, the first of one token."""
    return [make_tokens(1, 1 + i * (longest - 1) // max(count - 1, 1), seed + i)[0].tolist() for i in range(count)]


def pages(page: int = 8, blocks: int = 160, tokens: int = 48, **settings) -> ContinuousBatchingConfig:
    """A small cache: most prompts have several pages, and the longest are processed in chunks."""
    return ContinuousBatchingConfig(**{serving.PAGE: page}, num_blocks=blocks, max_batch_tokens=tokens, **settings)


def greedy(new: int = NEW, **settings) -> GenerationConfig:
    return GenerationConfig(
        **({"max_new_tokens": new, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | settings)
    )


def one_by_one(model, rows, new: int = NEW, **settings) -> list[list[int]]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | settings
    made = [model.generate(torch.tensor([row]), max_new_tokens=new, **settings)[0, len(row) :].tolist() for row in rows]
    assert len({tuple(answer) for answer in made}) > 1, "all continuations are equal: the test shows nothing"
    return made


def in_batches(model, rows, config=None, generation=None, **settings) -> list[list[int]]:
    results = model.generate_batch(
        rows, generation_config=generation or greedy(), continuous_batching_config=config or pages(), **settings
    )
    assert [result.error for result in results.values()] == [None] * len(rows)
    return [result.generated_tokens for result in results.values()]


@pytest.fixture
def routes(monkeypatch) -> dict[str, int]:
    """How many calls of layers took each route."""
    count = {"block table": 0, "fresh": 0, "decoding": 0, "continued": 0}
    decode_all, mixed = PagedBatch._decode_all, PagedBatch._mixed

    def counted_decode(self, *args):
        count["block table"] += 1
        return decode_all(self, *args)

    def counted_mixed(self, store, *args):
        kinds = self._kinds(store)
        count["fresh"] += kinds.fresh is not None
        count["decoding"] += kinds.decoding is not None
        count["continued"] += len(kinds.continued)
        return mixed(self, store, *args)

    monkeypatch.setattr(PagedBatch, "_decode_all", counted_decode)
    monkeypatch.setattr(PagedBatch, "_mixed", counted_mixed)
    return count


@pytest.mark.parametrize("name", MECHANISMS)
def test_32_requests_get_the_tokens_of_generate(name, routes):
    model, rows = make_model("llama", MECHANISMS[name]), prompts(32)
    kept = running_alphas(model) if MECHANISMS[name].has_running_alpha else None
    told = one_by_one(model, rows)
    assert in_batches(model, rows) == told
    assert all(routes.values()), f"a route was not taken: {routes}"
    assert model.config._attn_implementation == IMPLEMENTATION
    assert one_by_one(model, rows[:4]) == told[:4]
    if kept is not None:
        assert torch.equal(running_alphas(model), kept)


@pytest.mark.parametrize("name", ["affine", "affine visible", "sink"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_windows(family, name, routes):
    """mistral has a window of 5 in every layer, qwen2 in every second one."""
    model, rows = make_model(family, MECHANISMS[name], **SLIDING[family]), prompts(10)
    assert in_batches(model, rows) == one_by_one(model, rows)
    assert [kind for kind, calls in routes.items() if calls] == ["fresh", "decoding", "continued"]


QUICK = ("gpt2", "gpt_neox", "mixtral", "phi3")


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f not in QUICK)]
)
def test_families(family):
    model, rows = make_model(family, MECHANISMS["affine_gated"]), prompts(4, 20)
    assert in_batches(model, rows, pages(tokens=16)) == one_by_one(model, rows)


@pytest.mark.parametrize("most", [0, 2])
def test_requests_that_are_longer_than_a_block_table(most, routes):
    """Transformers fills block tables for batches in which every request fits."""
    model, rows = make_model("llama", MECHANISMS["affine"]), prompts(6)
    assert in_batches(model, rows, pages(max_blocks_per_request=most)) == one_by_one(model, rows)
    assert routes["decoding"] > 0
    assert routes["block table"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_padded_batches_as_cuda_graphs_need_them(family, routes):
    """A GPU pads tokens, requests, keys and block tables to few sizes; here the same padding runs on the CPU."""
    model, rows = make_model(family, MECHANISMS["affine"], **SLIDING.get(family, {})), prompts(7)
    told = one_by_one(model, rows)
    settings = pages(tokens=64, q_padding_interval_size=16, kv_padding_interval_size=64)
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=settings)
    manager.warmup()
    manager.batch_processor.model_runner.pad_inputs = True
    assert collect(manager, rows) == told
    assert routes["fresh"] > 0
    assert routes["block table" if family == "llama" else "decoding"] > 0


def collect(manager, rows, **settings) -> list[list[int]]:
    manager.start()
    try:
        names = manager.add_requests(rows, max_new_tokens=NEW, **settings)
        done, limit = {}, time.monotonic() + 60
        while len(done) < len(rows):
            assert time.monotonic() < limit
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None
                done[result.request_id] = result.generated_tokens
        return [done[name] for name in names]
    finally:
        manager.stop(block=True)


def test_a_full_cache_and_restarted_requests():
    """With few pages requests are evicted and start again from what they have generated."""
    model, rows = make_model("llama", MECHANISMS["affine"]), prompts(8, 30)
    assert in_batches(model, rows, pages(blocks=7), greedy(12)) == one_by_one(model, rows, 12)


def test_shared_prefixes():
    """Requests that begin with the same pages read them from the first; nothing else changes."""
    start = make_tokens(1, 24, 3)[0].tolist()
    rows = [start + row for row in prompts(5, 12, seed=50)]
    model = make_model("llama", MECHANISMS["affine visible"])
    told = one_by_one(model, rows)
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages())
    manager.start()
    try:
        for row, answer in zip(rows, told, strict=True):  # one after the other, so that pages are complete
            name = manager.add_request(row, max_new_tokens=NEW)
            made = [r.generated_tokens for r in manager.request_id_iter(name) if r.is_finished()]
            assert made == [answer]
        assert manager.batch_processor.cache.use_prefix_sharing
    finally:
        manager.stop(block=True)


def test_pages_are_shared(routes):
    """The second request with the same prompt starts after the pages of the first: a chunk after cached keys."""
    row = make_tokens(1, 30, 3)[0].tolist()
    model = make_model("llama", MECHANISMS["affine"])
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages())
    manager.start()
    try:
        answers = []
        for _ in range(2):
            before = dict(routes)
            name = manager.add_request(row, max_new_tokens=NEW)
            answers.append([r.generated_tokens for r in manager.request_id_iter(name) if r.is_finished()])
        assert routes["continued"] > before["continued"]
        assert routes["fresh"] == before["fresh"]
        assert answers[0] == answers[1]
    finally:
        manager.stop(block=True)


def test_several_answers_to_a_prompt():
    """A request is forked after its prompt: the answers share pages, and the last page is copied."""
    model, row = make_model("llama", MECHANISMS["affine"]), prompts(3)[1]
    told = one_by_one(model, [row, row[1:]])[0]
    sampled = greedy(do_sample=True, top_k=1, num_return_sequences=3)  # the likeliest token only
    with model.continuous_batching_context_manager(sampled, continuous_batching_config=pages()) as manager:
        manager.add_request(row, max_new_tokens=NEW)
        answers, limit = [], time.monotonic() + 60
        while len(answers) < 3 and time.monotonic() < limit:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers.append(result.generated_tokens)
    assert answers == [told] * 3


def test_the_end_token_ends_a_request():
    model, rows = make_model("llama", MECHANISMS["affine_gated"]), prompts(8)
    end = one_by_one(model, rows, 12)[3][5]
    told = one_by_one(model, rows, 12, eos_token_id=end)
    assert any(len(answer) < 12 for answer in told)
    assert in_batches(model, rows, generation=greedy(12, eos_token_id=end)) == told


def test_streaming():
    model, row = make_model("llama", MECHANISMS["affine"]), make_tokens(1, 9)[0].tolist()
    told = model.generate(torch.tensor([row]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, 9:].tolist()
    with model.continuous_batching_context_manager(greedy(), continuous_batching_config=pages()) as manager:
        name = manager.add_request(row, max_new_tokens=NEW, streaming=True)
        parts = [list(result.generated_tokens) for result in manager.request_id_iter(name)]
    assert parts == [told[: n + 1] for n in range(NEW)]


def test_a_cancelled_request_leaves_the_others_alone():
    model, rows = make_model("llama", MECHANISMS["affine"]), prompts(4)
    told = one_by_one(model, rows[1:])
    with model.continuous_batching_context_manager(greedy(), continuous_batching_config=pages()) as manager:
        cancelled = manager.add_request(rows[0], request_id="cancelled", max_new_tokens=300, streaming=True)
        next(iter(manager.request_id_iter(cancelled)))
        manager.cancel_request(cancelled)
        names = manager.add_requests(rows[1:], max_new_tokens=NEW)
        done: dict[str, list[int]] = {}
        limit = time.monotonic() + 60
        while len(done) < len(names) and time.monotonic() < limit:
            result = manager.get_result(timeout=1)
            if result is not None and result.request_id in names and result.is_finished():
                done[result.request_id] = result.generated_tokens
    assert [done[name] for name in names] == told


def test_a_kept_manager_serves_again():
    model, rows = make_model("llama", MECHANISMS["affine"]), prompts(4)
    told = one_by_one(model, rows)
    for _ in range(2):
        assert in_batches(model, rows, persistent_manager=True) == told
        assert model.config._attn_implementation == IMPLEMENTATION
    model.destroy_cached_continuous_batching_manager()


def test_generate_with_a_paged_cache():
    model, tokens = make_model("llama", MECHANISMS["affine"]), make_tokens(1, 7)
    made = model.generate(
        tokens, generation_config=greedy(), cache_implementation="paged", continuous_batching_config=pages()
    )
    told = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert made.flatten().tolist() == told.flatten().tolist()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("before", [None, "sdpa", "paged|sdpa", "flash_attention_2", "paged|flash_attention_2"])
def test_an_installed_flash_attention_is_not_used(version, before, monkeypatch, routes):
    """Transformers switches plain models to flash attention where it finds the package; a mechanism stays."""
    for number in (2, 3):
        name = f"is_flash_attn_{number}_available"
        monkeypatch.setattr(continuous_api, name, lambda number=number, **_: number == version)
    model, rows = make_model("llama", MECHANISMS["affine"]), prompts(2, 9)
    told = one_by_one(model, rows)
    if before is not None and "flash" not in before:
        model.set_attn_implementation(before)
        assert one_by_one(model, rows) == told
    elif before is not None:
        model.set_attn_implementation(before)
    kept = model.config._attn_implementation
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages())
    assert model.config._attn_implementation == PAGED
    assert collect(manager, rows) == told
    assert routes["fresh"] > 0
    assert model.config._attn_implementation == kept


def test_a_plain_forward_while_requests_run_is_refused():
    model = make_model("llama", MECHANISMS["affine"])
    running = model.continuous_batching_context_manager(greedy(), continuous_batching_config=pages())
    with running, pytest.raises(ValueError, match="stop the manager"):
        model(make_tokens())
    model(make_tokens())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_cuda_graph": (True, True)}, "use_cuda_graph must be False for batches with prefill"),
        ({"default_compile_level": 1}, "default_compile_level must be 0"),
        ({"decode_compile_config": transformers.CompileConfig()}, "decode_compile_config must be None"),
    ],
)
def test_refused_settings(settings, words):
    model = make_model("llama", MECHANISMS["affine"])
    with pytest.raises(ValueError, match=words):
        model.generate_batch([[1, 2]], generation_config=greedy(), continuous_batching_config=pages(**settings))
    assert model.config._attn_implementation == IMPLEMENTATION


def test_keys_of_the_call_as_divisor_are_refused():
    model = make_model("llama", Mechanism.named("affine", bias_length="keys"))
    with pytest.raises(ValueError, match='bias_length="keys" cannot generate'):
        model.generate_batch([[1, 2]], generation_config=greedy())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(mechanisms(model)[0], "observer", print), "has an observer"),
        (lambda model: setattr(mechanisms(model)[0], "sequence", object()), "is sequence-parallel"),
        (lambda model: setattr(model, "_tp_size", 2), "split by tensor parallelism"),
        (lambda model: setattr(model.config, "num_kv_shared_layers", 1), "use the keys of other layers"),
        (lambda model: setattr(model.config, "sliding_window", 1), "sliding_window must not be 1"),
        (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "longest request of a batch"),
        (lambda model: setattr(model.config, "layer_types", ["conv", "full_attention"]), "layers of type conv"),
        (lambda model: setattr(model.config, "num_key_value_heads", 4), "has room for 32"),
        (lambda model: setattr(model.config, "num_hidden_layers", 3), "2 of its 3 layers"),
    ],
)
def test_refused_models(change, words):
    model = make_model("llama", MECHANISMS["affine"])
    change(model)
    with pytest.raises(ValueError, match=words):
        model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages())
    assert model.config._attn_implementation == IMPLEMENTATION


def test_layers_of_different_sizes_are_refused():
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size_per_layer_input": 64,
             "hidden_size_per_layer_input": 8, "global_head_dim": 16}  # fmt: skip
    config = transformers.AutoConfig.for_model("gemma4_text", **small)
    model = hf.attach(transformers.AutoModelForCausalLM.from_config(config), "affine")
    with pytest.raises(ValueError, match="heads differ from layer to layer"):
        model.generate_batch([[1, 2]], generation_config=greedy(), continuous_batching_config=pages())


def test_a_window_that_the_cache_does_not_know_is_refused():
    model = make_model("qwen2", MECHANISMS["affine"])
    model.model.layers[0].self_attn.sliding_window = 5
    results = model.generate_batch([[1, 2, 3]], generation_config=greedy(), continuous_batching_config=pages())
    (result,) = results.values()
    assert "sliding_window of layer 0" in result.error


ACCELERATED = ("gpt_oss", "granite_swa", "granitemoe_swa", "afmoe", "laguna")


@pytest.mark.parametrize("family", ACCELERATED)
def test_models_with_their_own_sinks_and_gates(family, routes):
    model, rows = hf.accelerate(make_own(family)), prompts(6, 24)
    told = one_by_one(model, rows)
    assert in_batches(model, rows, pages(tokens=20)) == told
    assert all(routes[kind] for kind in ("fresh", "decoding", "continued"))
    assert model.config._attn_implementation == OPERATOR
    assert in_batches(copy.deepcopy(model), rows) == told
    hf.decelerate(model)
    assert "init_continuous_batching" not in model.__dict__
    assert one_by_one(model, rows[:2]) == told[:2]


def test_an_accelerated_model_stays_on_the_operator(monkeypatch):
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    model = hf.accelerate(make_own("gpt_oss"))
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages())
    assert model.config._attn_implementation == PAGED_OPERATOR
    assert len(collect(manager, prompts(2))) == 2


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_next", "layers of type linear_attention"),
        ("hrm_text", "called several times in a forward"),
        ("mimo_v2_flash", "k_proj has 32 output features"),
        ("step3p7", "configuration of its own"),
    ],
)
def test_refused_models_with_their_own_sinks_and_gates(family, words):
    model = hf.accelerate(make_own(family))
    with pytest.raises(ValueError, match=words):
        model.generate_batch([[1, 2]], generation_config=greedy(), continuous_batching_config=pages())


def test_a_plain_model_is_not_touched():
    """The same cache and requests on transformers' own attention: the comparison of benchmarks/serving.py."""
    model, rows = plain_model(), prompts(6)
    model.set_attn_implementation(serving.PLAIN_ATTENTION)
    stay = {"auto_switch_to_flash": False} if "auto_switch_to_flash" in serving.SETTINGS else {}
    manager = model.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pages(**stay))
    made = collect(manager, rows)
    model.set_attn_implementation("sdpa")
    assert made == one_by_one(model, rows)


def test_a_saved_model_serves(tmp_path):
    model, rows = make_model("llama", MECHANISMS["affine_gated"]), prompts(4)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert in_batches(loaded, rows) == one_by_one(model, rows)
