"""The trained model is written completely or not at all."""

from __future__ import annotations

import os
import stat
from types import SimpleNamespace

import pytest

from affine_attention.lab.data import train_tokenizer
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.final_model import save_model
from tests.hf.models import make_model


def fake_trainer(model):
    return SimpleNamespace(
        model=model,
        is_world_process_zero=lambda: True,
        state=SimpleNamespace(global_step=7),
        watch=SimpleNamespace(seconds=1.5),
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None),
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three"] * 3, 280)


def test_the_model_and_its_tokenizer_are_written(tmp_path, tokenizer):
    run = RunFolder(tmp_path)
    save_model(fake_trainer(make_model("llama")), run, tokenizer)
    assert run.finished
    assert (run.model / "tokenizer.json").is_file()
    mask = os.umask(0)
    os.umask(mask)
    for path in run.model.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path
    assert run.events()[-1]["event"] == "finish"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "model"]


def test_a_failed_write_leaves_no_model(tmp_path, tokenizer, monkeypatch):
    run, model = RunFolder(tmp_path), make_model("llama")

    def fail(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="the model could not be written"):
        save_model(fake_trainer(model), run, tokenizer)
    assert not run.finished
    assert list(tmp_path.iterdir()) == []
