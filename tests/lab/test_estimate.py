"""Estimates against measurements: parameters, counted operations, tensors that autograd stores."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from affine_attention.hf import attach, student
from affine_attention.lab import estimate
from affine_attention.lab.estimate import (
    PUBLISHED,
    activation_bytes,
    count_parameters,
    describe_run,
    forward_flops_per_token,
    make_utilisation,
    memory_bytes,
    meta_student,
    meta_teacher,
    peak_flops,
    training_flops_per_token,
)
from affine_attention.lab.recipe import Recipe
from affine_attention.recipes import recipe
from tests.hf.models import make_model, plain_model


@pytest.mark.parametrize(
    ("name", "mechanism", "millions"),
    [
        ("qwen1.5-0.5b", "affine", 0.393),
        ("llama-3.2-1b", "affine", 1.049),
        ("llama-3.2-3b", "affine", 2.064),
        ("llama-3.2-1b", "gated", 67.109),
        ("llama-3.2-3b", "affine_gated", 266.306),
        ("llama-3.2-1b", "softmax", 0.0),
    ],
)
def test_the_mechanism_adds_what_the_paper_says(name, mechanism, millions):
    counted = count_parameters(student(name, mechanism, device="meta"))
    assert counted.mechanism / 1e6 == pytest.approx(millions, abs=5e-4)


def test_shapes_have_the_parameters_of_the_model():
    for changes in ({}, {"tie_word_embeddings": False}):
        real = count_parameters(student("llama-1m", "affine_gated", **changes))
        assert real == count_parameters(student("llama-1m", "affine_gated", device="meta", **changes))
        heads = 1 if not changes else 2
        assert real.embedding == heads * 2048 * 128
        assert real.total == real.embedding + real.non_embedding


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen1.5-1.8B", 1.837), ("meta-llama/Llama-3.2-3B", 3.213), ("meta-llama/Llama-3.1-8B", 8.030)],
)
def test_the_papers_teachers(name, billions):
    """The sizes that their model cards name."""
    assert name in PUBLISHED
    assert count_parameters(meta_teacher(name)).total / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_operations_are_those_that_a_counter_counts(family):
    model, batch, length = plain_model(family), 2, 32
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(batch, length, dtype=torch.long))
    # The counter sees dense attention, of which the causal half is work.
    masked = batch * 2 * (2 * 4 * 8 * length**2)  # layers, heads, head dim
    ours = batch * length * forward_flops_per_token(model, length)
    assert ours + masked == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_training_is_three_forwards_and_the_teachers_one():
    model, teacher = plain_model("llama"), plain_model("gpt2")
    own, theirs = (forward_flops_per_token(m, 64) for m in (model, teacher))
    assert training_flops_per_token(model, 64) == 3 * own
    assert training_flops_per_token(model, 64, teacher) == 3 * own + theirs
    weights = sum(p.numel() for p in model.parameters()) - 64 * 32 - 5 * 32  # no look-up, no norms
    assert own == 2 * weights + 2 * 2 * 4 * 8 * 64


def test_a_mixture_counts_the_experts_that_run():
    few, many = (plain_model("mixtral", num_experts_per_tok=n) for n in (1, 2))
    expert = 3 * 32 * 48
    assert forward_flops_per_token(many, 8) - forward_flops_per_token(few, 8) == 2 * 2 * expert


def test_peaks(monkeypatch):
    assert peak_flops("cpu") is None
    for name, expected in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops("cuda") == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Something 9000")
    assert peak_flops("cuda") is None


def test_utilisation_is_the_share_of_the_peak(monkeypatch):
    model = plain_model("llama")
    assert make_utilisation(model, 64, "cpu")(1e6) is None
    monkeypatch.setattr(estimate, "peak_flops", lambda device: 1e12)
    speed = 0.4 * 1e12 * 2 / training_flops_per_token(model, 64)
    assert make_utilisation(model, 64, "cuda", ranks=2)(speed) == pytest.approx(0.4)
    assert make_utilisation(model, 64, "cuda", ranks=2, teacher=model)(speed) == pytest.approx(0.4 * 4 / 3)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("mechanism", ["softmax", "affine"])
def test_activations_are_estimated_within_a_third(half, mechanism):
    """Against the bytes that autograd stores without weights; two depths, so that only the layers count."""
    kept = []
    for layers in (2, 4):
        model = student("llama-1m", mechanism, num_hidden_layers=layers).train()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found: dict[int, int] = {}

        def keep(x, found=found, weights=weights):
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights and x.numel() > 128 * 344:
                found[storage.data_ptr()] = storage.nbytes()
            return x

        tokens = torch.ones(4, 128, dtype=torch.long)
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
            torch.autocast("cpu", torch.bfloat16, enabled=half),
        ):
            out = model.model(tokens, use_cache=False).last_hidden_state
        kept.append(sum(found.values()))
        del out
    per_token = (kept[1] - kept[0]) / 2 / tokens.numel()
    assert activation_bytes(model.config, half) == pytest.approx(per_token, rel=0.34)


def test_memory_of_a_run():
    plan = recipe("paper_1b", "affine")
    model, teacher = meta_student(plan), meta_teacher(plan.teacher)
    memory = memory_bytes(model, plan, 8, teacher)
    total = count_parameters(model).total
    assert memory["weights"] == memory["gradients"] == 4 * total
    assert memory["AdamW"] == 8 * total
    assert memory["teacher"] > 2 * 3.2e9
    lean = memory_bytes(model, plan.with_settings({"gradient_checkpointing": True}), 8, teacher)
    assert lean["activations"] < 0.25 * memory["activations"]
    logits = 8 * 2048 * 128256 * 2
    assert memory["loss"] < 0.6 * 2 * logits


def test_the_description_names_the_cost():
    text = describe_run(recipe("paper_1b", "affine"), ranks=8)
    for part in (
        "1.237B", "1.049M of the mechanism", "18.874B = 9000 steps x 1024 sequences x 2048",
        "8 ranks x 16 micro-batches x 8 sequences", "teacher: 3.213B parameters", "with FSDP2", "learning_rate = 0.001",
    ):  # fmt: skip
        assert part in text, part
    assert "is not on this machine" in describe_run(Recipe(teacher="nobody/nothing"))
    assert "teacher:" not in describe_run(Recipe())
    with pytest.raises(ValueError) as error:
        describe_run(Recipe(), ranks=3)
    assert "3 ranks" in str(error.value)


def test_students_of_folders(tmp_path):
    attached, plain = make_model("llama", "affine"), plain_model("llama")
    for model, name in ((attached, "attached"), (plain, "plain")):
        model.save_pretrained(tmp_path / name)
        found = meta_student(Recipe(student=str(tmp_path / name), mechanism="affine"))
        assert count_parameters(found).total == count_parameters(attached).total
        assert all(p.device.type == "meta" for p in found.parameters())
    attach(plain, "gated")
    assert count_parameters(plain).mechanism == 2 * 32 * 32
