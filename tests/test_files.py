"""Untrusted files are read within limits; files are written atomically."""

from __future__ import annotations

import json
import lzma
import math
import os
import stat

import pytest
import torch

from affine_attention.files import (
    creating_folder,
    open_for_appending,
    read_bytes,
    read_json,
    read_lines,
    read_table,
    replacing,
    write_json,
    write_text,
)


def test_a_pipe_or_a_device_is_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    for path in (tmp_path / "manifest.json", tmp_path.joinpath("/dev/zero")):
        with pytest.raises(ValueError, match="must be a regular file"):
            read_bytes(path)
    with pytest.raises(IsADirectoryError, match="got a folder"):
        read_bytes(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1', "line 1: Expecting ',' delimiter"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"1" * 10_000, "digits"),
        (b"", "line 1"),
    ],
)
def test_invalid_json_is_one_sentence_with_the_file(content, words, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_json(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_json_of_another_kind_is_named(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got a list"):
        read_table(tmp_path / "a.json")
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 must be a JSON object, got a list"):
        list(read_lines(tmp_path / "log.jsonl"))


def test_files_have_a_size_limit_plain_or_decompressed(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="at most 100 bytes"):
        read_bytes(tmp_path / "a", 100)
    assert len(read_bytes(tmp_path / "a", 101)) == 101
    bomb = lzma.compress(bytes(50 * 2**20))
    assert len(bomb) < 10_000
    (tmp_path / "b.xz").write_bytes(bomb)
    with pytest.raises(ValueError, match="bytes decompressed"):
        read_bytes(tmp_path / "b", 2**20)
    (tmp_path / "c.xz").write_bytes(bomb[:500])
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read_bytes(tmp_path / "c")


def test_a_temporary_file_follows_no_link(tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    for name in (f".report.html.{os.getpid()}.tmp", ".report.html.tmp"):
        (tmp_path / name).symlink_to(target)
    write_text(tmp_path / "report.html", "page")
    assert target.read_text() == "keep"
    assert (tmp_path / "report.html").read_text() == "page"


def test_only_a_regular_file_is_replaced_or_added_to(tmp_path):
    """As root, `affine report -o /dev/null` would replace the device by a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(ValueError, match="must be a regular file"):
            write_text(tmp_path / name, "page")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(ValueError, match="must be a regular file"):
        open_for_appending(tmp_path / "pipe")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(TypeError), replacing(tmp_path / "a") as file:
        file.writelines([b"half", None])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_links_are_not_followed_when_appending(tmp_path):
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="got a link"):
        open_for_appending(tmp_path / "events.jsonl")
    assert not (tmp_path / "elsewhere").exists()


def test_json_is_strict_and_written_atomically(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": math.nan, "b": [math.inf, 1.5], "c": torch.tensor([1.0, 2.0]), "d": tmp_path})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 1.5],
        "c": [1.0, 2.0],
        "d": str(tmp_path),
    }
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    write_json(path.with_name("text.json"), {"token": "\ud83d \x00 </script>"})
    assert read_json(path.with_name("text.json")) == {"token": "? \x00 </script>"}
    path.with_name("text.json").unlink()
    assert read_json(path)["b"] == [None, 1.5], "the old file stays when the new one cannot be written"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_an_incomplete_line_is_not_a_step(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError) as error:
        list(read_lines(path))
    assert "line 2" in str(error.value)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "folder"
    with creating_folder(target) as folder:
        (folder / "a.txt").write_text("a")
        (folder / "a.txt").chmod(0o600)
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["folder"]
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE((target / "a.txt").stat().st_mode) == 0o666 & ~mask

    with pytest.raises(FileExistsError, match="already exists"), creating_folder(target):
        raise AssertionError("not reached")

    def interrupted():
        with creating_folder(tmp_path / "other") as folder:
            (folder / "b.txt").write_text("b")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(FileExistsError), creating_folder(tmp_path / "other") as folder:
        (tmp_path / "other").mkdir()  # by another process
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "other"]
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(FileExistsError), creating_folder(tmp_path / "link"):
        raise AssertionError("not reached")
