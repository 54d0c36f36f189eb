"""The examples run and say what they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attach_train", "with the same logits, bit for bit"),
        ("convert_pretrained", "attached: the same logits, bit for bit"),
        ("generate_text", "'static'} - the same tokens as alone"),
    ],
)
def test_example(name, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert words in capsys.readouterr().out
