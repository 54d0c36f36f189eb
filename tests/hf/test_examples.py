"""The transformers examples run and print the expected result."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attach_train", "with bitwise equal logits"),
        ("convert_pretrained", "attached: logits are bitwise equal"),
        ("generate_text", "'static'} - the same tokens as single"),
    ],
)
def test_example(name, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert words in capsys.readouterr().out
