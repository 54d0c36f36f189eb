"""The command line: output, exit codes, and one run through all commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from affine_attention.cli import main

TINY = ["steps=4", "warmup_steps=1", "decay_steps=1", "global_batch=2", "sequence_length=32", "probe_every=2"]


def settings(*more: str) -> list[str]:
    return [part for text in (*TINY, *more) for part in ("--set", text)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text("\n\n".join(f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 20 for n in range(60)))
    return path


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    options = [
        "train",
        "--data",
        str(text),
        "--mechanism",
        "affine",
        "--out",
        str(folder),
        "--quiet",
        "--device",
        "cpu",
    ]
    small = settings("heldout=0.2", "vocabulary_size=300", "student_changes.num_hidden_layers=1")
    assert main([*options, *small, "--set", "student_changes.vocab_size=300"]) == 0
    return folder


def test_train_evaluate_inspect_report(run, text, tmp_path, capsys):
    assert main(["evaluate", str(run), "--perplexity", f"own={text}", "--limit", "3", "--device", "cpu"]) == 0
    assert "own" in capsys.readouterr().out
    assert main(["inspect", str(run), "--sequences", "2", "--length", "32", "--device", "cpu"]) == 0
    inspected = capsys.readouterr().out
    assert all(words in inspected for words in ("row sum", "sink rate", "largest activation", "spread of alpha"))
    few = ["--instruments", "all", "--sequences", "2", "--device", "cpu"]
    assert main(["evaluate", str(run), *few]) == 0
    assert "first key evicted after 64 tokens" in capsys.readouterr().out
    assert main(["gradients", str(run)]) == 0
    assert "4 gradient norms" in capsys.readouterr().out
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert "Content-Security-Policy" in (tmp_path / "page.html").read_text()
    assert main(["report", str(run), "-o", str(tmp_path / "page.html"), "--markdown", str(tmp_path / "page.md")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "page.html"), str(tmp_path / "page.md")]
    assert "### Table 1: mechanisms compared" in (tmp_path / "page.md").read_text()


def test_the_folder_holds_what_a_reader_needs(run):
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["attention"]["implementation"] == "composed"
    assert manifest["versions"]["torch"]
    assert manifest["data"]["fingerprint"]
    assert len((run / "log.jsonl").read_text().splitlines()) == 4


def test_convert_prints_what_changed(tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    options = ["--mechanism", "affine", "--set", "bias_length=4096", "--out", str(tmp_path / "new"), "--device", "cpu"]
    assert main(["convert", str(tmp_path / "plain"), *options]) == 0
    text = capsys.readouterr().out
    assert "+256," in text
    assert (
        "output projections multiplied by 2: model.layers.0.self_attn.o_proj .. model.layers.1.self_attn.o_proj" in text
    )
    assert "on 256 tokens of random ids" in text
    assert (
        json.loads((tmp_path / "new" / "config.json").read_text())["affine_attention"]["mechanism"]["bias_length"]
        == 4096
    )


def test_a_dry_run_starts_nothing(tmp_path, capsys):
    assert main(["train", "--recipe", "paper_1b", "--out", str(tmp_path / "x"), "--dry-run", "--ranks", "8"]) == 0
    text = capsys.readouterr().out
    assert "learning_rate = 0.001" in text
    assert "1.049M of the mechanism" in text
    assert "18.874B" in text
    assert not (tmp_path / "x").exists()
    assert main(["study", "--plan", "--mechanisms", "softmax,affine", "--seeds", "0,1"]) == 0
    assert "4 students" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--recipe", "paper_1B"], "did you mean 'paper_1b'?"),
        (["train", "--mechanism", "afine"], "did you mean 'affine'?"),
        (["train", "--set", "stepz=3"], "did you mean 'steps'?"),
        (["train", "--set", "steps"], "a setting is written key=value, got 'steps'"),
        (["train", "--recipe", "paper_1b", "--ranks", "7", "--dry-run"], "is not divisible by 7 ranks"),
        (["train", "--data", "nowhere.txt", "--device", "cpu"], "nowhere.txt does not exist"),
        (["evaluate", "nowhere"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["convert", "not/a/checkpoint", "--out", "new"], "checkpoint 'not/a/checkpoint' does not exist"),
        (["convert", ".", "--out", "new"], "checkpoint '.' has no config.json"),
        (["convert", ".", "--out", "."], ". already exists and is not overwritten"),
        (["convert", ".", "--out", "new", "--mechanism", "sink"], "a sink reduces the weight of every key"),
        (["convert", ".", "--out", "new", "--set", "bias_lenght=7"], "did you mean 'bias_length'?"),
        (["evaluate", "nowhere", "--instruments", "evicton"], "did you mean 'eviction'?"),
        (["study", "--instruments", "evicton"], "did you mean 'eviction'?"),
        (["train", "--recipe", "convert_gpu", "--device", "cpu", "--set", "student=lama-1m"], "OWNER/NAME on the hub"),
        (["train", "--set", "sink_pressure=first"], "sink_pressure must be one of 'first_key', 'window' or none"),
        (["gradients", "nowhere"], "nowhere"),
        (["study", "--mechanisms", "softmax,afine"], "did you mean 'affine'?"),
        (["study", "--seeds", "one"], "a seed must be an integer, got 'one'"),
        (["train", "--device", "nope"], 'device must be "cpu" or "cuda", got \'nope\''),
        (["train", "--data", "", "--device", "cpu"], "data must not contain an empty string"),
        (["train", "--teacher", "", "--device", "cpu"], "teacher must not be an empty string"),
        (["train", "--set", "name=../../x"], "name must be printable, without / "),
        (["train", "--data", "/dev/zero", "--device", "cpu"], "/dev/zero must be a file or a folder"),
        (["train", "--data", "~nobody-has-this/x", "--device", "cpu"], "has an unknown home folder"),
        (["train", "--device", "cpu", "--set", "student_changes.vocab_size=1000000000"], "GiB of memory"),
        (["train", "--device", "cpu", "--set", "student_changes.num_hidden_layers=1000000000"], "at most 4,096"),
        (["train", "--device", "cpu", "--set", "student_changes.num_attention_heads=0"], "cannot be built with"),
        (["train", "--device", "cpu", "--set", "vocabulary_size=1000000000"], "vocabulary_size must be at most"),
        (["train", "--set", "steps=1" + "0" * 400], "steps must be"),
        (["train", *["--set", "steps=1"] * 1001], "--set may be given at most 1000 times, got 1,001"),
        (["train", "--ranks", "0", "--dry-run"], "ranks must be at least 1, got 0"),
        (["evaluate", "nowhere", "--batch-size", "0"], "batch_size must be None or an integer of at least 1, got 0"),
        (["evaluate", "nowhere", "--perplexity", "c4="], "--perplexity must name a file"),
        (["study", "--mechanisms", "affine+student=a b,affine+student=a_b"], "would both use"),
        pytest.param(
            ["tune"],
            "tuning needs a CUDA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_errors_are_one_line_that_explains_what_to_do(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AFFINE_TRACEBACK", raising=False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith(f"affine {arguments[0]}: ")
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == [], "nothing is left behind"


def test_recipes_lists_every_setting(capsys):
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("paper_3b", "affine_no_bias", "decay_type", "truncate_vocabulary"))


def test_it_is_a_module_and_a_script():
    done = subprocess.run([sys.executable, "-m", "affine_attention", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("affine_attention ")
    script = os.path.join(os.path.dirname(sys.executable), "affine")
    if os.path.exists(script):
        assert subprocess.run([script, "--version"], capture_output=True, text=True).stdout == done.stdout


@pytest.mark.parametrize("option", ["--out", "--cache"])
def test_an_empty_path_is_not_the_working_directory(option, capsys):
    with pytest.raises(SystemExit):
        main(["train", option, ""])
    assert "must not be an empty string" in capsys.readouterr().err


def test_an_unexpected_error_is_one_line_too(monkeypatch, capsys):
    monkeypatch.delenv("AFFINE_TRACEBACK", raising=False)
    monkeypatch.setattr("affine_attention.recipes.RECIPES", None)
    assert main(["recipes"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("affine recipes: AttributeError: ")
    assert len(error.splitlines()) == 1


def test_the_cache_is_shown_and_emptied(tmp_path, capsys):
    entry = tmp_path / f"tokens-{'a' * 24}"
    entry.mkdir()
    (entry / "ids").write_bytes(bytes(10**7))
    (tmp_path / "mine").touch()
    assert main(["cache", "--cache", str(tmp_path)]) == 0
    assert "1 entries, 0.01 GB of 200" in capsys.readouterr().out
    assert main(["cache", "--cache", str(tmp_path), "--clear"]) == 0
    assert "0.01 GB freed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_train_takes_a_cache(text, tmp_path, capsys):
    settings = ["steps=1", "warmup_steps=0", "decay_steps=0", "global_batch=1", "sequence_length=32"]
    given = [part for setting in settings for part in ("--set", setting)]
    cache = tmp_path / "cache"
    assert main(["train", "--data", str(text), "--out", str(tmp_path / "run"), "--device", "cpu", "--cache",
                 str(cache), "--quiet", *given]) == 0  # fmt: skip
    assert [path.name[:7] for path in sorted(cache.iterdir()) if path.is_dir()] == ["tokeniz", "tokens-"]
