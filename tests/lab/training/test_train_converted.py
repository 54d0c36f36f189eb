"""Training that starts from a checkpoint: with the original as the teacher or without, resumed, and its errors."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from affine_attention.hf import detach, student
from affine_attention.lab.inspection.capture import mechanism_layers
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.student import check_checkpoint
from affine_attention.lab.training.train import train

from .runs import STUDENT, differences, tiny_recipe


@pytest.fixture(scope="module")
def original(place, tmp_path_factory):
    """A plain softmax checkpoint with a tokenizer."""
    run = train(tiny_recipe(place.text, "softmax", eval_every=0), tmp_path_factory.mktemp("original") / "run",
                device="cpu", quiet=True)  # fmt: skip
    folder = tmp_path_factory.mktemp("original") / "checkpoint"
    shutil.copytree(run / "model", folder)
    detach(AutoModelForCausalLM.from_pretrained(folder)).save_pretrained(folder)
    (folder / "modeling_affine_attention.py").unlink()
    return folder


def converted(place, original, mechanism="affine", **changes):
    settings = {"student": str(original), "student_changes": {}, "teacher": "original", "eval_every": 0}
    return tiny_recipe(place.text, mechanism, **(settings | changes))


def test_the_start_is_the_original_and_the_gates_learn(place, original, tmp_path):
    recipe = converted(place, original, learning_rate=1e-3)
    run = RunFolder(train(recipe, tmp_path / "run", device="cpu", quiet=True))
    log = run.log()
    assert log[0]["kd_loss"] == pytest.approx(0.0, abs=1e-6)  # the student starts as its teacher
    assert log[0]["running_alpha"] is not None
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert all(layer.scale.proj.weight.abs().max() > 0 for layer in mechanism_layers(model))
    manifest = run.manifest()
    assert manifest["student"] == manifest["teacher"] is not None
    assert json.loads((run.model / "tokenizer.json").read_text()) == json.loads(
        (original / "tokenizer.json").read_text()
    )


@pytest.mark.parametrize("mechanism", ["softmax", "affine"])
def test_a_resumed_conversion_is_bitwise_equal(place, original, tmp_path, mechanism):
    recipe = converted(place, original, mechanism, sink_pressure="first_key", teacher=None)
    whole = train(recipe, tmp_path / "whole", device="cpu", quiet=True)
    part = RunFolder(tmp_path / "part")
    shutil.copytree(whole, part.path)
    shutil.rmtree(part.model)
    shutil.rmtree(part.checkpoints / "step-00000006")
    train(recipe, part.path, device="cpu", quiet=True)
    assert differences(part.path, whole) == []
    losses = [line["loss"] for line in RunFolder(whole).log()]
    assert losses[0] < 5.5  # log(320) is 5.77: the original was trained a little


def test_a_resume_with_another_start_is_refused(place, original, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(original, start)
    recipe = converted(place, start, teacher=None)
    run = RunFolder(train(recipe, tmp_path / "run", device="cpu", quiet=True))
    shutil.rmtree(run.model)
    weights = load_file(start / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint of the student .* changed since"):
        train(recipe, run.path, device="cpu", quiet=True)
    manifest = run.manifest()
    del manifest["student"]  # a run that was made before it was recorded
    run.manifest_file.write_text(json.dumps(manifest))
    train(recipe, run.path, device="cpu", quiet=True)
    assert run.finished


def test_errors_come_before_any_data_is_read(place, original, tmp_path, monkeypatch):
    module = importlib.import_module("affine_attention.lab.training.train")
    monkeypatch.setattr(module, "prepare", lambda *_, **__: pytest.fail("data was read"))
    student("llama-1m", "softmax", **(STUDENT | {"vocab_size": 400})).save_pretrained(tmp_path / "other")
    same_size = tmp_path / "same"
    shutil.copytree(original, same_size)
    tokens = json.loads((same_size / "tokenizer.json").read_text())
    names = list(tokens["model"]["vocab"])
    a, b = names[300], names[301]
    vocabulary = tokens["model"]["vocab"]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (same_size / "tokenizer.json").write_text(json.dumps(tokens))
    bare = tmp_path / "bare"
    shutil.copytree(original, bare)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    for changes, words in (
        ({"teacher": str(tmp_path / "other")}, "vocabulary size 320 differs from the teacher's 400; use a teacher"),
        ({"teacher": str(same_size)}, "2 of the student's tokens have another id"),
        ({"student": str(bare), "teacher": None}, "has no tokenizer in its folder"),
        ({"student": "llama-1m", "student_changes": STUDENT}, "starts with random weights"),
        ({"student": str(tmp_path / "absent")}, "student must be one of"),
        ({"student": "lama-1m"}, "did you mean 'llama-1m'"),
        ({"student_changes": {"hidden_size": 64}}, "student_changes must be empty for a student from a checkpoint"),
        ({"sequence_length": 10_000, "teacher": str(original)}, "exceeds the 8192 positions of the teacher"),
    ):
        with pytest.raises(ValueError, match=words):
            train(converted(place, original, **changes), tmp_path / "run", device="cpu", quiet=True)
        assert not (tmp_path / "run").exists()


def test_a_name_on_the_hub_is_not_taken_for_a_typing_error():
    check_checkpoint(Recipe(student="owner/name"))
    for source in ("owner", "a/b/c", "./a", "/a", "~/a"):
        with pytest.raises(ValueError, match="or OWNER/NAME on the hub"):
            check_checkpoint(Recipe(student=source))
