"""What is printed cannot move a cursor, turn a line around or hide a word."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from affine_attention.cli import main
from affine_attention.lab.training.progress import Progress
from affine_attention.visible import printable, visible

HOSTILE = "\x1b[2J\x1b]0;title\x07\u202etxt.exe\u200b\u2066\x9b31m\x00"


@pytest.mark.parametrize("letter", HOSTILE.replace("txt.exe", "").replace("[2J", "").replace("]0;title", ""))
def test_every_acting_character_is_spelled_out(letter):
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
        ["report", "no\nsuch run: all is well"],
        ["train", "--data", "no\nsuch file"],
        ["train", f"unknown{HOSTILE}"],
        ["report", "run", f"--{HOSTILE}=1"],
    ],
)
def test_no_command_prints_control_characters(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(command)
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    assert code == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 or said.err.startswith("usage")
    assert not any((ord(letter) < 32 and letter != "\n") or letter in "\u202e\u200b\u2066\x9b" for letter in said.err)


def test_warnings_and_logs_print_no_control_characters(monkeypatch, capfd):
    def command(options):
        sys.stderr.write(warnings.formatwarning(f"replaced {HOSTILE}", UserWarning, "file.py", 1, ""))  # as it is shown
        logging.getLogger("library").warning("read %s", HOSTILE)

    monkeypatch.setattr("affine_attention.cli._recipes", command)
    handler = logging.StreamHandler()
    logging.getLogger("library").addHandler(handler)
    assert main(["recipes"]) == 0
    logging.getLogger("library").removeHandler(handler)
    said = capfd.readouterr().err
    assert said.count("U+202E") == 2
    assert not set(said) & {"\x1b", "\u202e"}
    assert logging.getLogRecordFactory() is logging.LogRecord, "as it was before the command"


def test_progress_prints_no_control_characters(capsys):
    Progress(1, False).say(f"skipped {HOSTILE}")
    assert "\x1b" not in capsys.readouterr().err
