"""A small study, end to end: finished stages are not repeated, and errors are raised before anything starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from affine_attention.files import read_json
from affine_attention.lab.run import RunFolder
from affine_attention.study import Plan, run_study
from affine_attention.study.stages import check_space

SETTINGS = {
    "steps": 12, "warmup_steps": 2, "decay_steps": 4, "global_batch": 4, "sequence_length": 64, "vocabulary_size": 512,
    "student_changes": {"num_hidden_layers": 2, "vocab_size": 512}, "probe_every": 4, "save_every": 5,
}  # fmt: skip
MECHANISMS = ("softmax", "sink", "affine", "affine_gated")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "stories.txt"
    text.write_text("\n\n".join(f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 40 for n in range(60)))
    held = text.with_name("more.txt")
    held.write_text("\n\n".join(f"Another story, {n}. The dog saw the cat." for n in range(5)))
    settings = {**SETTINGS, "data": (str(text),), "heldout": 0.2}
    return Plan(mechanisms=MECHANISMS, settings=settings, teacher_steps=10, perplexity={"more": str(held)})


@pytest.fixture(scope="module")
def page(plan, out):
    return run_study(plan, out, device="cpu", quiet=True)


def test_every_run_is_trained_evaluated_and_inspected(page, out):
    assert page == out / "report.html"
    losses = {}
    for mechanism in MECHANISMS:
        run = RunFolder(out / f"{mechanism}-seed0")
        assert run.finished
        assert [line["step"] for line in run.log()] == list(range(1, 13))
        evaluation, inspection = read_json(run.evaluation_file), read_json(run.inspection_file)
        assert set(evaluation["perplexity"]) == {"heldout", "more"}
        assert inspection["mechanism"]["name"] == mechanism
        assert run.recipe().teacher == "beside:../teacher/model"
        assert run.recipe().located(run.path).teacher == str(out / "teacher" / "model")
        losses[mechanism] = run.log()[0]["loss"]
    # Same initial weights wherever they are shared, same data: at the first step only the attention differs.
    assert len(set(losses.values())) == len(MECHANISMS)
    assert max(losses.values()) - min(losses.values()) < 0.05 * min(losses.values())
    text = page.read_text()
    assert all(mechanism in text for mechanism in MECHANISMS)


def test_instruments_are_added_to_a_finished_study(page, plan, out):
    run = RunFolder(out / "softmax-seed0")
    before = read_json(run.evaluation_file)
    run_study(replace(plan, mechanisms=("softmax",), instruments=("length",)), out, device="cpu", quiet=True)
    after = read_json(run.evaluation_file)
    assert after["perplexity"] == before["perplexity"]
    found = after["instruments"]["length"]
    assert list(found["factors"]) == ["1x", "2x", "4x"]
    assert found["protocol"]["length"] == 64
    assert "held out" in found["protocol"]["source"]
    assert "Beyond the training length" in page.read_text()


def test_a_grid_is_trained_reported_and_resumed(plan, tmp_path):
    pytest.importorskip("tensorboard")
    short = {**plan.settings, "steps": 4, "warmup_steps": 1, "decay_steps": 1, "teacher": None}
    grid = Plan(mechanisms=("affine",), settings=short, sweeps={"learning_rate": (1e-3, 2e-3)})
    page = run_study(grid, tmp_path, device="cpu", quiet=True, report_to=("tensorboard",))
    names = {f"affine_learning_rate={rate}-seed0" for rate in (0.001, 0.002)}
    for name in names:
        assert RunFolder(tmp_path / name).finished
        assert len(list((tmp_path / name / "tensorboard").glob("events.out*"))) == 1
    assert read_json(tmp_path / "study.json")["sweeps"] == {"learning_rate": [0.001, 0.002]}
    text = page.read_text()
    assert "Stability at each learning rate" in text
    assert "Held-out loss at each learning rate" in text
    logs = {name: (tmp_path / name / "log.jsonl").stat().st_mtime_ns for name in names}
    more = replace(grid, sweeps={"learning_rate": (1e-3, 2e-3, 3e-3)})
    run_study(more, tmp_path, device="cpu", quiet=True)
    assert RunFolder(tmp_path / "affine_learning_rate=0.003-seed0").finished, "a grid can grow"
    assert logs == {name: (tmp_path / name / "log.jsonl").stat().st_mtime_ns for name in names}


def test_trackio_gets_one_run_per_student_in_its_local_store(plan, tmp_path, monkeypatch):
    pytest.importorskip("trackio")  # not in the dev extra: it needs an older pillow than the other packages
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    from trackio.sqlite_storage import SQLiteStorage

    short = {**plan.settings, "steps": 3, "warmup_steps": 1, "decay_steps": 1, "teacher": None}
    grid = Plan(mechanisms=("affine",), settings=short, sweeps={"learning_rate": (1e-3, 2e-3)})
    run_study(grid, tmp_path / "sweep", device="cpu", quiet=True, report_to=("trackio",))
    for rate in (0.001, 0.002):
        name = f"affine_learning_rate={rate}-seed0"
        losses = [line["train/loss"] for line in SQLiteStorage.get_logs("sweep", name) if "train/loss" in line]
        assert losses == pytest.approx([line["loss"] for line in RunFolder(tmp_path / "sweep" / name).log()])


def test_an_unknown_integration_is_refused_before_anything_runs(plan, tmp_path):
    with pytest.raises(ValueError, match=r"report_to must be one of .* got 'tensorbord'; did you mean 'tensorboard'"):
        run_study(plan, tmp_path / "none", report_to=("tensorbord",))
    assert not (tmp_path / "none").exists()


def test_softmax_rows_sum_to_one_and_affine_ones_do_not(page, out):
    rows = {name: read_json(out / f"{name}-seed0" / "inspection.json")["row_sum"]["mean"] for name in MECHANISMS}
    assert all(abs(value - 1) < 1e-5 for layer in rows["softmax"] for value in layer)
    assert all(value < 0.95 for layer in rows["affine"] for value in layer)


def test_a_second_call_does_not_repeat_stages(page, plan, out):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != "study.json"}
    assert run_study(plan, out, device="cpu", quiet=True) == page
    after = {path: path.stat().st_mtime_ns for path in before}
    assert {path.name for path in before if before[path] != after[path]} <= {"report.html"}


def test_a_lost_stage_is_repeated_with_the_same_result(page, plan, out):
    run = RunFolder(out / "affine-seed0")
    evaluation = read_json(run.evaluation_file)
    run.evaluation_file.unlink()
    run_study(plan, out, device="cpu", quiet=True)
    again = read_json(run.evaluation_file)
    assert again["perplexity"]["heldout"]["token"] == evaluation["perplexity"]["heldout"]["token"]


def test_two_studies_of_one_seed_have_the_same_tables(page, plan, out, tmp_path):
    other = Plan(
        mechanisms=("affine",), settings={**plan.settings, "teacher": str(out / "teacher" / "model")},
    )  # fmt: skip
    run_study(other, tmp_path, device="cpu", quiet=True)
    mine, theirs = (RunFolder(folder / "affine-seed0") for folder in (out, tmp_path))
    timing = ("tokens_per_second", "seconds", "mfu")
    logs = [[{k: v for k, v in line.items() if k not in timing} for line in run.log()] for run in (mine, theirs)]
    assert logs[0] == logs[1]
    perplexities = [read_json(run.evaluation_file)["perplexity"]["heldout"]["token"] for run in (mine, theirs)]
    assert perplexities[0] == perplexities[1]


def test_other_settings_in_the_same_folder_are_rejected_before_anything_runs(page, plan, out):
    other = Plan(mechanisms=("softmax", "gated"), settings={**plan.settings, "learning_rate": 0.5}, teacher_steps=10)
    with pytest.raises(ValueError) as error:
        run_study(other, out, device="cpu", quiet=True)
    assert "learning_rate: 0.002 -> 0.5" in str(error.value)
    assert not (out / "gated-seed0").exists()


def test_a_broken_earlier_run_is_named_and_left_alone(page, plan, out, tmp_path):
    broken = tmp_path / "affine-seed0"
    broken.mkdir()
    (broken / "recipe.json").write_text("{")
    (broken / "precious.txt").write_text("mine")
    with pytest.raises(ValueError) as error:
        run_study(plan, tmp_path, device="cpu", quiet=True)
    assert "affine-seed0" in str(error.value)
    assert (broken / "precious.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["affine-seed0"]


def test_a_teacher_of_another_vocabulary_is_rejected(page, plan, out, tmp_path):
    settings = {**plan.settings, "teacher": str(out / "teacher" / "model"), "student_changes": {"vocab_size": 600}}
    with pytest.raises(ValueError) as error:
        run_study(Plan(mechanisms=("softmax",), settings=settings), tmp_path, device="cpu", quiet=True)
    assert "600" in str(error.value)
    assert "512" in str(error.value)


def test_missing_disk_space_is_reported_before_the_first_step(plan, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match="GiB are free"):
        check_space(plan.jobs(tmp_path), tmp_path / "deep" / "below")


def test_a_file_instead_of_a_folder_is_rejected(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        run_study(plan, tmp_path / "file", device="cpu", quiet=True)


def test_the_plan_is_kept_and_described(page, plan, out):
    assert json.loads((out / "study.json").read_text())["mechanisms"] == list(MECHANISMS)
    text = plan.describe(Path("runs/x"))
    assert "4 students" in text
    assert "trained first" in text


def test_a_moved_study_resumes_under_any_path(page, plan, out, tmp_path, monkeypatch):
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    before = {path: path.read_bytes() for path in moved.glob("*/log.jsonl")}
    monkeypatch.chdir(tmp_path)
    (moved / "affine-seed0" / "inspection.json").unlink()
    run_study(plan, Path("moved") / ".." / "moved", device="cpu", quiet=True)
    assert {path: path.read_bytes() for path in moved.glob("*/log.jsonl")} == before
    assert (moved / "affine-seed0" / "inspection.json").exists()


def test_a_teacher_that_was_replaced_stops_the_study(page, plan, out, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    weights = moved / "teacher" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    shutil.rmtree(moved / "affine_gated-seed0")
    with pytest.raises(ValueError, match="was trained with other weights"):
        run_study(plan, moved, device="cpu", quiet=True)
    assert not (moved / "affine_gated-seed0").exists()


def test_a_given_teacher_that_was_replaced_stops_the_study(page, plan, out, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(out / "teacher" / "model", teacher)
    given = replace(plan, settings={**plan.settings, "teacher": str(teacher)}, mechanisms=("softmax",), perplexity={})
    run_study(given, tmp_path / "study", device="cpu", quiet=True)
    weights = teacher / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="was trained with other weights"):
        run_study(replace(given, mechanisms=("softmax", "affine")), tmp_path / "study", device="cpu", quiet=True)
    assert not (tmp_path / "study" / "affine-seed0").exists()
