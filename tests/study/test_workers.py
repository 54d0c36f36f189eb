"""Parallel students equal sequential ones, and the parent reports failures of its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from affine_attention.files import read_json
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.study import Job, Plan, run_study
from affine_attention.study.live import LiveTable
from affine_attention.study.workers import run_in_parallel
from tests.lab.training.runs import log_without_timing
from tests.study.notes import Note
from tests.study.test_stages import SETTINGS

JOBS = [Job(f"job{number}", Recipe(seed=number)) for number in range(5)]


def table():
    return LiveTable([(job.name, 1) for job in JOBS], quiet=True)


def test_every_job_is_done_and_reported(tmp_path):
    shown = table()
    run_in_parallel(JOBS, Note(tmp_path, seconds=0.3), 2, shown)
    processes = {(tmp_path / job.name).read_text() for job in JOBS}
    assert len(processes) == 2
    assert str(os.getpid()) not in processes
    assert {name: (row.stage, row.perplexity) for name, row in shown.rows.items()} == {
        job.name: ("done", float(job.recipe.seed)) for job in JOBS
    }


def test_a_failure_names_the_job_and_starts_no_other(tmp_path):
    with pytest.raises(ValueError, match="job0: ValueError: the sky is falling"):
        run_in_parallel(JOBS, Note(tmp_path, fails="job0", seconds=2.0), 2, table())
    assert not (tmp_path / "job4").exists()


def test_a_killed_process_is_noticed(tmp_path):
    with pytest.raises(ValueError, match="job1: its process ended unexpectedly with exit code -9"):
        run_in_parallel(JOBS, Note(tmp_path, dies="job1"), 2, table())


def test_a_signal_ends_all_of_them(tmp_path):
    def interrupt():
        while not any(tmp_path.iterdir()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        run_in_parallel(JOBS, Note(tmp_path, seconds=1.0), 2, table())
    thread.join()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(list(tmp_path.iterdir())) < len(JOBS)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_parallel_students_equal_sequential_ones(tmp_path):
    text = tmp_path / "stories.txt"
    text.write_text("\n\n".join(f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 40 for n in range(60)))
    settings = {**SETTINGS, "data": (str(text),), "heldout": 0.2, "steps": 4, "warmup_steps": 1, "decay_steps": 1}
    plan = Plan(mechanisms=("softmax", "affine"), settings=settings, teacher_steps=4)
    run_study(plan, tmp_path / "one", device="cpu", quiet=True)
    teacher = {"teacher": str(tmp_path / "one/teacher/model")}
    given = replace(plan, settings=settings | teacher)
    page = run_study(given, tmp_path / "two", device="cpu", quiet=True, parallel=2, keep_weights=False)
    assert page.is_file()
    for name in ("softmax-seed0", "affine-seed0"):
        one, two = RunFolder(tmp_path / "one" / name), RunFolder(tmp_path / "two" / name)
        assert log_without_timing(two.path) == log_without_timing(one.path)
        perplexity = [read_json(run.evaluation_file)["perplexity"]["heldout"]["token"] for run in (one, two)]
        assert perplexity[0] == perplexity[1]
        assert not two.model.exists()
        assert not two.checkpoints.exists()
    # What is done stays done, without its weights.
    lines = {path: path.read_bytes() for path in (tmp_path / "two").glob("*/log.jsonl")}
    run_study(given, tmp_path / "two", device="cpu", quiet=True, parallel=2, keep_weights=False)
    assert {path: path.read_bytes() for path in (tmp_path / "two").glob("*/log.jsonl")} == lines
    assert page.read_text().count("affine") > 1


def test_parallel_below_one_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="parallel must be at least 1, got 0"):
        run_study(Plan(), tmp_path, parallel=0)


def test_ranks_of_torchrun_do_not_start_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="parallel=2 starts its own processes, but this is one of 4 ranks"):
        run_study(Plan(), tmp_path, parallel=2)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_signal_saves_every_student_and_the_same_command_resumes(tmp_path):
    text = tmp_path / "stories.txt"
    text.write_text("\n\n".join(f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 40 for n in range(60)))
    command = [
        *(sys.executable, "-m", "affine_attention", "study", "--mechanisms", "softmax,affine", "--parallel", "2"),
        *("--teacher", "none", "--data", str(text), "--device", "cpu", "--out", str(tmp_path / "out")),
        *("--set", "heldout=0.2", "--set", "steps=60", "--set", "warmup_steps=2", "--set", "decay_steps=2"),
        *("--set", "vocabulary_size=512", "--set", 'student_changes={"vocab_size": 512}', "--set", "save_every=0"),
    ]
    logs = [tmp_path / f"out/{mechanism}-seed0/log.jsonl" for mechanism in ("softmax", "affine")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not all(log.is_file() and log.read_text().count("\n") >= 3 for log in logs):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.terminate()
    process.terminate()  # as `timeout` and some schedulers do
    words = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "the same command goes on from here" in words
    for log in logs:
        events = [json.loads(line) for line in log.with_name("events.jsonl").read_text().splitlines()]
        assert [event["event"] for event in events] == ["start", "save", "stop"]
    subprocess.run(command, check=True, capture_output=True)
    for log in logs:
        assert [line["step"] for line in RunFolder(log.parent).log()] == list(range(1, 61))
