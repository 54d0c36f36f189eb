"""Bad settings, changed data, full disks and non-finite losses stop a run with a clear error."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.checkpoints import CheckpointError
from affine_attention.lab.training.nonfinite import NotFiniteError
from affine_attention.lab.training.signals import Stopped

from .runs import STUDENT, Place, differences, stop_after
from .test_checkpoints import small_disk


def test_changed_settings_are_rejected_with_the_differences(place):
    before = {path: path.stat().st_mtime_ns for path in place.run().rglob("*")}
    with pytest.raises(ValueError) as error:
        place.train(place.run(), place.recipe(learning_rate=0.02, steps=7).with_settings({"mechanism.momentum": 0.5}))
    for line in ("learning_rate: 0.01 -> 0.02", "steps: 6 -> 7", "mechanism.momentum: 0.9 -> 0.5"):
        assert line in str(error.value)
    with pytest.raises(ValueError) as error:
        place.train(place.run(), place.recipe(), resume=False)
    assert "already holds a run" in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in place.run().rglob("*")} == before


def test_changed_or_missing_data_is_reported_on_resume(tmp_path):
    place = Place(tmp_path)
    thread = stop_after(tmp_path / "run", 2, signal.SIGTERM)
    with pytest.raises(Stopped):
        place.train(tmp_path / "run", place.recipe(steps=40))
    thread.join()
    text = place.text.read_text()
    place.text.write_text(text + "\n\nOne more document that was not there.\n")
    with pytest.raises(ValueError) as error:
        place.train(tmp_path / "run", place.recipe(steps=40))
    assert "text.txt changed" in str(error.value)
    place.text.unlink()
    with pytest.raises((ValueError, OSError)) as error:
        place.train(tmp_path / "run", place.recipe(steps=40))
    assert "text.txt" in str(error.value)
    assert [e["event"] for e in RunFolder(tmp_path / "run").events()].count("error") == 2


def test_changed_teacher_weights_are_detected_on_resume(place, tmp_path):
    from safetensors.torch import load_file, save_file

    teacher = shutil.copytree(place.teacher(), tmp_path / "teacher")
    recipe = place.recipe(teacher=str(teacher))
    run = RunFolder(place.train(tmp_path / "run", recipe))
    shutil.rmtree(run.model)
    weights = {name: tensor.clone() for name, tensor in load_file(teacher / "model" / "model.safetensors").items()}
    weights["model.norm.weight"][7] += 1e-3
    save_file(weights, teacher / "model" / "model.safetensors", {"format": "pt"})
    log = run.log_file.read_bytes()
    with pytest.raises(ValueError, match=r"weights of the teacher .* changed since"):
        place.train(tmp_path / "run", recipe)
    assert run.log_file.read_bytes() == log


def test_settings_that_do_not_fit_are_rejected_before_the_first_step(place, tmp_path):
    rejected = {
        "student_changes.vocab_size=": {"student_changes": STUDENT | {"vocab_size": 300}},
        "max_position_embeddings": {"student_changes": STUDENT | {"max_position_embeddings": 16}},
        "did you mean 'llama-1m'": {"student": "llama-1n"},
        "global_batch = device_batch x accumulation x ranks": {"device_batch": 3},
        "data is empty": {"data": ()},
        "no such folder": {"teacher": "./nothing"},
    }
    for words, changes in rejected.items():
        with pytest.raises((ValueError, OSError)) as error:
            place.train(tmp_path / "run", place.recipe(**changes))
        assert words in str(error.value)
        assert not (tmp_path / "run").exists(), f"{words}: a folder was left behind"


def test_a_teacher_with_another_vocabulary_is_rejected(place, tmp_path):
    with pytest.raises(ValueError) as error:
        place.train(
            tmp_path / "run",
            place.recipe(teacher=str(place.teacher()), student_changes=STUDENT | {"vocab_size": 384}),
        )
    assert "384 differs from the teacher's 320" in str(error.value)
    assert "truncate_vocabulary" in str(error.value)


def test_a_folder_with_other_files_is_rejected(place, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError) as error:
        place.train(tmp_path, place.recipe())
    assert "notes.txt" in str(error.value)


def test_a_loss_that_is_not_finite_stops_before_the_optimizer(place, tmp_path):
    recipe = place.recipe(learning_rate=1e38, save_every=1, keep_checkpoints=9, max_grad_norm=0.0)
    with pytest.raises(NotFiniteError) as error:
        place.train(tmp_path / "run", recipe)
    run = RunFolder(tmp_path / "run")
    done = len(run.log())
    assert 1 <= done < 6
    good = run.checkpoints / f"step-{done:08d}"
    assert str(error.value).startswith(f"step {done + 1}: ")
    assert "stopped before the optimizer" in str(error.value)
    assert str(good) in str(error.value)
    assert sorted(path.name for path in run.checkpoints.iterdir())[-1] == good.name
    assert run.events()[-1]["event"] == "stop"
    # A second attempt stops at the same step: the checkpoint does not contain the failed step.
    with pytest.raises(NotFiniteError) as again:
        place.train(tmp_path / "run", recipe)
    assert str(again.value) == str(error.value)


def test_a_disk_that_fills_up_loses_nothing(place, tmp_path):
    with small_disk(tmp_path / "disk", 4 * 2**20) as disk:
        filler = disk / "filler"

        def fill(entry):
            if entry["step"] == 3:
                filler.write_bytes(bytes(shutil.disk_usage(disk).free - 100_000))  # a checkpoint takes 400 kB

        with pytest.raises(CheckpointError) as error:
            place.train(disk / "run", place.recipe(), on_step=fill)
        run = RunFolder(disk / "run")
        assert "checkpoint of step 4" in str(error.value)
        assert "No space left" in str(error.value)
        assert "bytes free" in str(error.value)
        assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
        with pytest.raises(OSError) as error:
            place.train(disk / "run", place.recipe())
        assert "checkpoints and the model need" in str(error.value)
        filler.unlink()
        place.train(disk / "run", place.recipe())
        assert differences(run.path, place.run()) == []


def test_a_parameter_that_is_not_finite_is_named(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place.run() / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    for file in (place.run() / "model").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "broken")
    with pytest.raises(NotFiniteError) as error:
        place.train(tmp_path / "run", place.recipe(student=str(tmp_path / "broken"), student_changes={}))
    assert "step 1: parameter model.layers.1.mlp.up_proj.weight is not finite" in str(error.value)
    assert "no checkpoint was written yet" in str(error.value)


def test_two_processes_cannot_train_one_run(place, tmp_path):
    from affine_attention.lab.training.lock import lock_run

    with lock_run(RunFolder(tmp_path / "run"), True), pytest.raises(ValueError) as error:
        place.train(tmp_path / "run", place.recipe())
    assert "another process" in str(error.value)
