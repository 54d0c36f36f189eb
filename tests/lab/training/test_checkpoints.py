"""A checkpoint is complete or absent; the newest valid one is found, and the others are reported."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
from contextlib import contextmanager

import pytest
import torch

from affine_attention.lab.training.checkpoints import MANIFEST, CheckpointError, Checkpoints, check_disk_space

OURS = {"recipe": "a", "data": "b"}


def make(folder, keep=2, identity=OURS):
    return Checkpoints(folder / "checkpoints", keep, identity)


def write(checkpoints: Checkpoints, step: int, size: int = 100) -> None:
    with checkpoints.writing(step) as draft:
        (draft.path / "config.json").write_text("{}")
        draft.add_existing_files()
        draft.write_tensors("model.safetensors", [("x", torch.full((size,), float(step)))], lambda tensor: tensor)
        draft.write_json("training.json", {"step": step})


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_checkpoint_has_its_hashes_and_the_newest_is_found(tmp_path):
    checkpoints = make(tmp_path)
    assert checkpoints.newest() == (None, [])
    for step in (5, 10):
        write(checkpoints, step)
    assert checkpoints.newest() == (checkpoints.path(10), [])
    manifest = json.loads((checkpoints.path(10) / MANIFEST).read_text())
    assert manifest["step"] == 10
    assert set(manifest["files"]) == {"config.json", "model.safetensors", "training.json"}
    assert all(len(entry["sha256"]) == 64 and entry["bytes"] > 0 for entry in manifest["files"].values())


def test_only_the_newest_stay(tmp_path):
    checkpoints = make(tmp_path)
    for step in (5, 10, 15, 20):
        write(checkpoints, step)
    assert names(checkpoints) == ["step-00000015", "step-00000020"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "model.safetensors has": lambda path: cut(path / "model.safetensors"),
    "model.safetensors is damaged: its sha256": lambda path: flip(path / "model.safetensors"),
    "missing training.json": lambda path: (path / "training.json").unlink(),
    "missing MANIFEST.json": lambda path: (path / MANIFEST).unlink(),
    "MANIFEST.json is damaged": lambda path: cut(path / MANIFEST),
    "not in the manifest: more.pt": lambda path: (path / "more.pt").touch(),
    "its manifest is for step 15": lambda path: path.rename(path.with_name("step-00000016")),
    "missing config.json": lambda path: (path / "config.json").unlink(),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_reason(reason, tmp_path):
    checkpoints = make(tmp_path)
    for step in (10, 15):
        write(checkpoints, step)
    DAMAGES[reason](checkpoints.path(15))
    newest, skipped = checkpoints.newest()
    assert newest == checkpoints.path(10)
    assert len(skipped) == 1
    assert reason in skipped[0]
    assert skipped[0].startswith("step-0000001")


def test_a_checkpoint_of_another_run_is_skipped(tmp_path):
    write(make(tmp_path, identity=OURS | {"recipe": "other"}), 5)
    newest, skipped = make(tmp_path).newest()
    assert newest is None
    assert skipped == ["step-00000005: it belongs to another run (recipe differ)"]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path):
    checkpoints = make(tmp_path)
    write(checkpoints, 5)
    flip(checkpoints.path(5) / "model.safetensors")
    write(checkpoints, 5)
    assert checkpoints.newest() == (checkpoints.path(5), [])
    assert names(checkpoints) == ["step-00000005"]


def test_an_error_inside_leaves_nothing_behind(tmp_path):
    checkpoints = make(tmp_path)
    write(checkpoints, 5)
    with pytest.raises(TypeError), checkpoints.writing(10) as draft:
        draft.write_json("training.json", {"what": object()})
    assert names(checkpoints) == ["step-00000005"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    checkpoints = make(tmp_path)
    write(checkpoints, 5)
    (checkpoints.folder / ".tmp-step-00000010-77").mkdir()
    (checkpoints.folder / ".tmp-step-00000010-77" / "model.safetensors").write_bytes(b"half")
    assert checkpoints.newest() == (checkpoints.path(5), [])
    assert checkpoints.clean() == [".tmp-step-00000010-77"]
    assert names(checkpoints) == ["step-00000005"]


@contextmanager
def small_disk(path, size):
    """A real file system of so many bytes."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_keeps_the_last_checkpoint_and_reports_free_space(tmp_path):
    with small_disk(tmp_path / "disk", 2**20) as disk:
        checkpoints = make(disk)
        write(checkpoints, 5, size=100_000)  # 400 kB: the third does not fit, and nothing is removed before it does
        write(checkpoints, 10, size=100_000)
        with pytest.raises(CheckpointError) as error:
            write(checkpoints, 15, size=100_000)
        assert error.value.errno == errno.ENOSPC
        for words in ("checkpoint of step 15", str(checkpoints.path(15)), "bytes free", str(checkpoints.path(10))):
            assert words in str(error.value)
        assert names(checkpoints) == ["step-00000005", "step-00000010"]
        assert checkpoints.newest() == (checkpoints.path(10), [])


def test_a_file_that_may_not_grow_is_the_same(tmp_path):
    checkpoints = make(tmp_path)
    write(checkpoints, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            write(checkpoints, 10, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert names(checkpoints) == ["step-00000005"]


def test_too_little_disk_space_is_reported_before_the_first_step(tmp_path):
    check_disk_space(tmp_path / "not" / "there", 1, "nothing")
    with pytest.raises(OSError) as error:
        check_disk_space(tmp_path / "not" / "there", 2**60, "3 checkpoints")
    for words in ("not/there", "bytes free", f"{2**60:,}", "3 checkpoints", "keep_checkpoints"):
        assert words in str(error.value)
