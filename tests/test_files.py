"""Files that may be hostile are read within bounds; files that are written are new ones, whole or absent."""

from __future__ import annotations

import lzma
import os
import stat

import pytest

from affine_attention.files import (
    open_for_appending,
    read_bytes,
    read_json,
    read_lines,
    read_table,
    replacing,
    write_text,
)


def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path):
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
def test_what_is_no_json_is_one_sentence_with_the_file(content, words, tmp_path):
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


def test_a_file_has_a_largest_size_plain_or_unpacked(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="at most 100 bytes"):
        read_bytes(tmp_path / "a", 100)
    assert len(read_bytes(tmp_path / "a", 101)) == 101
    bomb = lzma.compress(bytes(50 * 2**20))
    assert len(bomb) < 10_000
    (tmp_path / "b.xz").write_bytes(bomb)
    with pytest.raises(ValueError, match="when it is unpacked"):
        read_bytes(tmp_path / "b", 2**20)
    (tmp_path / "c.xz").write_bytes(bomb[:500])
    with pytest.raises(ValueError, match="cannot be unpacked"):
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
    """As root, `affine report -o /dev/null` would put a file in the place of the device."""
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


def test_lines_are_not_added_to_what_a_link_leads_to(tmp_path):
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="got a link"):
        open_for_appending(tmp_path / "events.jsonl")
    assert not (tmp_path / "elsewhere").exists()
