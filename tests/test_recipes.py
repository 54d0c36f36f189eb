"""The paper's runs have the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from affine_attention import Mechanism
from affine_attention.hf import STUDENTS
from affine_attention.nn.mechanism import PRESETS
from affine_attention.recipes import RECIPES, paper_1b, paper_3b, recipe


@pytest.mark.parametrize("name", ["paper_0_5b", "paper_1b", "paper_3b"])
def test_the_papers_settings(name):
    built = recipe(name)
    assert built.tokens == 9000 * 1024 * 2048
    assert (built.learning_rate, built.weight_decay, built.warmup_steps) == (1e-3, 0.1, 100)
    assert (built.mechanism.momentum, built.mechanism.bias_length) == (0.9, 2048)
    assert built.teacher


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("mechanism", PRESETS)
def test_every_recipe_takes_every_mechanism(name, mechanism):
    built = recipe(name, mechanism)
    assert built.name == name
    assert (built.student in STUDENTS) is not name.startswith("convert")
    assert built.mechanism.name == mechanism
    word = PRESETS[mechanism].bias_length
    assert built.mechanism.bias_length == (word if isinstance(word, str) else built.sequence_length)
    size, accumulation = built.micro_batches(1)
    assert size * accumulation == built.global_batch


def test_the_training_length_follows_unless_it_is_set():
    assert recipe("paper_1b", "affine", {"sequence_length": 4096}).mechanism.bias_length == 4096
    settings = {"sequence_length": 4096, "mechanism.bias_length": "visible"}
    assert recipe("paper_1b", "affine", settings).mechanism.bias_length == "visible"
    mechanism = Mechanism.named("affine", bias_length=77)
    assert recipe("tiny_cpu", mechanism).mechanism == mechanism
    assert paper_3b(mechanism).mechanism == mechanism
    assert paper_1b("affine").mechanism.bias_length == 2048


def test_an_unknown_recipe_gets_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'paper_1b'"):
        recipe("paper_1B")


def test_conversions_start_from_a_checkpoint_and_are_distilled_from_it():
    built = recipe("convert_gpu", "affine", {"student": "some/folder"})
    assert built.teacher_source == "some/folder"
    assert built.tokens == 580 * 64 * 1024
    assert recipe("convert_gpu", "affine", {"teacher": None}).teacher_source is None
    tiny = recipe("convert_cpu")
    here = tiny.located(Path("/runs/affine-seed0"))
    assert here.student == here.teacher == "/runs/teacher/model"
    assert tiny.located(Path("/other/x")).teacher == "/other/teacher/model"
