"""A run folder is locked by one process; other folders are left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from affine_attention.files import write_json
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.checkpoints import Checkpoints
from affine_attention.lab.training.lock import check_folder, lock_run, prepare_run
from affine_attention.lab.training.progress import Progress


def make_run(path):
    run = RunFolder(path)
    write_json(run.recipe_file, Recipe().to_dict())
    return run


def test_a_lock_is_held_and_released(tmp_path):
    run = make_run(tmp_path / "run")
    with lock_run(run, True):
        with pytest.raises(ValueError) as error, lock_run(run, True):
            pass
        assert "another process" in str(error.value)
        with lock_run(run, False):
            pass  # the other ranks of the same run
    with lock_run(run, True):
        pass


def test_a_killed_process_releases_the_lock(tmp_path):
    run = make_run(tmp_path / "run")
    code = (
        "import fcntl, os, sys; lock = open(sys.argv[1], 'a'); fcntl.flock(lock, fcntl.LOCK_EX); "
        "print('held', flush=True); os.kill(os.getpid(), 9)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(run.path / ".lock")], capture_output=True, text=True)
    assert child.stdout == "held\n"
    with lock_run(run, True):
        pass


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(RuntimeError), lock_run(run, True):
        raise RuntimeError
    assert not run.path.exists()
    run.path.mkdir()
    with pytest.raises(RuntimeError), lock_run(run, True):
        raise RuntimeError
    assert list(run.path.iterdir()) == []


def test_what_is_not_a_run_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    for path, words in ((tmp_path / "file", "is a file"), (tmp_path, "holds file but no run")):
        with pytest.raises(ValueError) as error:
            check_folder(RunFolder(path), Recipe(), True)
        assert words in str(error.value)
    check_folder(RunFolder(tmp_path / "new"), Recipe(), True)
    (tmp_path / "killed").mkdir()
    for name in (".lock", ".recipe.json.77-0123abcd.tmp"):
        (tmp_path / "killed" / name).touch()
    check_folder(RunFolder(tmp_path / "killed"), Recipe(), True)


@pytest.mark.parametrize("name", [".ssh", ".tmp-notes", ".bashrc.tmp", ".tmp-model-x", ".notes.77.tmp"])
def test_a_folder_of_dot_files_is_not_a_run(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="but no run"):
        check_folder(RunFolder(tmp_path), Recipe(), True)


def test_other_files_in_a_run_are_kept(tmp_path):
    run = make_run(tmp_path / "run")
    run.checkpoints.mkdir()
    other = [".tmp-notes", ".tmp-model-x", "checkpoints/.tmp-mine", "checkpoints/.tmp-step-4-x"]
    for name in other:
        (run.path / name).mkdir()
        (run.path / name / "precious").touch()
    for name in (".todo.tmp", ".todo.txt.77.tmp"):
        (run.path / name).touch()
    (run.path / ".tmp-model-8").symlink_to(tmp_path)
    prepare_run(run, Recipe(), Checkpoints(run.checkpoints, 2, {}), Progress(1, False))
    assert all((run.path / name / "precious").exists() for name in other)
    assert all((run.path / name).exists() for name in (".todo.tmp", ".todo.txt.77.tmp"))
    assert tmp_path.is_dir()


def test_a_lock_that_is_a_link_is_rejected(tmp_path):
    run = make_run(tmp_path / "run")
    (run.path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="got a link"), lock_run(run, True):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_preparing_a_run_removes_incomplete_files_and_reports_them(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    run.add_event("start")
    with open(run.events_file, "a") as file:
        file.write('{"time": "2026')
    for name in (".tmp-model-5", "checkpoints/.tmp-step-00000004-5"):
        (run.path / name).mkdir(parents=True)
        (run.path / name / "half").touch()
    (run.path / ".log.jsonl.5.tmp").touch()
    assert prepare_run(run, Recipe(), Checkpoints(run.checkpoints, 2, {}), Progress(1, False)) is None
    assert "starting at step 0" in capsys.readouterr().err
    reasons = [event["reason"] for event in run.events() if event["event"] == "skip"]
    assert len(reasons) == 3
    assert all("was incomplete" in reason for reason in reasons)
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "events.jsonl", "recipe.json"]
