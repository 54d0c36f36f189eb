"""A stored run is small, keeps no weights, and gives the same report as the run itself."""

from __future__ import annotations

import sys

import pytest

from affine_attention.lab.report import report
from affine_attention.lab.run import RunFolder
from affine_attention.study import Plan, run_study
from studies import store
from tests.study.test_stages import SETTINGS


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    text = folder / "stories.txt"
    text.write_text("\n\n".join(f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 40 for n in range(60)))
    settings = {**SETTINGS, "data": (str(text),), "heldout": 0.2, "steps": 6, "teacher": None}
    run_study(Plan(mechanisms=("softmax", "affine"), settings=settings), folder / "runs", device="cpu", quiet=True)
    return folder / "runs"


def test_the_report_is_that_of_the_runs(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["store", str(runs), str(tmp_path / "kept"), "--maps", "affine-seed0"])
    store.main()
    assert capsys.readouterr().out.startswith("2 runs, ")
    for place in (runs, tmp_path / "kept"):
        folders = [place / "softmax-seed0", place / "affine-seed0"]
        report(folders, place / "page.html", markdown=place / "tables.md")
    assert (tmp_path / "kept/tables.md").read_text() == (runs / "tables.md").read_text()
    kept = RunFolder(tmp_path / "kept/affine-seed0")
    assert not kept.model.exists()
    assert kept.maps_file.is_file()
    assert not RunFolder(tmp_path / "kept/softmax-seed0").maps_file.is_file()
    assert kept.log() == [store.shortened(line) for line in RunFolder(runs / "affine-seed0").log()]


def test_seven_digits_are_kept():
    assert store.shortened({"a": [1 / 3, 2, None, "x"]}) == {"a": [0.3333333, 2, None, "x"]}
