"""A recipe as TrainingArguments and loss."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.trainer_arguments import make_loss, training_arguments

CPU = torch.device("cpu")


def test_the_loss_of_a_recipe():
    assert make_loss(Recipe()).terms.ce_weight == 1.0
    assert make_loss(Recipe()).terms.kd_weight == 0.0
    terms = make_loss(Recipe(teacher="x", kd_weight=0.5, ce_weight=0.25, temperature=2.0)).terms
    assert (terms.kd_weight, terms.ce_weight, terms.temperature) == (0.5, 0.25, 2.0)


def test_batch_errors_use_the_names_of_the_recipe(tmp_path):
    arguments = training_arguments(Recipe(global_batch=12, device_batch=2), RunFolder(tmp_path), 3, device=CPU)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 2)
    with pytest.raises(ValueError) as error:
        training_arguments(Recipe(global_batch=12, device_batch=5), RunFolder(tmp_path), 3, device=CPU)
    assert "global_batch = device_batch x accumulation x ranks" in str(error.value)
