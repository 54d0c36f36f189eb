"""Training with checkpointing, accumulation, autocast, compilation and packing keeps the running average exact."""

from __future__ import annotations

import copy

import pytest
import torch

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import interface, masks
from affine_attention.hf.masks import read_mask
from tests.training_loop import train_on_sums

from .models import make_model, make_tokens, mechanisms, running_alphas
from .test_masks import packed_positions, padded_rows

STEPS = 2
FRESH = Mechanism.named("affine_gated", bias_length=8, running_alpha_start=0.3)


@pytest.fixture(autouse=True)
def _new_graphs():
    torch._dynamo.reset()


def make_student(family="llama", **changes):
    return make_model(family, FRESH, **changes).train()


def summed_loss(model, tokens, mask=None, **inputs):
    """Sums over real tokens, so that the losses of micro-batches add up to that of the batch."""
    logits = model(tokens, attention_mask=mask, use_cache=False, **inputs).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.sum() if mask is None else (losses * mask[:, 1:].flatten()).sum()


def train(model, batches, call=None, **inputs):
    def loss_of(_, tokens, mask):
        return summed_loss(model if call is None else call, tokens, mask, **inputs)

    return train_on_sums(model, model, batches, loss_of, steps=STEPS, rate=1e-3)


def assert_same_state(left, right, exact=True):
    assert left.state_dict().keys() == right.state_dict().keys()
    for name, x in left.state_dict().items():
        if exact:
            assert torch.equal(x, right.state_dict()[name]), name
        else:
            torch.testing.assert_close(x, right.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    plain = make_student(family)
    checked = copy.deepcopy(plain)
    checked.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batches = [padded_rows("left")]
    assert train(plain, batches) == train(checked, batches)
    assert torch.equal(running_alphas(plain), running_alphas(checked))
    # With reentrant checkpoints PyTorch sums the gradients of a shared input in a different order.
    assert_same_state(plain, checked, exact=not reentrant)


def test_checkpointing_of_packed_documents():
    plain = make_student()
    checked = copy.deepcopy(plain)
    checked.gradient_checkpointing_enable()
    batches = [(make_tokens(), None)]
    assert train(plain, batches, position_ids=packed_positions()) == train(
        checked, batches, position_ids=packed_positions()
    )
    assert_same_state(plain, checked)


def test_micro_batches_equal_one_batch():
    whole = make_student()
    split = copy.deepcopy(whole)
    tokens, mask = padded_rows("left")
    train(whole, [(tokens, mask)])
    train(split, [(tokens[i : i + 1], mask[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(running_alphas(split), running_alphas(whole), rtol=1e-6, atol=1e-7)
    assert_same_state(whole, split, exact=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_enter_the_average(side):
    padded = make_student()
    unpadded = copy.deepcopy(padded)
    tokens, mask = padded_rows(side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    summed_loss(padded, tokens, mask, position_ids=positions).backward()
    for row in range(3):
        real = tokens[row, mask[row].bool()][None]
        (unpadded(real).logits.sum() * 0).backward()
    for model in (padded, unpadded):
        commit_running_alpha(model)
    torch.testing.assert_close(running_alphas(padded), running_alphas(unpadded), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_dense_mask_does_not_enter_the_average(side):
    by_columns = make_student()
    by_pairs = copy.deepcopy(by_columns)
    tokens, mask = padded_rows(side)
    pairs = mask.bool()[:, None, None, :] & torch.ones(12, 12, dtype=torch.bool).tril()
    for model, given in ((by_columns, mask), (by_pairs, pairs)):
        logits = model(tokens, attention_mask=given, use_cache=False).logits
        (logits[mask.bool()].sum() * 0).backward()
        commit_running_alpha(model)
    torch.testing.assert_close(running_alphas(by_pairs), running_alphas(by_columns), rtol=1e-6, atol=1e-7)


def test_autocast_trains_and_keeps_the_average_in_fp32():
    model = make_student()
    exact = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_loss(model, make_tokens())
    loss.backward()
    commit_running_alpha(model)
    expected = summed_loss(exact, make_tokens())
    expected.backward()
    commit_running_alpha(exact)
    assert abs(loss.item() / expected.item() - 1) < 0.02
    assert running_alphas(model).dtype == torch.float32
    torch.testing.assert_close(running_alphas(model), running_alphas(exact), rtol=0.02, atol=0.005)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


def forbid_masks(monkeypatch, allow_segments=False):
    """Fails if a dense mask is created, or if a mask (or segments, unless allowed) reaches a layer."""

    def spy(mask, query, key, is_causal, segments):
        assert mask is None, f"a mask {tuple(mask.shape)} reached a layer"
        assert allow_segments or segments is None
        return read_mask(mask, query, key, is_causal, segments)

    monkeypatch.setattr(interface, "read_mask", spy)
    monkeypatch.setattr(masks, "sdpa_mask", lambda **_: pytest.fail("a dense mask was created"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi3"])
def test_whole_model_compiles_without_a_break_and_without_a_mask(family, monkeypatch):
    eager = make_student(family)
    traced = copy.deepcopy(eager)
    forbid_masks(monkeypatch)
    call = torch.compile(traced, fullgraph=True, backend="aot_eager")
    batches = [(make_tokens(), None)]
    assert train(traced, batches, call) == pytest.approx(train(eager, batches), rel=1e-6)
    assert_same_state(eager, traced, exact=False)
    torch.testing.assert_close(running_alphas(traced), running_alphas(eager), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["padded", "packed", "checkpointed"])
def test_compiled_training_with_padding_packing_and_checkpoints(kind, monkeypatch):
    eager = make_student()
    traced = copy.deepcopy(eager)
    monkeypatch.setattr(masks, "sdpa_mask", lambda **_: pytest.fail("a dense mask was created"))
    batches, inputs = [(make_tokens(), None)], {}
    if kind == "padded":
        batches = [padded_rows("left")]
    if kind == "packed":
        inputs = {"position_ids": packed_positions()}
    if kind == "checkpointed":
        traced.gradient_checkpointing_enable()
    call = torch.compile(traced, fullgraph=True, backend="aot_eager")
    assert train(traced, batches, call, **inputs) == pytest.approx(train(eager, batches, **inputs), rel=1e-6)
    assert_same_state(eager, traced, exact=False)


def test_layers_compile_one_by_one(monkeypatch):
    from accelerate.utils import compile_regions

    eager = make_student()
    traced = copy.deepcopy(eager)
    forbid_masks(monkeypatch)
    call = compile_regions(traced, fullgraph=True, backend="aot_eager")
    batches = [(make_tokens(), None)]
    assert train(call, batches) == pytest.approx(train(eager, batches), rel=1e-6)
    torch.testing.assert_close(running_alphas(call), running_alphas(eager), rtol=1e-6, atol=1e-7)


def test_one_dynamic_graph_serves_every_length():
    model = make_student(num_hidden_layers=1)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    call = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for length in (9, 12, 20):
        tokens = make_tokens(2, length)
        torch.testing.assert_close(call(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
        if length == 9:
            first = len(graphs)
    assert len(graphs) == first


@pytest.mark.slow
def test_inductor_trains_the_same():
    eager = make_student()
    traced = copy.deepcopy(eager)
    batches = [(make_tokens(), None)]
    call = torch.compile(traced, fullgraph=True)
    assert train(traced, batches, call) == pytest.approx(train(eager, batches), rel=1e-5)
    assert_same_state(eager, traced, exact=False)


def test_every_parameter_of_a_mechanism_learns():
    for name in ("sink", "gated", "affine", "affine_gated", "head_gated", "affine_no_bias"):
        model = make_model(mechanism=name).train()
        summed_loss(model, make_tokens()).backward()
        for layer in mechanisms(model):
            assert all(p.grad.abs().sum() > 0 for p in layer.parameters()), name
