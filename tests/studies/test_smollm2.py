"""The stored study: the tables in the docs are made from its runs, and its plans can run."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from statistics import variance

import pytest

from affine_attention.lab.report import report
from affine_attention.lab.report.measures import Measure, final_loss
from affine_attention.lab.report.settings import main_settings, settings_of
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


def test_the_tables_of_the_page_are_made_of_the_stored_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    kept = details.PAGE.read_text(encoding="utf-8")
    assert details.rewritten(kept) == kept, "run `python -m studies.smollm2.details`"
    with pytest.raises(ValueError, match="must have one <!-- power:begin -->"):
        details.rewritten(kept.replace("<!-- power:begin -->", ""))


def numbers(text: str) -> list[str]:
    """Every number with an interval, without its sign, bold marks and separators of thousands."""
    return re.findall(r"[\d.,]*\d ± [\d.,]*\d", text.replace("**", ""))


# Printed by studies.start_scale, whose runs are not stored.
START_SCALE = {"0.089 ± 0.010", "0.220 ± 0.037", "0.238 ± 0.034", "0.304 ± 0.032", "0.084 ± 0.056"}


def test_every_interval_of_the_page_is_in_the_generated_tables():
    page = details.PAGE.read_text(encoding="utf-8")
    tables = (ROOT / "docs/study-tables.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"<!-- [a-z-]+:begin -->(.*?)<!-- [a-z-]+:end -->", page, re.DOTALL))
    known = {*numbers(tables), *numbers(blocks)}
    prose = [number for number in numbers(page) if number not in START_SCALE]
    assert len(prose) > 100
    assert not [number for number in prose if number not in known]


def test_every_number_of_the_decision_guide_has_its_source():
    page = details.PAGE.read_text(encoding="utf-8")
    guide = page[page.index("| if you | use |") : page.index("## The paper's claims")]
    speed = (ROOT / "benchmarks/results/train-study_nvidia-h200_2026-11-15.md").read_text()
    source = speed + (ROOT / "docs/study-tables.md").read_text(encoding="utf-8").replace("**", "")
    derived = {"0.061": 0.028 + 0.033, "0.4": 58.0 - 57.6}  # the end of an interval, and the paper's Table 3
    for number in re.findall(r"\d+\.\d+", guide):
        assert number in source or float(number) == pytest.approx(derived[number]), number
    rows = [line for line in guide.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    for row in rows:
        because, _, untested = [cell.strip() for cell in row.strip("|").split(" | ")][-3:]
        assert "±" in because or "no interval" in because, row
        assert untested, row


def test_the_seeds_effects_are_in_the_plain_variance_and_not_in_the_error_term():
    """The two standard deviations of the training loss that the page names."""
    setting = next(s for s in main_settings(settings_of(list(details.stored()))) if s.recipe_name == "30m")
    loss = Measure("Loss", final_loss)
    cells = [list(loss.by_seed(group).values()) for group in setting.groups if group.finished]
    within = sum((len(cell) - 1) * variance(cell) for cell in cells) / sum(len(cell) - 1 for cell in cells)
    assert round(within**0.5, 3) == 0.032
    assert round(setting.pool(loss).deviation, 3) == 0.019


def test_the_numbers_that_others_computed_are_found():
    """beta's effects, and the clipped steps of steps 101 to 500, from a second implementation."""
    rows = {line.split(" | ")[1]: line for line in details.effects() if line.startswith("| β ")}
    assert "+0.383 ± 0.059" in rows["Entropy of softmax part"]
    assert "−0.0763 ± 0.0242" in rows["CV"]
    shares = {}
    for name in ("affine", "softmax"):
        logs = [RunFolder(details.RUNS / f"{name}-seed{seed}").log()[100:500] for seed in details.SEEDS]
        shares[name] = sum(line["grad_norm"] > 1 for log in logs for line in log) / sum(map(len, logs))
    assert [round(100 * shares[name], 1) for name in ("affine", "softmax")] == [4.5, 0.4]
    clipped = [line for line in details.windows() if line.startswith(("| affine |", "| softmax |"))]
    assert "| 0.42 ± 0.72 |" in clipped[0]
    assert "| 4.50 ± 2.71 |" in clipped[1]


def test_seven_mechanisms_have_three_complete_seeds_with_equal_steps():
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
def test_its_plans_have_the_settings_of_the_stored_runs(student):
    given = argparse.Namespace(data="data", teacher="teacher", corpus="*.train.txt.xz", settings=["steps=1200"])
    plan = study.make_plan(given, student, [*study.MECHANISMS, *study.QUESTIONS], [0, 1, 2], learning_rate=1e-3)
    jobs = {job.name: job.recipe for job in plan.jobs(Path("runs"))}
    assert len(jobs) == 39
    assert plan.teacher is None, "the teacher is given"
    for folder in sorted((ROOT / "studies/smollm2" / student).iterdir()):
        if folder.name in jobs:
            stored = RunFolder(folder).recipe()
            assert stored.difference(jobs[folder.name]) == [], folder.name


def test_the_rate_with_the_best_softmax_is_chosen(tmp_path):
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
