"""Printed text cannot move the cursor, reverse a line or hide a word."""

from __future__ import annotations

import pytest

from affine_attention.cli import main
from affine_attention.lab.training.progress import Progress
from affine_attention.visible import printable, visible

HOSTILE = "\x1b[2J\x1b]0;title\x07\u202etxt.exe\u200b\u2066\x9b31m\x00"


@pytest.mark.parametrize("letter", HOSTILE.replace("txt.exe", "").replace("[2J", "").replace("]0;title", ""))
def test_control_characters_are_escaped(letter):
    shown = visible(f"a{letter}b")
    assert letter not in shown or (letter.isascii() and letter.isprintable())


def test_lines_stay_lines_and_long_text_is_cut():
    assert printable("one\ntwo\tthree") == "one\ntwo⇥three"
    assert visible("one\ntwo") == "one↵two"
    assert len(printable("x" * 10**6)) < 21_000
    assert "(1,000,000 characters)" in printable("x" * 10**6)
    assert visible("👩\u200d🚀 ü") == "👩\u200d🚀 ü"


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--data", f"no{HOSTILE.replace(chr(0), '')}.txt", "--device", "cpu"],
        ["report", f"no{HOSTILE.replace(chr(0), '')}"],
        ["gradients", f"no{HOSTILE.replace(chr(0), '')}"],
        ["train", "--recipe", f"no{HOSTILE}"],
        ["train", "--set", f"name=no{HOSTILE}"],
    ],
)
def test_no_command_prints_control_characters(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    said = capsys.readouterr()
    assert not any((ord(letter) < 32 and letter != "\n") or letter in "\u202e\u200b\u2066\x9b" for letter in said.err)


def test_progress_prints_no_control_characters(capsys):
    Progress(1, False).say(f"skipped {HOSTILE}")
    assert "\x1b" not in capsys.readouterr().err
