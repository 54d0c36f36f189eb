"""Sink pressure: which steps hide keys, what is hidden, and a resumed run that is bitwise equal."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from affine_attention.hf import attach, student
from affine_attention.lab.distill.lm_head import STUDENT_MASK
from affine_attention.lab.distill.loss import DistillLoss
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.pressure import SinkPressure, check_pressure
from affine_attention.lab.training.train import train
from tests.hf.models import plain_model

from .runs import STUDENT, differences, tiny_recipe


def pressed(**changes):
    return SinkPressure(Recipe(**({"sink_pressure": "first_key", "pressure_share": 0.25} | changes)))


def test_the_choice_depends_on_the_data_seed_and_the_step_alone():
    steps = range(1, 4001)

    def chosen(**changes):
        pressure = pressed(**changes)
        return [step for step in steps if pressure.applies(step)]

    usual = chosen()
    assert 900 < len(usual) < 1100  # 1000 expected, standard deviation 27
    assert usual == chosen(sink_pressure="window", seed=5, steps=9000)
    assert usual != chosen(data_seed=1)
    assert usual[:8] == [1, 2, 3, 9, 12, 14, 16, 18]  # on every machine
    assert chosen(pressure_share=0.0) == []
    assert chosen(pressure_share=1.0) == list(steps)
    plain = SinkPressure(Recipe())
    assert not any(plain.applies(step) for step in steps)
    assert plain.log(1) == {}
    assert pressed().log(4) == {"pressure": False}
    assert pressed().log(9) == {"pressure": True}


@torch.no_grad()
def test_the_student_does_not_see_the_key_and_the_teacher_does():
    model = student("llama-1m", "affine", **STUDENT).eval()
    teacher = plain_model("llama", vocab_size=320).eval()  # plain: it could not even read the student's mask
    ids = torch.randint(320, (2, 32), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    hidden = pressed(pressure_after=1).hide(inputs)
    assert set(hidden) == {"input_ids", "labels", STUDENT_MASK}
    loss = DistillLoss(kd_weight=1.0, ce_weight=1.0)
    # The first key is evicted after one token, so the first token must not matter to the others.
    other = ids.clone()
    other[:, 0] = (ids[:, 0] + 7) % 320
    for pressure in (hidden, inputs):
        changed = {**pressure, "input_ids": other}
        ours = DistillLoss(kd_weight=0.0, ce_weight=1.0)
        labels = ids.clone()
        labels[:, :2] = -100  # the prediction of token 1 is made from token 0
        first = ours(model, None, {**pressure, "labels": labels}).total_sum
        second = ours(model, None, {**changed, "labels": labels}).total_sum
        assert torch.allclose(first, second, rtol=1e-6) is (pressure is hidden)
    assert loss(model, teacher, hidden).total_sum != loss(model, teacher, inputs).total_sum


@pytest.mark.parametrize(
    "changes", [{"sink_pressure": "first_key", "pressure_after": 4}, {"sink_pressure": "window", "pressure_window": 4}]
)
def test_a_resumed_run_is_bitwise_equal(place, tmp_path, changes):
    recipe = tiny_recipe(place.text, **changes, eval_every=0)
    whole = train(recipe, tmp_path / "whole", device="cpu", quiet=True)
    log = RunFolder(whole).log()
    chosen = [SinkPressure(recipe).applies(step) for step in range(1, recipe.steps + 1)]
    assert [line["pressure"] for line in log] == chosen
    assert (
        RunFolder(whole).manifest()["attention"]["pressure"]["implementation"] == "composed"
    )  # as every step on a CPU
    assert 0 < sum(chosen) < len(chosen)

    part = RunFolder(tmp_path / "part")
    shutil.copytree(whole, part.path)
    shutil.rmtree(part.model)
    shutil.rmtree(part.checkpoints / "step-00000006")
    train(recipe, part.path, device="cpu", quiet=True)
    assert differences(part.path, whole) == []
    assert [event["step"] for event in part.events() if event["event"] == "resume"] == [4]

    plain = train(dataclasses.replace(recipe, sink_pressure=None), tmp_path / "plain", device="cpu", quiet=True)
    assert [line["loss"] for line in RunFolder(plain).log()] != [line["loss"] for line in log]
    assert "pressure" not in RunFolder(plain).log()[0]


def test_models_with_windows_of_their_own_and_windows_that_hide_nothing_are_refused():
    model = attach(plain_model("mistral", sliding_window=5), "affine")
    recipe = Recipe(sink_pressure="first_key", sequence_length=32)
    with pytest.raises(ValueError, match="sink_pressure='first_key': keys cannot be hidden"):
        check_pressure(recipe, model)
    check_pressure(dataclasses.replace(recipe, sink_pressure=None), model)
    with pytest.raises(ValueError, match="pressure_window must be below sequence_length = 32"):
        Recipe(sink_pressure="window", pressure_window=32, sequence_length=32)
    with pytest.raises(ValueError, match="pressure_after must be below sequence_length = 16"):
        Recipe(sink_pressure="first_key", sequence_length=16)
    with pytest.raises(ValueError, match="pressure_after must be at least 1, got 0"):
        Recipe(pressure_after=0)
    with pytest.raises(ValueError, match=r"sink_pressure must be one of 'first_key', 'window' or none"):
        Recipe(sink_pressure="first")
    with pytest.raises(ValueError, match="pressure_share must be a finite number from 0 to 1"):
        Recipe(pressure_share=1.5)
