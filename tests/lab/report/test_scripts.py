"""What the page's buttons copy and save is text for a spreadsheet and for Markdown, not formulas and markup.

Runs two functions of the page's script in node, where there is one; test_chromium.py has the whole page.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from affine_attention.lab import report
from affine_attention.lab.report.markdown import inline

SCRIPT = (Path(report.__file__).parent / "chart.js").read_text(encoding="utf-8")
FORMULAS = [
    "=1+1",
    "+cmd|x",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    " =1",
    "＝1+1",
    "＋1",
    "－1+2",
    "＠x",
    "\u200b=1",
    "﹦1",
]
NUMBERS = ["-1.5", "+2", "−3.25", "1,234", "-1.5 ± 0.2", "12%", "-1e-5"]
TEXTS = [
    "a|b", "`code`", "*bold*", "_it_", "a_b", "[x](javascript:1)", "<img src=x onerror=1>", "a & b", "~~x~~", "\\x",
    "https://x.y", "see www.x.y", "$x$", "![x](y)", "mailto:a@b.c", "plain text 1.5",
]  # fmt: skip


def call(function: str, values: list[str]) -> list[str]:
    if shutil.which("node") is None:
        pytest.skip("needs node to run the page's script")
    source = re.search(rf"^function {function}\(.*?^}}", SCRIPT, re.DOTALL | re.MULTILINE)
    assert source is not None
    code = f"{source[0]}\nconsole.log(JSON.stringify({json.dumps(values)}.map({function})))"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_cells_that_begin_like_a_formula_get_an_apostrophe():
    assert call("plainCell", FORMULAS) == [f"'{text}" for text in FORMULAS]
    assert call("plainCell", NUMBERS) == [text.replace("−", "-") for text in NUMBERS]
    assert call("plainCell", ["affine", "a=b", ""]) == ["affine", "a=b", ""]


def test_the_button_and_the_export_escape_equally():
    shown = call("markdownCell", TEXTS)
    assert shown == [inline(text) for text in TEXTS]
    assert shown[:3] == ["a\\|b", "\\`code\\`", "\\*bold\\*"]
    assert shown[6] == "&lt;img src=x onerror=1&gt;"
    assert shown[10] == "https\\://x.y"
