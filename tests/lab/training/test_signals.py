"""The first signal is recorded; a second one has its usual effect."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from affine_attention.lab.training.signals import Stopped, StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_recorded_and_the_second_has_its_usual_effect(number):
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
    assert str(stopped) == "stopped by SIGTERM after step 7, which is saved; train runs/x again to resume"
