"""The Bigram-Backcopy example: its sequences follow the definition, its measures agree with direct computation."""

from __future__ import annotations

import sys

import pytest
import torch

from affine_attention.lab.inspection.capture import watch
from examples.bigram_backcopy import __main__ as command
from examples.bigram_backcopy.measure import attention_map, measure
from examples.bigram_backcopy.model import Setting, make_model, token_losses, train
from examples.bigram_backcopy.task import CHARACTERS, TRIGGERS, make_task

SMALL = Setting(layers=2, width=16, length=24, batch=8, steps=6)


@pytest.fixture(scope="module")
def task():
    return make_task()


def test_a_trigger_is_followed_by_the_token_before_it(task):
    tokens = task.sample(4000, 40, seed=1)
    assert (tokens[:, 0] == task.start).all()
    assert (tokens[:, 1:] < CHARACTERS).all()
    trigger = task.is_trigger(tokens)
    assert not trigger[:, 1].any()
    for position in range(2, 40):
        rows = trigger[:, position]
        assert rows.any()
        assert torch.equal(tokens[rows, position + 1], tokens[rows, position - 1])


def test_other_tokens_follow_the_bigrams(task):
    tokens = task.sample(8000, 40, seed=2)
    current, label = tokens[:, 1:-1], tokens[:, 2:]
    drawn = ~task.is_trigger(current)
    counts = (
        torch.bincount((current * CHARACTERS + label)[drawn], minlength=CHARACTERS**2).view(CHARACTERS, -1).double()
    )
    expected = counts.sum(1, keepdim=True) * task.bigram
    large = expected > 10
    large[:TRIGGERS] = False
    # Standardised counts: standard deviation 1, and none of these few hundred beyond 5.
    deviation = ((counts - expected) / (expected * (1 - task.bigram)).sqrt())[large]
    assert len(deviation) > 200
    assert deviation.std().item() == pytest.approx(1, abs=0.15)
    assert deviation.abs().max() < 5
    assert counts[3:][task.bigram[3:] == 0].sum() == 0


def test_seeds_make_different_sequences_and_the_same_seed_the_same(task):
    assert torch.equal(task.sample(5, 20, seed=3), task.sample(5, 20, seed=3))
    assert not torch.equal(task.sample(5, 20, seed=3), task.sample(5, 20, seed=4))


def test_the_best_loss_is_the_entropy_of_the_labels(task):
    tokens = task.sample(50, 24, seed=5)
    best = task.best_loss(tokens)
    row, position = 7, 9
    current, label = tokens[row, position].item(), tokens[row, position + 1].item()
    expected = 0.0 if current < TRIGGERS else -task.bigram[current, label].log().item()
    assert best[row, position].item() == pytest.approx(expected, rel=1e-6)
    assert (best[task.is_trigger(tokens[:, :-1])] == 0).all()
    assert best.isfinite().all()


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine_gated"])
def test_the_measures_agree_with_direct_computation(task, mechanism):
    model = make_model(task, SMALL, mechanism, seed=0)
    train(model, task.sample(SMALL.batch * SMALL.steps, SMALL.length, seed=1), SMALL)
    tokens = task.sample(6, SMALL.length, seed=7)
    found = measure(model, task, tokens)
    calls = []
    with torch.no_grad(), watch(model, calls.append):
        losses = token_losses(model, tokens)
    trigger = task.is_trigger(tokens[:, :-1])
    for call, layer in zip(calls, found["layers"], strict=True):
        scores = (call.query @ call.key.transpose(-1, -2) * call.softmax_scale)[:, 0]
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
        part = scores.softmax(-1)
        powers = scores.exp()
        weights = powers / (powers.sum(-1, keepdim=True) + (0 if call.sink is None else call.sink.exp()))
        if call.alpha is not None:
            weights = call.alpha[:, 0, :, None] * weights + call.beta[:, 0, :, None]
        bigram = ~trigger[:, 1:]
        assert layer["first_softmax_bigram"] == pytest.approx(part[:, 1:, 0][bigram].mean().item(), rel=1e-4)
        assert layer["first_weight_bigram"] == pytest.approx(weights[:, 1:, 0][bigram].mean().item(), rel=1e-4)
        previous = torch.stack([weights[:, n, n - 1] for n in range(1, SMALL.length)], 1)
        assert layer["previous_weight_backcopy"] == pytest.approx(previous[~bigram].mean().item(), rel=1e-4)
        norms = call.value[:, 0].norm(dim=-1)
        assert layer["value_norm_first"] == pytest.approx((norms[:, 0].mean() / norms[:, 1:].mean()).item(), rel=1e-5)
        assert ("gate_bigram" in layer) == ("alpha_bigram" in layer) == (mechanism == "affine_gated")
    assert found["loss_backcopy"] == pytest.approx(losses[:, 1:][trigger[:, 1:]].mean().item(), rel=1e-5)
    drawn = attention_map(model, tokens[:1, :10])
    assert len(drawn["layers"]) == SMALL.layers
    assert len(drawn["layers"][0]["weights"]) == 10


def test_hiding_the_first_key_changes_nothing_if_no_query_looks_at_it(task):
    model = make_model(task, SMALL, "softmax", seed=0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.o_proj.weight.zero_()
    found = measure(model, task, task.sample(4, SMALL.length, seed=7))
    assert found["loss_backcopy_evicted"] == found["loss_backcopy"]
    assert found["loss_bigram_excess_evicted"] == found["loss_bigram_excess"]


def test_mechanisms_share_their_initial_weights(task):
    softmax, affine = (make_model(task, SMALL, name, seed=3).state_dict() for name in ("softmax", "affine_gated"))
    assert set(softmax) < set(affine)
    assert all(torch.equal(softmax[name], affine[name]) for name in softmax)


def test_the_command_prints_a_table_and_refuses_an_unknown_mechanism(monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # the tests keep their own
    monkeypatch.setattr(sys, "argv", ["bigram_backcopy", "--steps", "30", "--mechanisms", "softmax", "affine"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("softmax", "affine"))}
    assert rows["softmax"][3] == rows["softmax"][4], "without alpha, beta and sink the weights are the softmax"
    assert float(rows["affine"][4]) < float(rows["affine"][3])
    monkeypatch.setattr(sys, "argv", ["bigram_backcopy", "--mechanisms", "softmax", "afine"])
    with pytest.raises(ValueError, match=r"mechanism must be one of .*, got 'afine'"):
        command.main()
    monkeypatch.setattr(sys, "argv", ["bigram_backcopy", "--mechanisms", "softmax", "signed_weights"])
    with pytest.raises(
        ValueError, match="must have softmax weights, whose part on <s> is measured, got 'signed_weights'"
    ):
        command.main()
    assert not capsys.readouterr().out
