"""Saving and loading: bitwise equal with and without importing our package, and never silently plain softmax."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import attach, classes, detach
from affine_attention.hf.classes import MODULE_NAME
from affine_attention.nn import PRESETS

from .models import FAMILIES, NO_HEAD_DIM, SHAPE, make_model, make_tokens, mechanisms, plain_model, running_alphas

SETTINGS = {"bias_length": 77, "momentum": 0.8}


def assert_same(left, right):
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(x, b[name]) for name, x in a.items())
    assert torch.equal(left(make_tokens()).logits, right(make_tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_round_trips_bitwise(family, tmp_path):
    model = make_model(family, Mechanism.named("affine_gated", **SETTINGS))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert type(loaded) is type(model)
    assert mechanisms(loaded)[0].mechanism == mechanisms(model)[0].mechanism
    assert_same(loaded, model)


@pytest.mark.parametrize("mechanism", PRESETS)
@pytest.mark.parametrize("start", ["fresh", "identity"])
def test_every_mechanism_round_trips_and_continues_training(mechanism, start, tmp_path):
    if start == "identity" and PRESETS[mechanism].identity_scale is None:
        with pytest.raises(ValueError, match="does not work for"):
            make_model("llama", mechanism, start=start)
        return
    model = make_model("llama", Mechanism.named(mechanism, **SETTINGS), start=start)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded, model)
    for each in (loaded, model):
        each.train()
        each(make_tokens(), labels=make_tokens()).loss.backward()
        commit_running_alpha(each)
    for (name, x), y in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(x.grad, y.grad), name
    assert_same(loaded, model)
    if PRESETS[mechanism].has_running_alpha:
        assert (running_alphas(loaded) != 0).all()
    detach(loaded)


def test_the_folder_holds_safetensors_settings_and_one_line_of_code(tmp_path):
    make_model().save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", f"{MODULE_NAME}.py"}
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == "affine_attention"
    assert settings["base_model_type"] == "llama"
    assert Mechanism.from_dict(settings["affine_attention"]["mechanism"]).name == "affine"
    assert len((tmp_path / f"{MODULE_NAME}.py").read_text().splitlines()) == 1


def run_python(code: str, folder) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=environment, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_it_loads_without_our_import_when_remote_code_is_trusted(tmp_path):
    model = make_model("qwen3", "affine_gated")
    model.save_pretrained(tmp_path)
    torch.save(model(make_tokens()).logits, tmp_path / "logits.pt")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
assert "affine_attention" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
assert torch.equal(model(tokens).logits, torch.load(sys.argv[1] + "/logits.pt"))
model.save_pretrained(sys.argv[1] + "/again")
print(type(model).__name__, model.generate(tokens, max_new_tokens=2, do_sample=False).shape)
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "AffineQwen3ForCausalLM torch.Size([2, 14])" in done.stdout
    again = {path.name for path in (tmp_path / "again").iterdir()}
    assert again == {"config.json", "generation_config.json", "model.safetensors", f"{MODULE_NAME}.py"}
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


@pytest.mark.parametrize("loader", ["AutoModelForCausalLM", "AutoConfig", "LlamaForCausalLM", "AutoModel"])
def test_plain_loading_fails_instead_of_running_softmax(loader, tmp_path):
    make_model().save_pretrained(tmp_path)
    call = f"{loader}.from_pretrained(sys.argv[1], trust_remote_code=False)"
    done = run_python(f"import sys; from transformers import {loader}; {call}; print('LOADED')", tmp_path)
    assert "LOADED" not in done.stdout
    assert "Error" in done.stderr
    assert "affine_attention" in done.stderr or "trust_remote_code" in done.stderr


def test_a_plain_class_that_loads_the_folder_cannot_run(tmp_path):
    """With our package imported, the attention implementation is registered, but the model has no mechanism."""
    make_model().save_pretrained(tmp_path)
    plain = LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a model with a mechanism, got LlamaAttention without one"):
        plain(make_tokens())


@pytest.mark.parametrize(("how", "ours"), [("sdpa", "composed"), ("eager", "reference")])
def test_loading_with_a_name_of_transformers_chooses_an_implementation(how, ours, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=how)
    assert loaded.config._attn_implementation == f"affine_attention_{ours}"
    torch.testing.assert_close(loaded(make_tokens()).logits, model(make_tokens()).logits)
    with pytest.raises(ValueError, match="while a mechanism is attached, got 'flex_attention'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flex_attention")


def test_bf16_loading_keeps_the_average_in_fp32(tmp_path):
    model = make_model(mechanism="affine_gated")
    average = running_alphas(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(running_alphas(loaded), average)
    assert running_alphas(loaded).dtype == torch.float32
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    loaded.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert torch.equal(running_alphas(again), average)
    assert again.dtype == torch.bfloat16
    assert_same(again, loaded)


def test_a_config_without_its_mechanism_is_an_error(tmp_path):
    make_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    for broken, words in (
        ({"affine_attention": None}, "config.affine_attention must be"),
        ({"base_model_type": "nothing"}, "base_model_type must be a model type of transformers"),
        ({"affine_attention": {"mechanism": {"nam": "affine"}, "start": "fresh"}}, "did you mean 'name'?"),
    ):
        path.write_text(json.dumps(settings | broken))
        with pytest.raises(ValueError) as caught:
            AutoModelForCausalLM.from_pretrained(tmp_path)
        assert words in str(caught.value)


def test_other_heads_and_configs(tmp_path):
    from transformers import LlamaForSequenceClassification

    config = plain_model().config
    model = attach(LlamaForSequenceClassification(config), "affine").eval()
    model.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is type(model.config)
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same(loaded, model)
    assert type(AutoModel.from_config(read)).__name__ == "AffineLlamaModel"
    assert AutoModelForCausalLM.from_config(read).config.affine_attention == model.config.affine_attention


def test_names_are_made_on_demand():
    assert classes.AffineMistralForCausalLM is classes.AffineMistralForCausalLM
    with pytest.raises(AttributeError, match="has no attribute 'AffineNothing'"):
        classes.AffineNothing  # noqa: B018


# Families whose plain class converts weights (gpt_neox), has buffers that no checkpoint holds (falcon_h1), or kinds of
# layers with names of its own (lfm2).
CONVERTED = {
    "gpt_neox": FAMILIES["gpt_neox"],
    "falcon_h1": SHAPE | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
                          "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 1},
    "lfm2": NO_HEAD_DIM | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}  # fmt: skip


@pytest.mark.parametrize("family", CONVERTED)
def test_a_load_converts_and_fills_what_the_plain_class_does(family, tmp_path):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONVERTED[family])).eval()
    plain.save_pretrained(tmp_path / "plain")
    model = attach(AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval(), "affine_gated", start="identity")
    model.save_pretrained(tmp_path / "attached")
    expected = plain(make_tokens()).logits
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "attached"),
        type(model).from_pretrained(tmp_path / "plain", config=model.config),
    ):
        assert torch.equal(loaded.eval()(make_tokens()).logits, expected)
        buffers = dict(loaded.named_buffers())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffers[name], buffer), name
    assert not type(model).is_custom_code()
    assert not type(model.config).is_custom_code()


@pytest.mark.parametrize(("mechanism", "start"), [("affine_gated", "fresh"), ("affine", "identity"), ("sink", "fresh")])
def test_a_model_of_empty_memory_is_initialised(mechanism, start):
    """Built on meta, `to_empty`, `init_weights`: as trainers of large models do."""
    built = make_model("llama", mechanism, start=start)
    with torch.device("meta"):
        model = type(built)(built.config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan)
    model.init_weights()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.isnan().any(), name
    layer = mechanisms(model)[0]
    if layer.scale is not None:
        assert (running_alphas(model) == (0.5 if start == "identity" else 0.0)).all()
        assert (layer.scale.proj.weight.std() > 0) == (start == "fresh")
    model.train()(make_tokens(), labels=make_tokens()).loss.backward()
    commit_running_alpha(model)
    before = running_alphas(model) if layer.scale is not None else None
    model.init_weights()  # nothing is left to do
    assert before is None or torch.equal(running_alphas(model), before)
