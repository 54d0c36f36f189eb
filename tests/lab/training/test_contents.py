"""A checkpoint that was changed together with its hashes is rejected before loading, and the log is kept."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.contents import check_random_state
from affine_attention.lab.training.state import load_optimizer_state, optimizer_state, random_state
from affine_attention.lab.training.train import train

from .hostile import STATES, TENSORS, change_json, change_tensors
from .runs import differences, tiny_recipe, write_text


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of 6 steps that has its checkpoint of step 4 alone."""
    folder = tmp_path_factory.mktemp("contents")
    recipe = tiny_recipe(write_text(folder / "text.txt"), keep_checkpoints=1)

    def stop(entry):
        if entry["step"] == 5:
            raise Stopped

    with pytest.raises(Stopped):
        train(recipe, folder / "run", quiet=True, device="cpu", cache=folder / "cache", on_step=stop)
    return folder, recipe


def resume(place, run):
    folder, recipe = place
    return train(recipe, run, quiet=True, device="cpu", cache=folder / "cache")


def copy(place, tmp_path):
    shutil.copytree(place[0] / "run", tmp_path / "run")
    return tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000004"


@pytest.mark.parametrize("case", [*TENSORS, *STATES])
def test_what_does_not_belong_is_rejected_and_nothing_is_changed(case, place, tmp_path):
    run, checkpoint = copy(place, tmp_path)
    name, change, words = (TENSORS | STATES)[case]
    (change_tensors if case in TENSORS else change_json)(checkpoint, name, change)
    log, weights = (run / "log.jsonl").read_bytes(), (checkpoint / "model.safetensors").read_bytes()
    with pytest.raises(ValueError) as error:
        resume(place, run)
    assert words in str(error.value)
    assert (run / "log.jsonl").read_bytes() == log
    assert (checkpoint / "model.safetensors").read_bytes() == weights
    assert RunFolder(run).events()[-1]["event"] == "error"


def test_an_unchanged_copy_resumes(place, tmp_path):
    run, _ = copy(place, tmp_path)
    folder, recipe = place
    resume(place, run)
    whole = train(recipe, folder / "whole", quiet=True, device="cpu", cache=folder / "cache")
    assert differences(run, whole) == []


@pytest.mark.parametrize("shape", [(1,), (5, 4), (0,)])
def test_an_optimizer_takes_no_state_of_another_shape(shape):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    tensors, settings = optimizer_state(model, optimizer)
    before = {key: tensor.clone() for key, tensor in optimizer_state(model, optimizer)[0].items()}
    tensors = {**tensors, "exp_avg/weight": torch.full(shape, 7.0)}
    with pytest.raises(ValueError, match="exp_avg of weight must be"):
        load_optimizer_state(model, optimizer, tensors.items(), settings)
    after = optimizer_state(model, optimizer)[0]
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_the_state_of_this_process_is_a_random_state():
    check_random_state(random_state(), "here")
