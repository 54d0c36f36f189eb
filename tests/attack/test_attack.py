"""A small, seeded part of `make attack`, and the table that it writes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from . import browser, corruption, fuzz, hostile_files
from .__main__ import BEGIN, END, PAGE
from .tally import Battery, Row, table

TESTS = Path(__file__).parent.parent
SHARES = {"corruption": 0.1, "hostile files": 0.06, "fuzz": 0.02, "browser": 0.15}
ATTACKS = {
    "corruption": corruption.attack,
    "hostile files": hostile_files.attack,
    "fuzz": fuzz.attack,
    "browser": browser.attack,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_part_of_the_battery_survives(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTACK_WITHOUT_BROWSER", "1")  # test_chromium.py has one
    monkeypatch.chdir(tmp_path)
    battery = Battery(name, time.monotonic() + 12)
    ATTACKS[name](battery, tmp_path / "attack", 7, SHARES[name])
    assert [line for row in battery.rows for line in row.failures] == []
    assert sum(row.tried for row in battery.rows) >= 3


def test_the_table_counts_and_names_what_fell_short():
    battery = Battery("one", time.monotonic() + 60)
    row = battery.run("two", [lambda: None, lambda: "bad", lambda: 1 / 0])
    assert (row.tried, row.survived) == (3, 1)
    assert row.failures == ["two: bad", "two: ZeroDivisionError: division by zero"]
    battery.skip("three", "no browser")
    assert battery.run("late", []).tried == 0
    assert Battery("slow", 0.0).run("never", [lambda: "x"]).tried == 0
    text = table(battery.rows)
    assert "| one | two | 3 | 1 | 2 |" in text
    assert "| one | three (no browser) | – | – | – |" in text
    assert "| **one** | | 3 | 1 | 2 |" in text
    assert text.endswith("| all | | 3 | 1 | 2 |")


def test_every_test_that_the_page_names_is_there():
    text = PAGE.read_text(encoding="utf-8")
    rows = text[text.index("## What was broken") : text.index("## What was tried")].splitlines()
    named = [row.split(" | ")[-1] for row in rows if row.startswith("| ") and "`" in row]
    assert len(named) > 40
    for cell in named:
        content = ""
        for name in re.findall(r"`([^`]+)`", cell):
            file, _, test = name.rpartition("::") if "::" in name else ("", "", name)
            if name.endswith(".py"):
                file, test = name, ""
            if file:
                (path,) = TESTS.glob(f"**/{file}")
                content = path.read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}(" in content or not test, name


def test_the_page_holds_the_table_with_nothing_fallen_short():
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    last = next(line for line in reversed(lines) if line.startswith("| all"))
    _, _, tried, survived, failed = (cell.strip() for cell in last.strip("|").split("|"))
    assert int(tried.replace(",", "")) > 0
    assert tried == survived
    assert failed == "0"
    assert isinstance(Row("a", "b").failures, list)
