"""A converted checkpoint computes what the original computes, its gates learn, and nothing is left after an error."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import affine_attention.hf  # noqa: F401  registers the checkpoint type
from affine_attention import Mechanism
from affine_attention.lab import conversion
from affine_attention.lab.conversion import convert
from affine_attention.lab.inspection.capture import mechanism_layers
from affine_attention.nn import commit_running_alpha
from tests.hf.models import plain_model
from tests.lab.evaluation.models import tiny_tokenizer

VOCABULARY = 640


def save(folder, family="llama", tokenizer=True, dtype=torch.float32, **changes):
    model = plain_model(family, dtype, **({"vocab_size": VOCABULARY} | changes))
    model.save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return model


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_logits_are_equal_and_the_gates_learn(tmp_path, family):
    plain = save(tmp_path / "plain", family, **({"attn_pdrop": 0.1} if family == "gpt2" else {}))
    found = convert(tmp_path / "plain", tmp_path / "affine", "affine", device="cpu")
    assert found.check.passed
    assert found.check.text.endswith("embedded:gutenberg")
    assert found.check.tokens == 256
    assert found.parameters - found.parameters_before == 2 * 32 * 4  # layers x width x heads
    assert found.factor == 2
    assert len(found.projections) == 2
    assert f"{found.parameters:,}" in str(found)
    assert found.dropout == ({"attn_pdrop": 0.1} if family == "gpt2" else {})

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "affine")
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    assert listing(tmp_path) == ["affine", "plain"]
    assert "tokenizer.json" in listing(tmp_path / "affine")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    commit_running_alpha(model)
    for layer in mechanism_layers(model):
        assert layer.scale.proj.weight.abs().max() > 0
        assert torch.isfinite(layer.scale.proj.weight).all()
    with torch.no_grad():
        assert not torch.allclose(model.eval()(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("mechanism", ["softmax", "gated", "affine_gated", "head_gated"])
def test_every_mechanism_without_a_sink_in_bfloat16(tmp_path, mechanism):
    save(tmp_path / "plain", dtype=torch.bfloat16)
    found = convert(tmp_path / "plain", tmp_path / "out", mechanism, device="cpu")
    assert found.check.passed
    assert found.dtype == "bfloat16"
    assert found.factor == {"softmax": 1, "affine_gated": 4}.get(mechanism, 2)
    assert found.bytes - found.bytes_before >= 2 * (found.parameters - found.parameters_before)


def test_settings_of_the_mechanism_are_kept_and_a_checkpoint_without_a_tokenizer_is_compared_on_random_ids(tmp_path):
    save(tmp_path / "plain", tokenizer=False)
    mechanism = Mechanism.named("affine", activation="sigmoid", bias_length=4096)
    found = convert(tmp_path / "plain", tmp_path / "out", mechanism, tokens=10, device="cpu")
    assert found.check.text == "random ids"
    assert found.check.tokens == 10
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert mechanism_layers(model)[0].mechanism == mechanism


def test_a_wrong_conversion_is_found_and_not_written(tmp_path, monkeypatch):
    save(tmp_path / "plain")
    right = conversion.attach

    def wrong(model, mechanism, start):
        right(model, mechanism, start=start)
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight.mul_(1.001)

    monkeypatch.setattr(conversion, "attach", wrong)
    with pytest.raises(ValueError, match=r"was not written: the logits of the converted .* differ from the original"):
        convert(tmp_path / "plain", tmp_path / "out", device="cpu")
    assert listing(tmp_path) == ["plain"]


@pytest.mark.parametrize(
    ("family", "mechanism", "changes", "words"),
    [
        ("llama", "sink", {}, "start=\"identity\" does not work for 'sink'"),
        ("llama", "off_by_one", {}, "start=\"identity\" does not work for 'off_by_one'"),
        ("llama", "afine", {}, "did you mean 'affine'"),
    ],
)
def test_the_identity_does_not_exist(tmp_path, family, mechanism, changes, words):
    save(tmp_path / "plain", family, tokenizer=False, **changes)
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "plain", tmp_path / "out", mechanism)
    assert listing(tmp_path) == ["plain"]


def save_other(folder, family, **settings):
    import transformers

    config = transformers.AutoConfig.for_model(family, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("bitnet", SMALL, "normalises the output of attention before it is projected"),
        ("gpt_oss", SMALL | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
        ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "ALiBi"),
    ],
)
def test_families_without_an_identity_or_not_served_are_refused_with_the_reason(tmp_path, family, settings, words):
    save_other(tmp_path / "plain", family, **settings)
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "plain", tmp_path / "out")
    assert listing(tmp_path) == ["plain"]


def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(tmp_path):
    save(tmp_path / "plain")
    for name, damage, words in (
        ("truncated", lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:999]),
         "cannot be loaded"),
        ("missing", lambda f: save_file({k: v for k, v in load_file(f / "model.safetensors").items() if "q_proj" not in
                                         k}, f / "model.safetensors", {"format": "pt"}), "has no weights for"),
        ("config", lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        ("no config", lambda f: (f / "config.json").unlink(), "has no config.json"),
    ):  # fmt: skip
        folder = tmp_path / name
        shutil.copytree(tmp_path / "plain", folder)
        damage(folder)
        with pytest.raises(ValueError, match=words):
            convert(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(folder)
    assert listing(tmp_path) == ["plain"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert(tmp_path / "absent", tmp_path / "out")


def test_the_output_is_never_overwritten_and_needs_space(tmp_path, monkeypatch):
    save(tmp_path / "plain")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="already exists"):
        convert(tmp_path / "plain", tmp_path / "out")
    monkeypatch.setattr(conversion, "OTHER_FILES", 2**62)  # more than any disk
    with pytest.raises(OSError, match="bytes free, but the converted checkpoint needs"):
        convert(tmp_path / "plain", tmp_path / "new")
    assert listing(tmp_path) == ["out", "plain"]
    assert not any((tmp_path / "out").iterdir())


def test_a_converted_checkpoint_is_not_converted_twice(tmp_path):
    save(tmp_path / "plain", tokenizer=False)
    convert(tmp_path / "plain", tmp_path / "affine", tokens=4, device="cpu")
    with pytest.raises(ValueError, match=r"already has a mechanism \('affine'\)"):
        convert(tmp_path / "affine", tmp_path / "twice")
    with pytest.raises(ValueError, match="tokens must be an integer of at least 2"):
        convert(tmp_path / "plain", tmp_path / "twice", tokens=1)
    assert json.loads((tmp_path / "affine" / "config.json").read_text())["affine_attention"]["start"] == "identity"
