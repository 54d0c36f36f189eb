"""Every instrument equals the direct computation on a tiny model."""

from __future__ import annotations

import json
import math

import pytest
import torch

from affine_attention.hf import is_attached
from affine_attention.lab.evaluation.evaluate import evaluate, format_evaluation
from affine_attention.lab.evaluation.instruments import (
    INSTRUMENTS,
    difference,
    parse_instruments,
    position_limit,
    run_instruments,
)
from affine_attention.lab.evaluation.quantisation import VARIANTS, linear_layers, quantise
from tests.hf.models import make_model, plain_model

from .models import save_checkpoint, some_documents, tiny_tokenizer

LENGTH, SEQUENCES = 12, 3


def some_ids(rows=SEQUENCES, length=4 * LENGTH):
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def run(model, names, ids=None, length=LENGTH, sequences=SEQUENCES):
    text = list(some_ids() if ids is None else ids)
    return run_instruments(model, None, text, names, source="ids", length=length, sequences=sequences)


@torch.no_grad()
def loss_of(model, ids, **options):
    """[T - 1] of one sequence."""
    logits = model(ids[None], use_cache=False, **options).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


def check(found, changed, plain):
    """Loss, difference and standard error of means over sequences."""
    changed, plain = (torch.stack([each.mean() for each in losses]) for losses in (changed, plain))
    assert found["loss"] == pytest.approx(changed.mean().item(), rel=1e-6)
    assert found["delta"] == pytest.approx((changed - plain).mean().item(), rel=1e-4, abs=1e-7)
    error = (changed - plain).std().item() / math.sqrt(len(plain))
    assert found["stderr"] == pytest.approx(error, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kind", ["plain", "affine", "gpt2"])
def test_the_loss_without_the_first_key(kind):
    model = {
        "plain": lambda: plain_model("llama", torch.float64),
        "affine": lambda: make_model("llama", "affine", torch.float64),
        "gpt2": lambda: make_model("gpt2", "affine", torch.float64),
    }[kind]()
    found = run(model, ["eviction"])["eviction"]
    after = LENGTH // 2  # a sequence below 128 tokens is halved
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[after:, 0] = False
    ids = some_ids()[:, :LENGTH]
    plain = [loss_of(model, row) for row in ids]
    evicted = [loss_of(model, row, attention_mask=seen[None, None]) for row in ids]
    check(found["first_key"], [each[after:] for each in evicted], [each[after:] for each in plain])
    assert abs(found["first_key"]["delta"]) > 1e-3
    assert is_attached(model) is (kind != "plain")
    assert found["protocol"]["sequences"] == SEQUENCES


def test_the_loss_in_low_precision():
    model = plain_model("llama", torch.float64)
    found = run(model, ["quantisation"])["quantisation"]
    assert set(found["variants"]) == set(VARIANTS)
    assert found["layers"] == 14
    ids = some_ids()[:, :LENGTH]
    plain = [loss_of(model, row) for row in ids]
    for name in ("a8_tensor", "w4", "w8a8_token"):
        how = VARIANTS[name]
        changed_model = plain_model("llama", torch.float64)
        with torch.no_grad():
            for layer in linear_layers(changed_model):
                if how.weights is not None:
                    layer.weight.copy_(quantise(layer.weight, how.weights, 1))
                if how.inputs is not None:
                    dim = None if how.scale == "tensor" else -1
                    layer.register_forward_pre_hook(
                        lambda module, args, bits=how.inputs, dim=dim: (quantise(args[0], bits, dim),)
                    )
        check(found["variants"][name], [loss_of(changed_model, row) for row in ids], plain)
    deltas = {name: abs(entry["delta"]) for name, entry in found["variants"].items()}
    assert deltas["a4_token"] > deltas["a8_token"] > 0
    assert deltas["w4"] > deltas["w8"] > 0


def test_the_loss_by_position_and_beyond_the_training_length():
    model = make_model("llama", "affine", torch.float64)
    found = run(model, ["length"])["length"]
    ids = some_ids()
    whole = torch.stack([loss_of(model, row) for row in ids])  # of tokens 1 .. 47
    tokens = torch.arange(1, 4 * LENGTH)
    for first, loss, count in zip(*(found["positions"][key] for key in ("from", "loss", "tokens")), strict=True):
        chosen = (tokens >= first) & (tokens < 2 * first)
        assert count == SEQUENCES * int(chosen.sum())
        assert loss == pytest.approx(whole[:, chosen].mean().item(), rel=1e-6)
    assert sum(found["positions"]["tokens"]) == SEQUENCES * (4 * LENGTH - 1)
    for name, starts in (("1x", [0]), ("2x", [12]), ("4x", [24, 36])):
        windowed = [torch.cat([loss_of(model, row[s : s + 12]) for s in starts]) for row in ids]
        long = [torch.cat([losses[s : s + 11] for s in starts]) for losses in whole]
        check(found["factors"][name], long, windowed)
        assert found["factors"][name]["windowed"] == pytest.approx(torch.stack(windowed).mean().item(), rel=1e-6)
    assert found["factors"]["1x"]["delta"] == pytest.approx(0, abs=1e-6)
    assert abs(found["factors"]["4x"]["delta"]) > 1e-3


def test_what_cannot_be_measured_is_said():
    gpt2 = plain_model("gpt2", n_positions=30)
    assert position_limit(gpt2) == 30
    found = run(gpt2, ["length"])["length"]
    assert found["missing"] == ["the model has 30 positions, so longer contexts were not measured"]
    assert list(found["factors"]) == ["1x", "2x"]
    assert position_limit(plain_model("llama")) is None

    mistral = plain_model("mistral", sliding_window=5)
    found = run(mistral, ["eviction"])["eviction"]
    assert "first_key" not in found
    assert "sliding_window = 5" in found["missing"][0]

    short = run(plain_model("llama"), list(INSTRUMENTS), ids=[torch.arange(1)])
    assert all(any("no sequence of at least 2 tokens" in line for line in table["missing"]) for table in short.values())
    single = run(plain_model("llama"), ["eviction"], ids=some_ids(rows=1), sequences=1)["eviction"]
    assert single["first_key"]["stderr"] is None
    assert difference([], []) == {"loss": None, "delta": None, "stderr": None}


def test_names():
    assert parse_instruments("all") == list(INSTRUMENTS)
    assert parse_instruments(None) == []
    assert parse_instruments(["length", "all"]) == ["length", "eviction", "quantisation"]
    with pytest.raises(ValueError, match="did you mean 'eviction'"):
        parse_instruments(["evicton"])


def test_evaluate_keeps_earlier_results_and_prints_the_instruments(tmp_path):
    folder = save_checkpoint(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(some_documents(12)), encoding="utf-8")
    given = {"perplexity": {"text": text}, "device": "cpu", "output": tmp_path / "out.json", "length": 16}
    first = evaluate(folder, instruments=["eviction"], sequences=2, **given)
    assert list(first["instruments"]) == ["eviction"]
    assert first["tasks"] == {}
    second = evaluate(folder, instruments=["length", "quantisation"], sequences=2, **given)
    assert set(second["instruments"]) == set(INSTRUMENTS)
    assert second["instruments"]["eviction"] == first["instruments"]["eviction"]
    assert json.loads((tmp_path / "out.json").read_text()) == second
    lines = format_evaluation(folder, second)
    for words in ("first key evicted after 64 tokens", "weights int4 per channel", "4x of the training length"):
        assert words in lines
    assert tiny_tokenizer().eos_token in second["perplexity"]["text"]["protocol"]["first_token_after"]
    with pytest.raises(ValueError, match="sequences must be an integer of at least 1"):
        evaluate(folder, instruments="all", sequences=0, **given)
    with pytest.raises(ValueError, match="None means held-out text"):
        evaluate(folder, instruments="all")
