"""Observing a model records the operator's arguments for every mechanism and visibility, without side effects."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from affine_attention import Mechanism, attention, attention_weights
from affine_attention.hf import student
from affine_attention.lab.inspection.capture import Probe, watch
from affine_attention.nn import PRESETS, AttentionMechanism, SelfAttention, commit_running_alpha
from affine_attention.nn.attention import subtract_next
from tests.hf.models import SLIDING, WINDOW, make_model, make_tokens, plain_model, running_alphas
from tests.hf.test_masks import LENGTHS, packed_positions, padded_rows

EXACT = {"rtol": 1e-12, "atol": 1e-12}
WEIGHTS = ("alpha", "beta", "sink", "mask", "is_causal", "window", "segment_ids", "softmax_scale",
           "weights")  # fmt: skip


def calls_of(model, *args, **inputs):
    calls = []
    with torch.no_grad(), watch(model, calls.append):
        model(*args, **inputs)
    return calls


def weights_of(call):
    weights = attention_weights(call.query, call.key, **{name: getattr(call, name) for name in WEIGHTS})
    return weights if call.difference is None else subtract_next(weights, call.difference, 2)


def inputs_of(kind):
    if kind == "padded":
        tokens, mask = padded_rows("right")
        return {"input_ids": tokens, "attention_mask": mask}
    if kind == "packed":
        return {"input_ids": make_tokens(), "position_ids": packed_positions()}
    return {"input_ids": make_tokens()}


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize("kind", ["causal", "padded", "packed"])
@pytest.mark.parametrize("mechanism", PRESETS)
def test_an_observer_sees_what_the_operator_received(mechanism, kind):
    model = make_model("llama", Mechanism.named(mechanism, bias_length=4), torch.float64)
    inputs = inputs_of(kind)
    calls = calls_of(model, **inputs)
    truth = model(**inputs, output_attentions=True, use_cache=False).attentions
    assert [call.layer for call in calls] == [0, 1]
    for call, weights in zip(calls, truth, strict=True):
        assert call.query.shape == (*inputs["input_ids"].shape[:1], 4, 12, 8)
        assert call.key.shape == call.value.shape == (call.query.shape[0], 2, 12, 8)
        torch.testing.assert_close(weights_of(call), weights, **EXACT)
        settings = PRESETS[mechanism]
        parts = (settings.has_alpha, bool(settings.bias), settings.sink is not None, settings.gate)
        assert parts == tuple(x is not None for x in (call.alpha, call.beta, call.sink, call.gate))


def test_the_value_and_the_gate_are_those_of_the_output():
    model = make_model("llama", "affine_gated", torch.float64)
    outputs = []
    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
             for layer in model.model.layers]  # fmt: skip
    calls = calls_of(model, make_tokens())
    for hook in hooks:
        hook.remove()
    for call, out in zip(calls, outputs, strict=True):
        again = attention(
            call.query, call.key, call.value, alpha=call.alpha, beta=call.beta, gate=call.gate, is_causal=True
        )
        torch.testing.assert_close(again.transpose(1, 2).flatten(2), out, **EXACT)


def test_windows_and_padding_are_reported():
    model = make_model("qwen2", **SLIDING["qwen2"])
    tokens, mask = padded_rows("left")
    full, sliding = calls_of(model, tokens, attention_mask=mask)
    assert (full.window, sliding.window) == (None, WINDOW)
    assert full.token_mask.sum(-1).tolist() == list(LENGTHS)
    assert full.visibility.count().shape == (3, 1, 12)
    cached = calls_of(model, make_tokens(length=9), attention_mask=torch.ones(2, 9))[0]
    assert cached.token_mask is None


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine_gated"])
def test_watching_changes_nothing(mechanism):
    model = make_model("llama", mechanism)
    tokens = make_tokens()
    before, state = model(tokens).logits, copy.deepcopy(model.state_dict())
    keys = [set(layer.__dict__) for layer in model.modules()]
    with watch(model, lambda call: None):
        assert torch.equal(model(tokens).logits, before)
    with Probe(model) as probe:
        assert torch.equal(model(tokens).logits, before)
    assert probe.result()["mean_logit"]
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert [set(layer.__dict__) for layer in model.modules()] == keys


def test_a_training_forward_can_be_watched_and_learns_the_same():
    def step(watched):
        model = make_model("llama", "affine").train()
        model.gradient_checkpointing_enable()
        with Probe(model) if watched else torch.enable_grad():
            loss = model(make_tokens(), labels=make_tokens(), use_cache=False).loss
        loss.backward()
        commit_running_alpha(model)
        return [p.grad for p in model.parameters()], running_alphas(model)

    (mine, my_alpha), (theirs, their_alpha) = step(True), step(False)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert torch.equal(my_alpha, their_alpha)


def test_observers_nest_and_leave_even_after_an_error():
    model, seen = make_model(), []

    def fail(call):
        raise RuntimeError("observer")

    with watch(model, lambda call: seen.append("outer")):
        with pytest.raises(RuntimeError, match="observer"), watch(model, fail):
            model(make_tokens())
        with watch(model, lambda call: seen.append("inner")):
            model(make_tokens())
    model(make_tokens())
    assert seen == ["outer", *["outer", "inner"] * 2]
    assert all(m.observer is None for m in model.modules() if isinstance(m, AttentionMechanism))


@pytest.mark.parametrize("part", ["model", "layers"])
def test_a_compiled_model_stays_one_graph_and_is_watched_without_compiling_again(part):
    model, tokens = make_model(), make_tokens()
    torch.compiler.reset()
    counter = CompileCounter()
    if part == "model":
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    else:
        compiled = model
        for layer in model.model.layers:
            layer.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        compiled(tokens, use_cache=False)
        graphs = counter.frame_count
        assert graphs >= 1
        calls = []
        with watch(compiled, calls.append):
            compiled(tokens, use_cache=False)
        assert [call.layer for call in calls] == [0, 1]
        compiled(tokens, use_cache=False)
    assert counter.frame_count == graphs, "the graphs from before are used again"


def test_our_own_layer_is_watched_too():
    layer = SelfAttention(32, 4, 2, "sink", window=5)
    (call,) = calls_of(layer, torch.randn(2, 9, 32), mask=torch.arange(9)[None] < torch.tensor([[9], [4]]))
    assert (call.window, call.is_causal) == (5, True)
    assert call.softmax_scale == pytest.approx(8**-0.5)
    assert call.token_mask.sum(-1).tolist() == [9, 4]
    assert torch.equal(call.sink, layer.mechanism.sink)


def test_a_plain_model_is_rejected_with_the_way_out():
    with pytest.raises(ValueError) as error, watch(plain_model(), print):
        pass
    assert 'attach(model, "softmax")' in str(error.value)


@pytest.mark.parametrize("kind", ["causal", "padded", "packed"])
@pytest.mark.parametrize("mechanism", ["softmax", "affine_gated"])
def test_a_probe_equals_means_over_the_scores(mechanism, kind):
    model = make_model("llama", mechanism, torch.float64)
    inputs = inputs_of(kind)
    calls = calls_of(model, **inputs)
    with torch.no_grad(), Probe(model) as probe:
        model(**inputs)
    result = probe.result()
    for call in calls:
        real = torch.ones(call.query.shape[0], 12, dtype=torch.bool) if call.token_mask is None else call.token_mask
        scores = call.query @ call.key.repeat_interleave(2, 1).mT * call.softmax_scale
        seen = (weights_of(call) != 0) & real[:, None, :, None]
        for head in range(4):
            truth = scores[:, head][seen[:, head]].mean().item()
            assert result["mean_logit"][call.layer][head] == pytest.approx(truth, rel=1e-12)
        if mechanism == "softmax":
            continue
        alphas = call.alpha.transpose(1, 2)[real]
        assert result["saturated"][call.layer] == ((alphas == 0) | (alphas == 1)).double().mean().item() > 0
        gates = call.gate.transpose(1, 2)[real]
        assert result["gate_saturated"][call.layer] == ((gates < 0.01) | (gates > 0.99)).double().mean().item() > 0
    if mechanism == "softmax":
        assert result["saturated"] is result["gate_saturated"] is result["running_alpha"] is None
    else:
        assert torch.equal(torch.tensor(result["running_alpha"]).flatten(), running_alphas(model))


def test_a_probe_averages_forwards_by_their_tokens_and_needs_none():
    model = student("llama-1m", "affine", vocab_size=64, num_hidden_layers=1, dtype=torch.float64)
    probe = Probe(model)
    assert probe.result()["mean_logit"] is None
    tokens = make_tokens(4)
    with torch.no_grad(), probe:
        model(tokens[:1])
        model(tokens[1:])
    with torch.no_grad(), Probe(model) as whole:
        model(tokens)
    assert probe.result()["mean_logit"][0] == pytest.approx(whole.result()["mean_logit"][0], rel=1e-9)


def test_a_probe_keeps_its_precision_under_autocast():
    model = make_model()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Probe(model) as probe:
        model(make_tokens())
    (sums, count) = probe._sums[0]["mean_logit"]
    assert sums.dtype == torch.float64
    assert count.tolist() == [2 * 12 * 13 // 2] * 4
