"""Run folders and checkpoint folders lead to the same model."""

from __future__ import annotations

import pytest
import torch

from affine_attention.hf import attach, is_attached
from affine_attention.lab.models import find_model, load, parse_dtype, without_plain_mechanism
from tests.hf.models import make_model, plain_model


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


def test_plain_softmax_is_detached_and_any_other_mechanism_is_kept(tmp_path):
    tokens = torch.arange(12)[None]
    plain = plain_model("llama")
    expected = plain(tokens).logits
    attach(plain, "softmax").save_pretrained(tmp_path)
    model = without_plain_mechanism(load(tmp_path, device="cpu")[0])
    assert not is_attached(model)
    assert torch.equal(attach(model, "affine", start="identity")(tokens).logits, expected)
    assert without_plain_mechanism(model) is model
    assert is_attached(model)
    assert not is_attached(without_plain_mechanism(plain_model("llama")))
