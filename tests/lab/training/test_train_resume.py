"""A run that was stopped resumes and ends like an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.signals import Stopped

from .runs import differences, stop_after

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_a_run_that_is_stopped_twice_equals_the_uninterrupted_run(place, tmp_path, mechanism, capsys):
    settings = {"steps": 30, "save_every": 7}
    for session, (steps, number) in enumerate([(3, signal.SIGTERM), (12, signal.SIGINT)], start=1):
        thread = stop_after(tmp_path / "run", steps, number, session)
        with pytest.raises(Stopped) as stopped:
            place.train(tmp_path / "run", place.recipe(mechanism, **settings))
        thread.join()
        assert stopped.value.code == 128 + number
        done = len(RunFolder(tmp_path / "run").log())
        assert steps <= done < 30
        assert f"after step {done}, which is saved" in capsys.readouterr().err
        assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}" / "MANIFEST.json").is_file()
        assert not (tmp_path / "run" / "model").exists()
    place.train(tmp_path / "run", place.recipe(mechanism, **settings))
    assert differences(tmp_path / "run", place.run(mechanism, **settings)) == []
    events = [event["event"] for event in RunFolder(tmp_path / "run").events() if event["event"] != "save"]
    assert events == ["start", "stop", "resume", "stop", "resume", "finish"]
    assert len(RunFolder(tmp_path / "run").manifest()["sessions"]) == 3


def test_a_stream_resumes_at_its_position(place, tmp_path):
    settings = {"streaming": True, "tokenizer": str(place.run() / "model"), "steps": 12, "save_every": 4}
    thread = stop_after(tmp_path / "run", 5, signal.SIGTERM)
    with pytest.raises(Stopped):
        place.train(tmp_path / "run", place.recipe(**settings))
    thread.join()
    place.train(tmp_path / "run", place.recipe(**settings))
    assert differences(tmp_path / "run", place.run(**settings)) == []


def test_the_newest_valid_checkpoint_is_used_and_the_others_are_reported(place, tmp_path, capsys):
    settings = {"keep_checkpoints": 3}
    run = RunFolder(place.train(tmp_path / "run", place.recipe(**settings)))
    shutil.rmtree(run.model)
    damaged = run.checkpoints / "step-00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    place.train(tmp_path / "run", place.recipe(**settings))
    assert "skipped checkpoint step-00000006: model.safetensors has" in capsys.readouterr().err
    assert any(event["event"] == "skip" and "step-00000006" in event["reason"] for event in run.events())
    assert [event["step"] for event in run.events() if event["event"] == "resume"] == [4]
    assert differences(tmp_path / "run", place.run(**settings)) == []


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_that_lost_only_its_model_writes_it_again(place, tmp_path, streaming):
    settings = {"tokenizer": str(place.run() / "model"), "streaming": streaming}
    run = RunFolder(place.train(tmp_path / "run", place.recipe(**settings)))
    shutil.rmtree(run.model)
    place.train(tmp_path / "run", place.recipe(**settings))
    assert differences(run.path, place.run(**settings)) == []
    assert [event["step"] for event in run.events() if event["event"] == "resume"] == [6]


def test_a_run_that_was_never_saved_starts_again(place, tmp_path):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    shutil.rmtree(run.checkpoints)
    place.train(tmp_path / "run", place.recipe())
    assert differences(tmp_path / "run", place.run()) == []


def test_checkpoints_that_cannot_be_used_stop_the_run_and_change_nothing(place, tmp_path):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    manifests = sorted(run.checkpoints.glob("*/MANIFEST.json"))
    for manifest in manifests:
        manifest.rename(manifest.with_name("away"))
    log = run.log_file.read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            place.train(tmp_path / "run", place.recipe())
        assert "none of them can be used" in str(error.value)
        assert "step-00000006: missing MANIFEST.json" in str(error.value)
        assert run.log_file.read_bytes() == log
    for manifest in manifests:  # readable again: the run resumes
        manifest.with_name("away").rename(manifest)
    place.train(tmp_path / "run", place.recipe())
    assert differences(tmp_path / "run", place.run()) == []


def test_checkpoints_that_cannot_be_listed_are_an_error(place, tmp_path, monkeypatch):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    log, scandir = run.log_file.read_bytes(), os.scandir

    def refuse(path="."):
        if Path(os.fsdecode(path)) == run.checkpoints:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        place.train(tmp_path / "run", place.recipe())
    assert run.log_file.read_bytes() == log


def test_a_recipe_with_another_key_order_is_the_same_run(place, tmp_path):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    settings = json.loads(run.recipe_file.read_text())
    run.recipe_file.write_text(json.dumps({**dict(reversed(settings.items())), "temperature": 1}))
    place.train(tmp_path / "run", place.recipe())
    assert [event["step"] for event in run.events() if event["event"] == "resume"] == [6]


def test_other_names_among_the_checkpoints_do_not_stop_training(place, tmp_path):
    run = RunFolder(tmp_path / "run")

    def disturb(entry):
        if entry["step"] == 3:
            for name in ("step-1", "step-٣", "step-00000001x", "notes"):
                (run.checkpoints / name).mkdir()
            (run.checkpoints / "step-00000006").write_text("a file in a checkpoint's place")
            (run.checkpoints / "step-00000004").symlink_to(tmp_path)

    place.train(run.path, place.recipe(), on_step=disturb)
    assert differences(run.path, place.run()) == []
    assert tmp_path.is_dir()
    assert {"step-1", "step-٣", "step-00000001x", "notes"} <= {path.name for path in run.checkpoints.iterdir()}


def test_a_pipe_named_model_does_not_block_a_run(place, tmp_path):
    run = RunFolder(shutil.copytree(place.run(), tmp_path / "run"))
    shutil.rmtree(run.model)
    os.mkfifo(run.model)
    with pytest.raises(OSError, match="the model could not be written"):
        place.train(run.path, place.recipe())
    run.model.unlink()
    place.train(run.path, place.recipe())
    assert differences(run.path, place.run()) == []


@pytest.mark.parametrize("content", ["{}", "[]", '{"data": 3}', '{"data": {}, "sessions": 3}', "{", "null"])
def test_a_broken_manifest_is_reported(content, place, tmp_path):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    run.manifest_file.write_text(content)
    log = run.log_file.read_bytes()
    with pytest.raises(ValueError) as error:
        place.train(tmp_path / "run", place.recipe())
    assert "manifest.json" in str(error.value) or "the data changed since the run started" in str(error.value)
    assert run.log_file.read_bytes() == log


def test_a_terminated_process_exits_with_the_code_of_its_signal(place, tmp_path):
    """The message on stderr, the exit code and the checkpoint."""
    code = (
        "import sys; from pathlib import Path; from tests.lab.training.runs import tiny_recipe; "
        "from affine_attention.lab.training.train import train; "
        "train(tiny_recipe(Path(sys.argv[1]), steps=5000, save_every=0), sys.argv[2], device='cpu', cache=sys.argv[3])"
    )
    arguments = [sys.executable, "-c", code, str(place.text), str(tmp_path / "run"), str(place.folder / "cache")]
    child = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not len(RunFolder(tmp_path / "run").log()) >= 2:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 143, said
    done = len(RunFolder(tmp_path / "run").log())
    assert said == f"stopped by SIGTERM after step {done}, which is saved; train {tmp_path / 'run'} again to resume\n"
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
