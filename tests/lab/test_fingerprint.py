"""A changed bit anywhere in the weights is another model."""

from __future__ import annotations

import os

import torch

from affine_attention.lab import fingerprint
from affine_attention.lab.fingerprint import fingerprint_folder, fingerprint_model, fingerprint_source, hash_file_once
from tests.hf.models import plain_model


def test_every_byte_of_a_folder_counts(tmp_path):
    plain_model("llama").save_pretrained(tmp_path)
    whole = fingerprint_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for place in (len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert fingerprint_folder(tmp_path) != whole
    file.write_bytes(content)
    assert fingerprint_folder(tmp_path) == whole == fingerprint_source(tmp_path)
    assert fingerprint_source("somebody/model") is None


def test_the_middle_of_a_large_file_of_weights_counts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    content = bytearray(3 * 2**20)
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    whole = fingerprint_folder(tmp_path)
    content[len(content) // 2] = 1
    file.write_bytes(content)
    assert fingerprint_folder(tmp_path) != whole


def test_every_value_of_a_model_counts():
    model = plain_model("llama")
    whole = fingerprint_model(model)
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert fingerprint_model(model) != whole


def test_a_file_is_read_once_unless_it_changed(tmp_path, monkeypatch):
    path, read = tmp_path / "a", []
    path.write_text("one")
    monkeypatch.setattr(fingerprint, "SETTLED", -1.0)
    monkeypatch.setattr(fingerprint, "hash_file", lambda path: read.append(path) or path.read_text())
    assert [hash_file_once(path) for _ in range(3)] == ["one"] * 3
    assert len(read) == 1
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert hash_file_once(path) == "two"
