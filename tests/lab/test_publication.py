"""A finished run becomes a folder that loads, with a model card that the Hub's library parses; bad input is refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from affine_attention.cli import main
from affine_attention.files import write_json
from affine_attention.lab.publication import publish
from tests.lab.training.runs import Place


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with results."""
    place = Place(tmp_path_factory.mktemp("published"))
    path = place.run()
    perplexity = {"heldout": {"token": 12.5, "word": 80.25, "byte": 2.5, "tokens": 1000, "words": 500, "documents": 9}}
    tasks = {"piqa": {"metric": "acc_norm", "value": 0.61, "stderr": 0.01, "n": 1838}}
    write_json(path / "evaluation.json", {"schema": 1, "made": {}, "perplexity": perplexity, "tasks": tasks})
    return path


def copy_of(run, folder):
    shutil.copytree(run, folder)
    return folder


def test_the_folder_loads_and_its_card_states_what_was_done(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["publish", str(run), "--out", str(out), "--license", "cc-by-4.0"]) == 0
    assert capsys.readouterr().out.strip().endswith(str(out))
    weights = (out / "model.safetensors").read_bytes()
    assert weights == (run / "model" / "model.safetensors").read_bytes()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert torch.isfinite(model(**tokenizer("a word", return_tensors="pt")).logits).all()

    text = (out / "README.md").read_text()
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["affine-attention", "affine"]
    results = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert results == {("heldout", "perplexity"): 12.5, ("piqa", "acc_norm"): 0.61}
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["data"]["fingerprint"] in text
    for words in ("| learning_rate | 0.01 |", "| bias_length | 32 |", "| piqa | acc_norm | 0.6100 |", "12.500",
                  "`cc-by-4.0`"):  # fmt: skip
        assert words in text, words
    assert str(run.parent) not in text, "a path of the machine"
    assert "| data | " in text
    assert "text.txt" in text


def test_untrusted_names_cannot_break_the_card(run, tmp_path):
    bad = copy_of(run, tmp_path / "run")
    evil = '"]\n---\n<script>alert(1)</script> | [click](https://evil.example) \u202eabc: {x}'
    evaluation = {"perplexity": {evil: {"token": 3.0}}, "tasks": {evil: {"metric": evil, "value": 0.5}}}
    write_json(bad / "evaluation.json", evaluation)
    manifest = json.loads((bad / "manifest.json").read_text())
    manifest["data"]["sources"] = [{"name": evil, "bytes": 5, "sha256": evil}, "not a table"]
    manifest["versions"] = {"affine_attention": evil}
    write_json(bad / "manifest.json", manifest)
    out = publish(bad, tmp_path / "out", license="mit")
    text = (out / "README.md").read_text()
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "mit"
    assert len(card.data.eval_results) == 2
    body = text.split("\n---\n", 1)[1]
    assert "<script" not in body
    assert "\u202e" not in text
    assert not re.search(r"(?<!\\)\[click", body)
    assert body.count("\n---\n") == 0


def test_a_run_without_results_says_how_to_measure_them(run, tmp_path):
    bare = copy_of(run, tmp_path / "run")
    (bare / "evaluation.json").unlink()
    out = publish(bare, tmp_path / "out", license="apache-2.0")
    card = ModelCard.load(out / "README.md")
    assert card.data.eval_results is None
    assert "affine evaluate RUN" in card.text


def refusal(capsys, *arguments):
    assert main(["publish", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_wrong_input_is_refused_before_anything_is_written(run, tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--out", out, "--license", "mit")
    assert "license must be an identifier" in refusal(capsys, run, "--out", out, "--license", "MIT License")
    assert "is not a folder" in refusal(capsys, tmp_path / "none", *options)
    assert "does not hold a run" in refusal(capsys, tmp_path, *options)
    assert "already exists" in refusal(capsys, run, "--out", run, "--license", "mit")

    unfinished = copy_of(run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "model")
    assert "holds no finished model" in refusal(capsys, unfinished, *options)

    pickled = copy_of(run, tmp_path / "pickled")
    (pickled / "model" / "extra.bin").write_bytes(b"x")
    assert "extra.bin is no part of a model" in refusal(capsys, pickled, *options)

    linked = copy_of(run, tmp_path / "linked")
    (linked / "model" / "secret.txt").symlink_to("/etc/hostname")
    assert "secret.txt is no part of a model" in refusal(capsys, linked, *options)

    cut = copy_of(run, tmp_path / "cut")
    weights = cut / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded" in refusal(capsys, cut, *options)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
