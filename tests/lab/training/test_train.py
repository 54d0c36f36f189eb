"""A recipe becomes a run folder; splits, resumes, stops and bad input give the same numbers or a clear word."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.checkpoints import CheckpointError
from affine_attention.lab.training.guard import NotFiniteError, Stopped
from affine_attention.lab.training.train import train

from .runs import STUDENT, differences, log_without_timing, tiny_recipe, write_text
from .test_checkpoints import small_disk

ROOT = Path(__file__).parent.parent.parent.parent


class Place:
    """Text, its tokens and finished runs, shared by the tests of this file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, write_text(folder / "text.txt")
        self.made: dict[str, Path] = {}

    def recipe(self, mechanism="affine", **changes):
        return tiny_recipe(self.text, mechanism, **changes)

    def train(self, run, recipe, **options):
        return train(recipe, run, device="cpu", cache=self.folder / "cache", **options)

    def run(self, mechanism="affine", **changes) -> Path:
        """A finished run of these settings; only read it."""
        key = json.dumps([mechanism, changes])
        if key not in self.made:
            path = self.folder / f"made-{len(self.made)}"
            self.made[key] = self.train(path, self.recipe(mechanism, **changes))
        return self.made[key]

    def teacher(self) -> Path:
        """A finished run can teach."""
        return self.run("softmax")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("runs"))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(run).log()]


def test_a_run_is_a_folder_that_says_all(place):
    run = RunFolder(place.run())
    recipe, manifest, log = run.recipe(), run.manifest(), run.log()
    assert recipe == place.recipe()
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    expected = {"step", "loss", "kd_loss", "ce_loss", "grad_norm", "learning_rate", "tokens", "seconds", "mfu"}
    for line in log:
        assert expected <= set(line)
        assert line["tokens"] == line["step"] * 8 * 32
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
    assert [line["learning_rate"] for line in log] == pytest.approx([0, 0.005, 0.01, 0.01, 0.01, 0.005])
    assert losses(run.path)[-1] < losses(run.path)[0]
    probed = [line["step"] for line in log if "mean_logit" in line]
    assert probed == [1, 2, 4, 6]
    assert torch.tensor(log[1]["mean_logit"]).shape == (2, 4)
    assert torch.tensor(log[1]["running_alpha"]).shape == (2, 4)
    assert [line["step"] for line in log if line.get("eval_loss")] == [3, 6]
    assert manifest["parameters"] == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(run.model).parameters()
    )
    assert manifest["data"]["fingerprint"]
    assert manifest["attention"]["implementation"] == "composed"
    assert "cpu" in manifest["attention"]["why"]
    assert [event["event"] for event in run.events()] == ["start", "save", "save", "save", "finish"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    assert AutoTokenizer.from_pretrained(run.model).vocab_size <= 320


def test_the_model_of_a_run_is_the_student_after_its_last_step(place):
    run = RunFolder(place.run())
    model = AutoModelForCausalLM.from_pretrained(run.model)
    last = AutoModelForCausalLM.from_pretrained(run.checkpoints / "step-00000006")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, last.state_dict()[name]), name
    averages = torch.tensor(run.log()[-1]["running_alpha"])
    own = torch.stack([b for name, b in model.named_buffers() if name.endswith("running_alpha")])
    assert torch.equal(own, averages)
    assert model.config.use_cache


def test_a_checkpoint_holds_no_pickle(place):
    for path in (place.run() / "checkpoints").rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors", ".py"), path
        if path.suffix == ".py":
            assert path.read_text().startswith("from affine_attention.hf.classes import ")


# In fp32 a sum over other groups of tokens rounds otherwise, by up to 6e-8 of it an addition, and each step passes that
# on. Seen: 1.2e-7.
SPLITS = 1e-6


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_accumulation_is_one_big_batch(place, mechanism):
    whole = place.run(mechanism, device_batch=8)
    for size in (4, 2):
        split = place.run(mechanism, device_batch=size)
        for line, other in zip(RunFolder(split).log(), RunFolder(whole).log(), strict=True):
            for key in ("loss", "ce_loss", "grad_norm", "learning_rate"):
                assert line[key] == pytest.approx(other[key], rel=SPLITS), (line["step"], key)
            if line.get("running_alpha"):
                averages = torch.tensor(line["running_alpha"])
                torch.testing.assert_close(averages, torch.tensor(other["running_alpha"]), rtol=SPLITS, atol=1e-7)


def test_distillation_is_split_as_well(place):
    settings = {"teacher": str(place.teacher()), "ce_weight": 0.25, "kd_weight": 0.75, "temperature": 2.0}
    whole, split = (place.run("affine", device_batch=size, **settings) for size in (8, 2))
    lines, others = RunFolder(split).log(), RunFolder(whole).log()
    for line, other in zip(lines, others, strict=True):
        assert line["loss"] == pytest.approx(0.75 * line["kd_loss"] + 0.25 * line["ce_loss"], rel=1e-6)
        for key in ("loss", "kd_loss", "ce_loss", "grad_norm"):
            # A small divergence is a difference of large logits, and has their rounding.
            assert line[key] == pytest.approx(other[key], rel=SPLITS, abs=1e-7), (line["step"], key)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["eval_kd_loss"] > 0


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_recomputed_activations_change_nothing_at_all(place, mechanism):
    assert log_without_timing(place.run(mechanism, gradient_checkpointing=True)) == log_without_timing(
        place.run(mechanism)
    )


def test_a_longer_look_at_the_model_changes_nothing_at_all(place):
    watched = [(line["loss"], line["grad_norm"]) for line in RunFolder(place.run()).log()]
    alone = [(line["loss"], line["grad_norm"]) for line in RunFolder(place.run(probe_every=0, heldout=0.1)).log()]
    assert watched == alone


def stop_after(run: Path, steps: int, number: int, session: int = 1) -> threading.Thread:
    """Sends a signal to this process once a run has begun for the so-manieth time and has so many steps."""

    def watch():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            begun = sum(event["event"] in ("start", "resume") for event in RunFolder(run).events())
            if begun == session and len(RunFolder(run).log()) >= steps:
                os.kill(os.getpid(), number)
                return
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("mechanism", ["affine", "softmax"])
def test_a_run_that_is_stopped_twice_is_the_uninterrupted_run(place, tmp_path, mechanism, capsys):
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


def test_a_stream_goes_on_where_it_was(place, tmp_path):
    settings = {"streaming": True, "tokenizer": str(place.run() / "model"), "steps": 12, "save_every": 4}
    thread = stop_after(tmp_path / "run", 5, signal.SIGTERM)
    with pytest.raises(Stopped):
        place.train(tmp_path / "run", place.recipe(**settings))
    thread.join()
    place.train(tmp_path / "run", place.recipe(**settings))
    assert differences(tmp_path / "run", place.run(**settings)) == []


def test_the_newest_whole_checkpoint_is_taken_and_the_others_are_named(place, tmp_path, capsys):
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
    for manifest in manifests:  # readable again: it goes on as if nothing had been
        manifest.with_name("away").rename(manifest)
    place.train(tmp_path / "run", place.recipe())
    assert differences(tmp_path / "run", place.run()) == []


def test_checkpoints_that_cannot_be_listed_are_no_empty_folder(place, tmp_path, monkeypatch):
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


def test_a_recipe_that_is_written_otherwise_is_the_same_run(place, tmp_path):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    settings = json.loads(run.recipe_file.read_text())
    run.recipe_file.write_text(json.dumps({**dict(reversed(settings.items())), "temperature": 1}))
    place.train(tmp_path / "run", place.recipe())
    assert [event["step"] for event in run.events() if event["event"] == "resume"] == [6]


def test_strange_names_among_the_checkpoints_do_not_end_training(place, tmp_path):
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


def test_a_pipe_in_the_place_of_the_model_is_not_waited_for(place, tmp_path):
    run = RunFolder(shutil.copytree(place.run(), tmp_path / "run"))
    shutil.rmtree(run.model)
    os.mkfifo(run.model)
    with pytest.raises(OSError, match="the model could not be written"):
        place.train(run.path, place.recipe())
    run.model.unlink()
    place.train(run.path, place.recipe())
    assert differences(run.path, place.run()) == []


def test_a_saved_model_has_ordinary_permissions(place):
    run = RunFolder(place.run())
    usual = run.recipe_file.stat().st_mode
    assert {path.stat().st_mode for path in run.model.iterdir()} == {usual}


@pytest.mark.parametrize("content", ["{}", "[]", '{"data": 3}', '{"data": {}, "sessions": 3}', "{", "null"])
def test_a_manifest_without_its_keys_is_named(content, place, tmp_path):
    run = RunFolder(place.train(tmp_path / "run", place.recipe()))
    shutil.rmtree(run.model)
    run.manifest_file.write_text(content)
    log = run.log_file.read_bytes()
    with pytest.raises(ValueError) as error:
        place.train(tmp_path / "run", place.recipe())
    assert "manifest.json" in str(error.value) or "the data is not that of the run" in str(error.value)
    assert run.log_file.read_bytes() == log


def test_a_finished_run_is_left_alone(place, capsys):
    run = RunFolder(place.run())
    before = (run.log_file.stat().st_mtime_ns, run.events_file.read_text())
    capsys.readouterr()
    assert place.train(run.path, place.recipe()) == run.path
    assert "is finished" in capsys.readouterr().err
    assert (run.log_file.stat().st_mtime_ns, run.events_file.read_text()) == before


def test_changed_settings_are_refused_with_what_differs(place):
    before = {path: path.stat().st_mtime_ns for path in place.run().rglob("*")}
    with pytest.raises(ValueError) as error:
        place.train(place.run(), place.recipe(learning_rate=0.02, steps=7).with_settings({"mechanism.momentum": 0.5}))
    for line in ("learning_rate: 0.01 -> 0.02", "steps: 6 -> 7", "mechanism.momentum: 0.9 -> 0.5"):
        assert line in str(error.value)
    with pytest.raises(ValueError) as error:
        place.train(place.run(), place.recipe(), resume=False)
    assert "holds a run already" in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in place.run().rglob("*")} == before


def test_changed_or_vanished_data_is_named_on_resume(tmp_path):
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


def test_a_teacher_that_was_replaced_is_noticed_on_resume(place, tmp_path):
    from safetensors.torch import load_file, save_file

    teacher = shutil.copytree(place.teacher(), tmp_path / "teacher")
    recipe = place.recipe(teacher=str(teacher))
    run = RunFolder(place.train(tmp_path / "run", recipe))
    shutil.rmtree(run.model)
    weights = {name: tensor.clone() for name, tensor in load_file(teacher / "model" / "model.safetensors").items()}
    weights["model.norm.weight"][7] += 1e-3
    save_file(weights, teacher / "model" / "model.safetensors", {"format": "pt"})
    log = run.log_file.read_bytes()
    with pytest.raises(ValueError, match=r"weights of the teacher .* are not those"):
        place.train(tmp_path / "run", recipe)
    assert run.log_file.read_bytes() == log


def test_what_does_not_fit_is_refused_before_the_first_step(place, tmp_path):
    refused = {
        "student_changes.vocab_size=": {"student_changes": STUDENT | {"vocab_size": 300}},
        "max_position_embeddings": {"student_changes": STUDENT | {"max_position_embeddings": 16}},
        "did you mean 'llama-1m'": {"student": "llama-1n"},
        "global_batch = device_batch x accumulation x ranks": {"device_batch": 3},
        "data is empty": {"data": ()},
        "no such folder": {"teacher": "./nothing"},
    }
    for words, changes in refused.items():
        with pytest.raises((ValueError, OSError)) as error:
            place.train(tmp_path / "run", place.recipe(**changes))
        assert words in str(error.value)
        assert not (tmp_path / "run").exists(), f"{words}: a folder was left behind"


def test_a_teacher_of_another_vocabulary_is_refused(place, tmp_path):
    with pytest.raises(ValueError) as error:
        place.train(
            tmp_path / "run",
            place.recipe(teacher=str(place.teacher()), student_changes=STUDENT | {"vocab_size": 384}),
        )
    assert "384 is not the teacher's of 320" in str(error.value)
    assert "truncate_vocabulary" in str(error.value)


def test_a_folder_with_other_things_in_it_is_refused(place, tmp_path):
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
    # Asked again, it stops at the same place: the checkpoint holds nothing of the step that failed.
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


def test_a_bad_parameter_is_named(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place.run() / "model")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path / "ill")
    with pytest.raises(NotFiniteError) as error:
        place.train(tmp_path / "run", place.recipe(student=str(tmp_path / "ill"), student_changes={}))
    assert "step 1: parameter model.layers.1.mlp.up_proj.weight is not finite" in str(error.value)
    assert "no checkpoint was written yet" in str(error.value)


def test_a_run_goes_on_from_the_model_of_another(place, tmp_path):
    changes = {"student": str(place.run()), "student_changes": {}, "steps": 4, "warmup_steps": 0}
    run = place.train(tmp_path / "run", place.recipe(**changes))
    assert losses(run)[0] < losses(place.run())[0] - 0.1
    with pytest.raises(ValueError) as error:
        place.train(tmp_path / "other", place.recipe("gated", **changes))
    assert "has the mechanism" in str(error.value)


def test_two_processes_do_not_write_one_run(place, tmp_path):
    from affine_attention.lab.training.claim import claim

    with claim(RunFolder(tmp_path / "run"), True), pytest.raises(ValueError) as error:
        place.train(tmp_path / "run", place.recipe())
    assert "another process" in str(error.value)


def test_bfloat16_keeps_weights_and_averages_in_float32(place):
    run = RunFolder(place.run(dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert losses(run.path) != losses(place.run())
    assert losses(run.path) == pytest.approx(losses(place.run()), rel=0.02)


def test_steps_are_told_and_sent_to_integrations(place, tmp_path):
    pytest.importorskip("tensorboard")
    told = []
    for name in ("one", "two"):
        place.train(tmp_path / name, place.recipe(steps=4), on_step=told.append, report_to=("tensorboard",))
        assert len(list((tmp_path / name / "tensorboard").glob("events.out*"))) == 1
    assert told[:4] == RunFolder(tmp_path / "one").log()
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ


def test_the_fsdp2_configuration_is_one_that_accelerate_knows():
    from accelerate.commands.config.config_args import load_config_from_file

    import affine_attention.lab.training

    path = Path(affine_attention.lab.training.__file__).parent / "configs" / "fsdp2.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type.value == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False


@pytest.mark.slow
def test_compiled_layers_train_alike_and_keep_their_names(place):
    compiled, plain = place.run(compile=True, steps=4), place.run(steps=4)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    assert RunFolder(compiled).log()[-1]["eval_loss"] == pytest.approx(
        RunFolder(plain).log()[-1]["eval_loss"], rel=1e-5
    )
    a, b = (AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (compiled, plain))
    assert a.keys() == b.keys()


def test_a_terminated_process_exits_with_its_code(place, tmp_path):
    """The same as in a shell: the line on stderr, the exit code, the checkpoint."""
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
    assert said == f"stopped by SIGTERM after step {done}, which is saved; train {tmp_path / 'run'} again to go on\n"
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
