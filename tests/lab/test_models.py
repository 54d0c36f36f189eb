"""Run folders and checkpoint folders lead to the same model."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.models import find_model, load, parse_dtype
from tests.hf.models import make_model


def test_a_run_and_its_checkpoint_are_found(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "run" / "model")
    folder, run = find_model(tmp_path / "run")
    assert folder == tmp_path / "run" / "model"
    assert run.path == tmp_path / "run"
    assert find_model(folder) == (folder, None)
    model, tokenizer = load(folder, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert tokenizer is None


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        find_model(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds no finished model"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match="autocast must be one of float32, bfloat16"):
        parse_dtype("autocast", "bf16")
    assert parse_dtype("dtype", None) is None
