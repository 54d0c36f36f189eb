"""The stored study: its tables in the docs are those of its runs, and its commands are commands."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from affine_attention import cli
from affine_attention.lab.report import report
from affine_attention.lab.run import RunFolder
from studies.smollm2 import details
from studies.smollm2 import run as study

ROOT = Path(__file__).parent.parent.parent
FOLDERS = sorted(path.parent for path in (ROOT / "studies/smollm2").glob("*0m/*/recipe.json"))


def test_the_tables_of_the_docs_are_made_of_the_stored_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    report([Path(os.path.relpath(path)) for path in FOLDERS], tmp_path / "page.html", markdown=tmp_path / "tables.md")
    kept = (ROOT / "docs/study-tables.md").read_text(encoding="utf-8")
    begin, end = "<!-- report:begin -->", "<!-- report:end -->"
    inside = kept[kept.index(begin) : kept.index(end) + len(end)]
    assert inside == (tmp_path / "tables.md").read_text(encoding="utf-8").strip(), "run `make study-report`"


def test_the_other_numbers_of_the_docs_are_those_of_the_stored_runs():
    kept = (ROOT / "docs/study.md").read_text(encoding="utf-8").splitlines()
    for line in (line for table in details.tables() for line in table):
        assert line in kept, "run `python -m studies.smollm2.details`"


def test_seven_mechanisms_have_three_whole_seeds_at_equal_steps():
    for mechanism in ("softmax", "sink", "gated", "head_gated", "affine_no_bias", "affine", "affine_gated"):
        for seed in (0, 1, 2):
            run = RunFolder(ROOT / f"studies/smollm2/30m/{mechanism}-seed{seed}")
            recipe, log = run.recipe(), run.log()
            assert recipe.mechanism.name == mechanism
            assert (recipe.steps, recipe.seed, recipe.learning_rate, recipe.teacher) == (1200, seed, 1e-3, "teacher")
            assert [line["step"] for line in log] == list(range(1, 1201))
            assert any(event["event"] == "finish" for event in run.events())
            evaluation = json.loads(run.evaluation_file.read_text())
            texts = {"c4", "wikitext2", "wikipedia2006", "openstax", "elife", "novels", "heldout"}
            assert set(evaluation["perplexity"]) == texts
            assert evaluation["perplexity"]["c4"]["documents"] == 1000
            assert {task: found["n"] for task, found in evaluation["tasks"].items()} == {
                "lambada_openai": 5153, "piqa": 1838, "hellaswag": 10042, "arc_easy": 2376,
            }  # fmt: skip
            assert all(found["stderr"] > 0 or found["value"] == 0 for found in evaluation["tasks"].values())


def test_no_stored_file_names_a_machine():
    for folder in FOLDERS:
        for name in ("recipe.json", "manifest.json", "evaluation.json"):
            file = folder / name
            text = file.read_text() if file.is_file() else ""
            assert not any(word in text for word in ("/tmp/", "/root/", "/home/", "/work/")), file


@pytest.mark.parametrize("student", ["30m", "60m"])
def test_its_commands_are_plans_that_can_run(student, capsys):
    given = argparse.Namespace(
        data="data", teacher="teacher", out="runs", parallel=8, corpus="*.train.txt.xz", settings=[], device=None
    )
    words = study.command(given, student, [*study.MECHANISMS, *study.QUESTIONS], [0, 1, 2], {"learning_rate": 1e-3})
    assert cli.main([*words[3:], "--plan"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("39 students: softmax, affine,")
    assert "affine+running_alpha_start=0.5" in shown


def test_the_rate_is_that_of_the_best_softmax(tmp_path):
    for rate, loss in ((1e-3, 2.0), (2e-3, 1.5), (4e-3, 3.0)):
        for mechanism in ("softmax", "affine"):
            folder = tmp_path / f"{mechanism}_learning_rate={rate}-seed0"
            folder.mkdir()
            better_elsewhere = loss if mechanism == "softmax" else 1 / loss
            (folder / "log.jsonl").write_text(json.dumps({"step": 1, "eval_loss": better_elsewhere}) + "\n")
    assert study.choose_rate(tmp_path) == 2e-3
    assert study.choose_rate(tmp_path) == 2e-3
    assert (tmp_path / "softmax-seed0").is_dir()
    assert (tmp_path / "affine-seed0").is_dir()
    assert not (tmp_path / "affine_learning_rate=0.002-seed0").exists()
