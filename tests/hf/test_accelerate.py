"""Models with sinks or gates of their own: the operator against their own eager attention."""

from __future__ import annotations

import copy
import json
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from affine_attention import hf
from affine_attention.hf.accelerate import OPERATOR, SERVED, operator_attention
from tests.nn.test_distributed import free_port

from .models import SHAPE, make_tokens, plain_model

WINDOW = 5
LAYERS = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BASE = SHAPE | {"num_hidden_layers": 4}
WINDOWS = {"sliding_window": WINDOW, "layer_types": LAYERS}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": BASE | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": BASE | WINDOWS | {"attention_multiplier": 0.4},
    "granitemoe_swa": BASE | WINDOWS | {"attention_multiplier": 0.4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": BASE | WINDOWS | EXPERTS | {"v_head_dim": 6, "head_dim": 8, "n_routed_experts": 4},
    "qwen3_next": BASE | RECURRENT | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": BASE | RECURRENT,
    "qwen3_5_moe_text": BASE | RECURRENT | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "hrm_text": BASE | {"H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 12, "num_layers_per_stack": 2},
    "afmoe": BASE | WINDOWS | EXPERTS | {"num_experts": 4, "num_shared_experts": 1},
    "laguna": BASE | WINDOWS | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16,
                                         "num_attention_heads_per_layer": [4, 6, 4, 6]},
    "laguna elementwise": BASE | WINDOWS | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16,
                                                     "gating": "per-element"},
    "step3p7": BASE | WINDOWS | EXPERTS | {"n_routed_experts": 4, "num_local_experts": 4, "share_expert_dim": 16},
}  # fmt: skip
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")


def make(family: str, dtype: torch.dtype = torch.float32, experts: str = "eager", **changes: Any):
    """A tiny random model on its own eager attention, with sinks that are large and different for every head."""
    settings = CONFIGS[family] | changes
    torch.manual_seed(0)
    if family == "step3p7":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                  "image_size": 28, "patch_size": 14, "max_position_embeddings": 4}  # fmt: skip
        config: Any = transformers.Step3p7Config(text_config=settings, vision_config=vision, image_token_id=63)
        model = transformers.Step3p7ForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        config = AutoConfig.for_model(family.split()[0], **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation(experts)  # "eager" has fp64, "batched_mm" can be traced with its backward
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0, std=2.0)
        elif "norm" not in name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def pair(family: str, dtype: torch.dtype = torch.float32, **changes: Any):
    """(the model on its own eager attention, the same model accelerated)."""
    plain = make(family, dtype, **changes)
    return plain, hf.accelerate(copy.deepcopy(plain))


def grads(model: Any, inputs: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, of a loss that every real position takes part in."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    (torch.log_softmax(logits.double(), -1) * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def check_same(plain: Any, fast: Any, inputs: dict[str, Any], real: Tensor, tolerance: float) -> None:
    """Logits at real positions and the gradients of all parameters are equal within a tolerance."""
    weight = make_weight(real)
    with torch.no_grad():
        ours, theirs = fast(**inputs, use_cache=False).logits, plain(**inputs, use_cache=False).logits
    assert distance(ours[real], theirs[real]) < tolerance
    check_gradients(grads(fast, inputs, weight), grads(plain, inputs, weight), 50 * tolerance)


def make_weight(real: Tensor) -> Tensor:
    return torch.randn(*real.shape, 64, generator=torch.Generator().manual_seed(5)).double() * real[..., None]


def check_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    # A gradient of rounding alone (a key bias changes no softmax) is measured against the largest.
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        error = float((ours[name] - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_gradients_are_those_of_eager(family, dtype):
    plain, fast = pair(family, dtype)
    tokens = make_tokens(2, 13)
    # Eager softmax of most families is fp32 whatever the dtype.
    tolerance = 2e-5 if dtype == torch.float32 or family not in ("gpt_oss", "mimo_v2_flash") else 1e-12
    check_same(plain, fast, {"input_ids": tokens}, torch.ones_like(tokens, dtype=torch.bool), tolerance)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family, side):
    plain, fast = pair(family)
    tokens = make_tokens(2, 13)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    mask[1, :1] = 0
    if side == "right":
        mask = mask.flip(1)
    check_same(plain, fast, {"input_ids": tokens, "attention_mask": mask}, mask.bool(), 2e-5)


@pytest.mark.parametrize("family", [f for f in CONFIGS if "linear_key_head_dim" not in CONFIGS[f]])
def test_packed_documents_equal_documents_alone(family):
    """The eager attention of gpt_oss and afmoe ignores position_ids: its documents see each other."""
    plain, fast = pair(family)
    tokens, lengths = make_tokens(1, 14), (3, 7, 4)
    inputs = {"input_ids": tokens, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    weight = make_weight(torch.ones_like(tokens, dtype=torch.bool))
    ours = grads(fast, inputs, weight)
    with torch.no_grad():
        logits = fast(**inputs, use_cache=False).logits
        assert torch.equal(fast(**inputs, use_cache=True).logits, logits)
    theirs: dict[str, Tensor] = {}
    parts = (x.split(lengths, 1) for x in (tokens, logits, weight))
    for document, document_logits, document_weight in zip(*parts, strict=True):
        with torch.no_grad():
            assert distance(document_logits, plain(document).logits) < 2e-5
        for name, gradient in grads(plain, {"input_ids": document}, document_weight).items():
            theirs[name] = theirs.get(name, 0) + gradient
    check_gradients({name: ours[name] for name in theirs}, theirs, 1e-3)


@pytest.mark.parametrize("family", [f for f in CONFIGS if "linear_key_head_dim" in CONFIGS[f]])
def test_packed_documents_of_recurrent_models_equal_eager(family):
    plain, fast = pair(family)
    tokens = make_tokens(1, 14)
    inputs = {"input_ids": tokens, "position_ids": torch.cat([torch.arange(n) for n in (3, 7, 4)])[None]}
    check_same(plain, fast, inputs, torch.ones_like(tokens, dtype=torch.bool), 2e-5)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("cache", [None, "dynamic", "static", "no cache"])
def test_generation(family, cache):
    plain, fast = pair(family)
    tokens = make_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    if cache in ("dynamic", "static"):
        settings["cache_implementation"] = cache
    if cache == "no cache":
        settings["use_cache"] = False
    ours, theirs = fast.generate(tokens, **settings), plain.generate(tokens, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert distance(torch.stack(ours.logits), torch.stack(theirs.logits)) < 2e-5


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "laguna", "qwen3_next"])
def test_chunked_prefill_and_decoding(family):
    plain, fast = pair(family)
    tokens = make_tokens(2, 17)

    def run(model: Any, cache: Any) -> Tensor:
        chunks = tokens.split((7, 1, 6, 1, 2), 1)
        return torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], 1)

    with torch.no_grad():
        for make_cache in (
            lambda: DynamicCache(config=plain.config),
            lambda: StaticCache(config=plain.config, max_cache_len=24),
        ):
            assert distance(run(fast, make_cache()), run(plain, make_cache())) < 2e-5


def test_rows_with_cu_seq_lens_are_packed():
    _, fast = pair("gpt_oss")
    tokens = make_tokens(1, 14)
    lengths = torch.tensor([0, 3, 10, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (3, 7, 4)])[None]
    flash = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        packed = fast(tokens, position_ids=positions, use_cache=False).logits
        assert torch.equal(fast(tokens, position_ids=positions, use_cache=False, **flash).logits, packed)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must come with one packed row, got a batch of 2"):
        fast(tokens.expand(2, -1), use_cache=False, **flash)


def slow_but_gpt_oss(families):
    """Compiling a family takes 10 to 75 s, so `make test` compiles one and `make test-all` all of them."""
    return [f if f == "gpt_oss" else pytest.param(f, marks=pytest.mark.slow) for f in families]


@pytest.mark.parametrize("family", slow_but_gpt_oss(f for f in CONFIGS if "linear_key_head_dim" not in CONFIGS[f]))
def test_compiled_models(family):
    torch._dynamo.reset()
    plain, fast = pair(family, experts="batched_mm")
    # The experts of step3p7 have no implementation that can be traced.
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=family != "step3p7")
    tokens = make_tokens(2, 13)
    packed = torch.cat([torch.arange(n) for n in (6, 7)])[None].expand(2, -1)
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    with torch.no_grad():
        theirs = plain(tokens, use_cache=False).logits
        assert distance(compiled(tokens, use_cache=False).logits, theirs) < 2e-5
        theirs = fast(tokens, position_ids=packed, use_cache=False).logits
        assert distance(compiled(tokens, position_ids=packed, use_cache=False).logits, theirs) < 2e-5
        theirs = plain(tokens, attention_mask=padding, use_cache=False).logits
        ours = compiled(tokens, attention_mask=padding, use_cache=False).logits
        assert distance(ours[padding.bool()], theirs[padding.bool()]) < 2e-5


@pytest.mark.parametrize("family", slow_but_gpt_oss(["gpt_oss", "granite_swa", "laguna"]))
def test_compiled_gradients(family):
    torch._dynamo.reset()
    plain, fast = pair(family, experts="batched_mm")
    tokens = make_tokens(2, 13)
    weight = make_weight(torch.ones_like(tokens, dtype=torch.bool))
    theirs = grads(plain, {"input_ids": tokens}, weight)
    ours = grads(torch.compile(fast, backend="aot_eager", fullgraph=True), {"input_ids": tokens}, weight)
    check_gradients({name.removeprefix("_orig_mod."): gradient for name, gradient in ours.items()}, theirs, 1e-3)


def test_compiled_layers_and_recurrent_models():
    torch._dynamo.reset()
    plain, fast = pair("qwen3_next", experts="batched_mm")
    for layer in fast.model.layers:
        layer.compile(backend="aot_eager")
    tokens = make_tokens(2, 13)
    with torch.no_grad():
        assert distance(fast(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits) < 2e-5


@pytest.mark.parametrize("family", slow_but_gpt_oss(["gpt_oss", "mimo_v2_flash"]))
def test_compiled_decoding_with_a_static_cache(family):
    torch._dynamo.reset()
    plain, fast = pair(family, experts="batched_mm")
    tokens = make_tokens(2, 9)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    theirs = plain.generate(tokens, **settings)
    cache = StaticCache(config=fast.config, max_cache_len=20)
    step = torch.compile(fast, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        token = fast(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
        for place in range(9, 17):
            assert torch.equal(token, theirs[:, place : place + 1])
            token = step(token, past_key_values=cache).logits.argmax(-1)


@pytest.mark.slow
def test_a_bidirectional_prefix_is_kept_compiled_too():
    plain, fast = pair("hrm_text")
    tokens = make_tokens(2, 11)
    torch._dynamo.reset()
    kinds = torch.zeros_like(tokens)
    kinds[:, :5] = 1
    with torch.no_grad():
        theirs = plain(tokens, token_type_ids=kinds, use_cache=False).logits
        assert distance(plain(tokens, use_cache=False).logits, theirs) > 1e-2
        assert distance(fast(tokens, token_type_ids=kinds, use_cache=False).logits, theirs) < 2e-5
        compiled = torch.compile(fast, backend="aot_eager")
        assert distance(compiled(tokens, token_type_ids=kinds, use_cache=False).logits, theirs) < 2e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    _, fast = pair("gpt_oss")
    tokens = make_tokens(2, 13)
    weight = torch.randn(2, 13, 64).double()
    without = grads(fast, {"input_ids": tokens}, weight)
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fast.train()
    fast.enable_input_require_grads()
    for name, gradient in grads(fast, {"input_ids": tokens}, weight).items():
        assert torch.equal(gradient, without[name]), name


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_half_precision_is_as_accurate_as_eager(family):
    exact = make(family, torch.float64)
    plain = copy.deepcopy(exact).to(torch.bfloat16)
    fast = hf.accelerate(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).to(torch.float64)
    tokens = make_tokens(4, 33)
    with torch.no_grad():
        truth = exact(tokens).logits
        ours, theirs = ((model(tokens).logits.double() - truth).square().mean() for model in (fast, plain))
    assert ours < 2**2 * theirs


def test_weights_are_returned_with_sinks_in_them():
    plain, fast = pair("gpt_oss")
    tokens = make_tokens(2, 7)
    with torch.no_grad():
        theirs, ours = plain(tokens, output_attentions=True), fast(tokens, output_attentions=True)
    assert len(ours.attentions) == len(theirs.attentions) == 4
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        assert distance(a, b) < 2e-5
    assert fast(tokens).attentions is None


def test_weights_have_the_length_of_a_preallocated_cache():
    found = []
    for model in pair("gpt_oss"):
        cache = StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            found.append(model(make_tokens(2, 7), past_key_values=cache, output_attentions=True).attentions)
    for theirs, ours in zip(*found, strict=True):
        assert distance(theirs, ours) < 2e-5


def test_the_report_names_every_layer():
    plain, fast = pair("mimo_v2_flash")
    report = hf.explain(plain)
    assert not report.accelerated
    assert hf.explain(fast).accelerated
    sliding, full = report.layers[:2]
    assert (sliding.sink, sliding.window, sliding.head_dim, sliding.value_dim) == (True, WINDOW, 8, 6)
    assert (full.sink, full.window, full.gate) == (False, None, None)
    assert "model.layers.0.self_attn (MiMoV2FlashAttention)" in str(report)
    laguna = hf.explain(make("laguna"))
    assert [layer.heads for layer in laguna.layers] == [4, 6, 4, 6]
    assert laguna.layers[0].gate == "per head"
    assert hf.explain(make("laguna elementwise")).layers[0].gate == "elementwise"
    gated = hf.explain(make("qwen3_next"))
    assert [(layer.name, layer.gate) for layer in gated.layers] == [
        ("model.layers.1.self_attn", "elementwise"),
        ("model.layers.3.self_attn", "elementwise"),
    ]


def test_decelerate_gives_the_model_back():
    plain = make("gpt_oss")
    model = copy.deepcopy(plain)
    config = model.config
    hf.accelerate(model)
    assert hf.is_accelerated(model)
    assert model.config._attn_implementation == OPERATOR
    assert config._attn_implementation == "eager"  # another model may share it
    with pytest.raises(ValueError, match=r"accelerated already .*; call affine_attention.hf.decelerate"):
        hf.accelerate(model)
    hf.decelerate(model)
    assert not hf.is_accelerated(model)
    assert model.config._attn_implementation == "eager"
    tokens = make_tokens()
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    assert all(not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match=r"model must be accelerated, got a plain GptOssForCausalLM"):
        hf.decelerate(model)


def test_a_switch_by_the_user_is_obeyed():
    plain, fast = pair("gpt_oss")
    tokens = make_tokens()
    fast.set_attn_implementation("eager")
    assert torch.equal(fast(tokens).logits, plain(tokens).logits)
    hf.decelerate(fast)
    assert fast.config._attn_implementation == "eager"


def test_checkpoints_are_those_of_the_plain_model(tmp_path):
    plain, fast = pair("gpt_oss")
    fast.save_pretrained(tmp_path / "fast")
    plain.save_pretrained(tmp_path / "plain")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("fast", "plain")]
    assert configs[0] == configs[1]
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fast", attn_implementation="eager", experts_implementation="eager"
    )
    assert type(loaded) is type(plain)
    tokens = make_tokens()
    assert torch.equal(loaded(tokens).logits, plain(tokens).logits)


def test_only_the_text_decoder_of_a_composite_model_is_switched():
    model = hf.accelerate(make("step3p7"))
    assert model.config.text_config._attn_implementation == OPERATOR
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config._attn_implementation == "eager"
    hf.decelerate(model)
    assert model.config.text_config._attn_implementation == "eager"


def test_the_name_alone_is_refused(tmp_path):
    """Without the hook a compiled model could not tell packed documents from plain rows."""
    model = make("gpt_oss")
    model.set_attn_implementation(OPERATOR)
    with pytest.raises(ValueError, match=r'attn_implementation="affine_operator" needs .*call hf.accelerate\(model\)'):
        model(make_tokens())


def test_models_without_sinks_or_gates_are_refused():
    with pytest.raises(ValueError, match=r"its attention is LlamaAttention; served are gpt_oss, .*; use attn_impl"):
        hf.accelerate(plain_model("llama"))
    with pytest.raises(ValueError, match=r"has a mechanism, which runs on the operator already"):
        hf.accelerate(hf.attach(plain_model("llama"), "affine"))
    with pytest.raises(TypeError, match=r"model must be a PreTrainedModel of transformers, got Linear"):
        hf.accelerate(torch.nn.Linear(2, 2))


def test_nothing_is_dropped_silently():
    _, fast = pair("gpt_oss")
    module = fast.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"s_aux must be the sinks of GptOssAttention, got None"):
        operator_attention(module, q, k, k, None, scaling=0.3, affine_segments=None)
    with pytest.raises(ValueError, match=r"block_indices is a keyword that the operator does not know, got a tensor"):
        fast(make_tokens(), block_indices=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"softcap is a keyword .* got 30.0 in GptOssAttention"):
        fast(make_tokens(), softcap=30.0)
    with pytest.raises(ValueError, match=r"is_causal must be left out or True, got False"):
        fast(make_tokens(), is_causal=False)
    other = plain_model("llama")
    other.set_attn_implementation(OPERATOR)
    with pytest.raises(ValueError, match=r'attn_implementation="affine_operator" serves gpt_oss, .*got LlamaAttention'):
        other(make_tokens())


def test_dropout_is_refused_in_training_only():
    fast = hf.accelerate(make("gpt_oss", attention_dropout=0.1))
    fast(make_tokens())
    with pytest.raises(ValueError, match=r"dropout on attention weights .* got 0.1 in GptOssAttention"):
        fast.train()(make_tokens())


def test_served_classes_exist():
    """A family that transformers renames must be noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {type(m).__name__ for family in CONFIGS for m in make(family).modules()}
    assert set(SERVED) <= found


def tensor_parallel_rank(rank: int, port: int, folder: str) -> None:
    from transformers.distributed import DistributedConfig

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
                   "WORLD_SIZE": "2"}  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
        )
        hf.accelerate(model)
        logits = model(make_tokens(2, 11), use_cache=False).logits
        torch.log_softmax(logits, -1)[..., 3].sum().backward()
        sinks = model.model.layers[0].self_attn.sinks.grad.full_tensor()
        torch.save((logits.detach(), sinks), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_tensor_parallelism_splits_the_sinks(tmp_path):
    """The eager attention of granite_swa fails here: its sinks are distributed tensors, its scores are not."""
    plain = make("granite_swa")
    plain.save_pretrained(tmp_path)
    mp.spawn(tensor_parallel_rank, args=(free_port(), str(tmp_path)), nprocs=2)
    logits = plain(make_tokens(2, 11), use_cache=False).logits
    torch.log_softmax(logits, -1)[..., 3].sum().backward()
    for rank in range(2):
        ours, sinks = torch.load(tmp_path / f"{rank}.pt")
        assert distance(ours, logits.detach()) < 2e-5
        assert distance(sinks, plain.model.layers[0].self_attn.sinks.grad) < 1e-3
