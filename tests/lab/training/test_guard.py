"""Signals are noted once, and what is not finite is named."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

from affine_attention.lab.training.guard import Stopped, StopSignals, find_not_finite


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_is_as_always(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.number == 0
        os.kill(os.getpid(), number)
        assert signals.number == number
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before


def test_a_second_control_c_interrupts_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signals.number == signal.SIGINT


def test_a_thread_changes_no_handlers():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_the_exit_code_is_that_of_a_shell():
    assert Stopped(signal.SIGINT, 7, "runs/x").code == 130
    stopped = Stopped(signal.SIGTERM, 7, "runs/x")
    assert stopped.code == 143
    assert str(stopped) == "stopped by SIGTERM after step 7, which is saved; train runs/x again to go on"


def make_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model(torch.ones(1, 2)).sum().backward()
    return model


def test_the_first_gradient_that_is_not_finite_is_named():
    model = make_model()
    model[0].bias.grad[1] = torch.inf
    model[1].weight.grad[0, 0] = torch.nan
    assert find_not_finite(model, 1.0) == "the gradient of 0.bias"


def test_a_bad_parameter_comes_before_the_loss_that_it_spoils():
    model = make_model()
    assert find_not_finite(model, float("nan")) == "the loss"
    with torch.no_grad():
        model[1].weight[0, 2] = torch.nan
    assert find_not_finite(model, float("nan")) == "parameter 1.weight"


def test_gradients_whose_sum_alone_overflows_are_not_blamed():
    assert "together" in find_not_finite(make_model(), 1.0)
