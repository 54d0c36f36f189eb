"""Errors name the parameter, loss or gradient that is not finite."""

from __future__ import annotations

import torch
from torch import nn

from affine_attention.lab.training.nonfinite import find_not_finite


def make_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model(torch.ones(1, 2)).sum().backward()
    return model


def test_the_first_gradient_that_is_not_finite_is_named():
    model = make_model()
    model[0].bias.grad[1] = torch.inf
    model[1].weight.grad[0, 0] = torch.nan
    assert find_not_finite(model, 1.0) == "the gradient of 0.bias"


def test_a_parameter_that_is_not_finite_is_named_before_the_loss():
    model = make_model()
    assert find_not_finite(model, float("nan")) == "the loss"
    with torch.no_grad():
        model[1].weight[0, 2] = torch.nan
    assert find_not_finite(model, float("nan")) == "parameter 1.weight"


def test_finite_gradients_are_not_named_when_only_their_norm_overflows():
    assert "total gradient norm" in find_not_finite(make_model(), 1.0)
