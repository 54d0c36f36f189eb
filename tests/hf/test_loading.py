"""Every command that loads a folder runs none of its code, reads no pickle, and reports errors in one sentence."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from affine_attention.cli import main
from affine_attention.hf.loading import load_config, load_model, load_tokenizer_of

from .models import plain_model

COMMANDS = {
    "inspect": lambda folder, out: ["inspect", str(folder), "--text", str(out / "text.txt"), "--device", "cpu"],
    "evaluate": lambda folder, out: ["evaluate", str(folder), "--perplexity", str(out / "text.txt")],
    "train": lambda folder, out: ["train", "--set", f"student={folder}", "--out", str(out / "run"), "--device", "cpu"],
    "teacher": lambda folder, out: ["train", "--teacher", str(folder), "--out", str(out / "run"), "--device", "cpu"],
    "plan": lambda folder, out: ["train", "--set", f"student={folder}", "--dry-run"],
}


class TouchesFile:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def with_code(folder: Path, mark: Path) -> None:
    plain_model("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.OddModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(f"open({str(mark)!r}, 'w')\nclass Odd: pass\n")


def with_pickle(folder: Path, mark: Path) -> None:
    plain_model("llama").config.save_pretrained(folder)
    torch.save({"weight": TouchesFile(mark)}, folder / "pytorch_model.bin")


def with_tokenizer_code(folder: Path, mark: Path) -> None:
    plain_model("llama").save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}})
    )
    (folder / "odd.py").write_text(f"open({str(mark)!r}, 'w')\nclass Odd: pass\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("make", [with_code, with_pickle, with_tokenizer_code])
def test_code_of_a_folder_never_runs_even_if_the_user_agrees(make, command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    folder, mark = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    make(folder, mark)
    (tmp_path / "text.txt").write_text("a b c\n\nd e f\n" * 200)
    capsys.readouterr()
    code = main(COMMANDS[command](folder, tmp_path))
    said = capsys.readouterr().err
    assert not mark.exists()
    assert "Traceback" not in said
    if (make, command) not in ((with_pickle, "plan"), (with_tokenizer_code, "plan")):  # a plan reads the configuration
        assert code == 2
        assert len(said.strip().splitlines()) == 1


def damage_config(content: bytes):
    return lambda folder: (folder / "config.json").write_bytes(content)


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def wrong_header_length(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def change(**values):
    def changed(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return changed


DAMAGES = {
    "no JSON": damage_config(b"{"),
    "nested": damage_config(b"[" * 100_000),
    "a list": damage_config(b"[1]"),
    "no model type": damage_config(b"{}"),
    "a number as type": change(model_type=3),
    "unknown type": change(model_type="nobody"),
    "zero heads": change(num_attention_heads=0),
    "text as width": change(hidden_size="wide"),
    "a negative vocabulary": change(vocab_size=-1),
    "another width": change(hidden_size=64),
    "ten million layers": change(num_hidden_layers=10**7),
    "a nested JSON of generation": lambda folder: (folder / "generation_config.json").write_bytes(b"[" * 100_000),
    "a truncated file": cut_weights,
    "a header with a wrong length": wrong_header_length,
    "an empty file": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "a pipe": pipe,
    "an adapter": lambda folder: (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_gives_a_one_sentence_error(damage, tmp_path):
    plain_model("llama").save_pretrained(tmp_path)
    DAMAGES[damage](tmp_path)
    with pytest.raises(ValueError) as error:
        load_model(tmp_path, "student")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_names_of_weights_are_printed_without_control_characters(tmp_path, capfd, caplog):
    plain_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"x\x1b[2J\u202eevil": torch.zeros(1)}, file, metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text("a b c\n\nd e f\n" * 200)
    capfd.readouterr()
    main(["inspect", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--device", "cpu"])
    said = "".join(capfd.readouterr()) + caplog.text
    assert "evil" in said
    assert not set(said) & {"\x1b", "\u202e"}


def test_a_whole_folder_loads(tmp_path):
    model = plain_model("llama")
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path)  # as the folder of a run
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert load_config(tmp_path).hidden_size == model.config.hidden_size
    assert load_tokenizer_of(tmp_path) is None
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="got an empty name"):
            load_model(empty, "teacher")
