"""The paper's students have the published shapes and parameter counts; smaller models have the size in their name."""

from __future__ import annotations

import pytest
import torch

from affine_attention import Mechanism
from affine_attention.hf import STUDENTS, student
from affine_attention.nn import PRESETS

from .models import make_tokens, mechanisms

# Parameters of the published checkpoints, and what mechanisms add in the paper's tables (in millions).
PUBLISHED = {"qwen1.5-0.5b": 463_987_712, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824}
ADDED = {
    ("qwen1.5-0.5b", "affine"): 0.393, ("llama-3.2-1b", "affine"): 1.049, ("llama-3.2-3b", "affine"): 2.064,
    ("llama-3.2-1b", "gated"): 67.109, ("llama-3.2-3b", "gated"): 264.241,
    ("llama-3.2-1b", "affine_gated"): 68.157, ("llama-3.2-3b", "affine_gated"): 266.306,
}  # fmt: skip


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_shapes(name):
    model = student(name, "softmax", device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert count(model) == PUBLISHED[name]
    config = model.config
    shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
             config.intermediate_size, config.vocab_size, config.tie_word_embeddings)  # fmt: skip
    assert (
        shape
        == {
            "qwen1.5-0.5b": (1024, 24, 16, 16, 2816, 151936, True),
            "llama-3.2-1b": (2048, 16, 32, 8, 8192, 128256, True),
            "llama-3.2-3b": (3072, 28, 24, 8, 8192, 128256, True),
        }[name]
    )
    assert {layer.head_dim for layer in mechanisms(model)} == {128 if name == "llama-3.2-3b" else 64}


@pytest.mark.parametrize(("name", "mechanism"), ADDED)
def test_the_papers_extra_parameters(name, mechanism):
    added = count(student(name, mechanism, device="meta")) - PUBLISHED[name]
    assert round(added / 1e6, 3) == ADDED[name, mechanism]


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-1m", 1), ("llama-10m", 10), ("llama-30m", 30), ("llama-100m", 100)]
)
def test_small_models_have_the_size_in_their_name(name, millions):
    assert 0.85 < count(student(name, "softmax", device="meta")) / (millions * 1e6) < 1.15


@pytest.mark.parametrize("mechanism", PRESETS)
def test_a_small_model_learns(mechanism):
    torch.manual_seed(0)
    model = student("llama-1m", Mechanism.named(mechanism, running_alpha_start=0.5), vocab_size=64, num_hidden_layers=2)
    assert model.training
    tokens = make_tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(6):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_dtype_and_start():
    model = student("llama-1m", "affine_gated", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    layer = mechanisms(model)[0]
    assert layer.scale.running_alpha.dtype == torch.float32
    assert torch.equal(layer.scale.running_alpha, torch.zeros(4))
    assert abs(layer.gate_proj.weight.float().std() - 0.02) < 0.002
    assert set(STUDENTS) >= set(PUBLISHED)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: student("llama-3b", "affine"), "name must be one of"),
        (lambda: student("llama-3.2-1", "affine"), "did you mean 'llama-3.2-1b'?"),
        (lambda: student("llama-1m", "afine"), "did you mean 'affine'?"),
        (lambda: student("llama-1m", "affine", vocab=3), "changes must be settings of AffineLlamaConfig, got 'vocab'"),
    ],
)
def test_invalid_calls_raise_clear_errors(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)
