"""A recipe becomes a run folder with a log, checkpoints, a manifest and a model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from affine_attention.lab.run import RunFolder

from .runs import losses


def test_a_run_folder_holds_everything(place):
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


def test_a_saved_model_has_ordinary_permissions(place):
    run = RunFolder(place.run())
    usual = run.recipe_file.stat().st_mode
    assert {path.stat().st_mode for path in run.model.iterdir()} == {usual}


def test_a_finished_run_is_left_alone(place, capsys):
    run = RunFolder(place.run())
    before = (run.log_file.stat().st_mtime_ns, run.events_file.read_text())
    capsys.readouterr()
    assert place.train(run.path, place.recipe()) == run.path
    assert "is already finished" in capsys.readouterr().err
    assert (run.log_file.stat().st_mtime_ns, run.events_file.read_text()) == before


def test_a_run_can_start_from_the_model_of_another(place, tmp_path):
    changes = {"student": str(place.run()), "student_changes": {}, "steps": 4, "warmup_steps": 0}
    run = place.train(tmp_path / "run", place.recipe(**changes))
    assert losses(run)[0] < losses(place.run())[0] - 0.1
    with pytest.raises(ValueError) as error:
        place.train(tmp_path / "other", place.recipe("gated", **changes))
    assert "has the mechanism" in str(error.value)


def test_bfloat16_keeps_weights_and_averages_in_float32(place):
    run = RunFolder(place.run(dtype="bfloat16"))
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert losses(run.path) != losses(place.run())
    assert losses(run.path) == pytest.approx(losses(place.run()), rel=0.02)


def test_steps_are_reported_to_callbacks_and_integrations(place, tmp_path):
    pytest.importorskip("tensorboard")
    entries = []
    for name in ("one", "two"):
        place.train(tmp_path / name, place.recipe(steps=4), on_step=entries.append, report_to=("tensorboard",))
        assert len(list((tmp_path / name / "tensorboard").glob("events.out*"))) == 1
    assert entries[:4] == RunFolder(tmp_path / "one").log()
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
def test_compiled_layers_give_the_same_losses_and_keep_their_names(place):
    compiled, plain = place.run(compile=True, steps=4), place.run(steps=4)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    assert RunFolder(compiled).log()[-1]["eval_loss"] == pytest.approx(
        RunFolder(plain).log()[-1]["eval_loss"], rel=1e-5
    )
    a, b = (AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (compiled, plain))
    assert a.keys() == b.keys()
