"""Tuned tile sizes are used for their GPU and Triton version only, and damaged files are errors."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")
from affine_attention.ops.fused.shared import tile_sizes, tuned
from affine_attention.ops.fused.shared.tile_sizes import Config

CUDA = torch.device("cuda", 0)
WIDE = Config(32, 128, 8, 1)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A stub with the name and capability of a GPU, which determine the sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AFFINE_TUNED", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4 / 80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    tuned._tuned.cache_clear()
    yield "NVIDIA A100-SXM4 / 80GB"
    tuned._tuned.cache_clear()


def chosen(kernel="forward", head_dim=64, dtype=torch.bfloat16, device=CUDA):
    return tuned.chosen_config(kernel, head_dim, dtype, device)


def test_without_a_file_the_shipped_sizes_are_used(gpu):
    assert chosen() == tile_sizes.UNIVERSAL["forward", 2, 64]


def test_saved_sizes_are_used_where_they_belong(gpu, tmp_path, monkeypatch):
    path = tuned.save(gpu, {("forward", 2, 128): WIDE}, {"length": 2048})
    assert path.parent == tmp_path / "affine_attention" / "tuned"
    assert chosen(head_dim=96) == chosen(head_dim=128, dtype=torch.float16) == WIDE
    assert chosen(head_dim=64) == tile_sizes.UNIVERSAL["forward", 2, 64]
    assert chosen("key_grads", 128) == tile_sizes.UNIVERSAL["key_grads", 2, 128]
    assert chosen(head_dim=128, dtype=torch.float32) == tile_sizes.UNIVERSAL["forward", 4, 128]
    assert chosen(head_dim=128, device=torch.device("cpu")) == tile_sizes.INTERPRETER["forward"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another GPU")
    tuned._tuned.cache_clear()
    assert chosen(head_dim=128) == tile_sizes.UNIVERSAL["forward", 2, 128]


def test_another_version_of_triton_has_its_own_file(gpu, monkeypatch):
    tuned.save(gpu, {("forward", 2, 64): WIDE}, {})
    monkeypatch.setattr(tuned.triton, "__version__", "99.0.0")
    tuned._tuned.cache_clear()
    assert chosen() == tile_sizes.UNIVERSAL["forward", 2, 64]


def test_new_sizes_are_added_to_the_file(gpu):
    tuned.save(gpu, {("forward", 2, 64): WIDE}, {})
    assert chosen() == WIDE
    tuned.save(gpu, {("causal", 2, 64): Config(64, 128, 4, 2, 168)}, {})
    assert chosen() == WIDE
    assert chosen("causal") == Config(64, 128, 4, 2, 168)


def test_the_file_can_be_ignored(gpu, monkeypatch):
    tuned.save(gpu, {("forward", 2, 64): WIDE}, {})
    monkeypatch.setenv("AFFINE_TUNED", "0")
    tuned._tuned.cache_clear()
    assert chosen() == tile_sizes.UNIVERSAL["forward", 2, 64]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda text: text[:-10], "Expecting"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema 2"),
        (lambda text: text.replace('"block_m": 32', '"block_m": 48'), "powers of two"),
        (lambda text: text.replace('"num_warps": 8', '"num_warps": "8"'), "num_warps = '8'"),
        (lambda text: text.replace('"kernel": "forward"', '"kernel": "sideways"'), "unknown kernel"),
        (lambda text: text.replace("num_stages", "stages"), "num_stages"),
        (lambda text: "[]", "list"),
    ],
)
def test_a_damaged_file_is_named_with_a_fix(gpu, change, word):
    path = tuned.save(gpu, {("forward", 2, 64): WIDE}, {})
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match="run `affine tune` again") as error:
        chosen()
    assert word in str(error.value)
    assert str(path) in str(error.value)


def test_the_file_records_how_it_was_made(gpu):
    path = tuned.save(gpu, {("forward", 2, 64): WIDE}, {"length": 123})
    content = json.loads(path.read_text())
    assert content["gpu"] == gpu
    assert content["length"] == 123
    assert not list(path.parent.glob(".*"))
