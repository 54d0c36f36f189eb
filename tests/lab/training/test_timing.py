"""Steps are timed without the pauses between them."""

from __future__ import annotations

import time

import pytest

from affine_attention.lab.training.timing import Stopwatch


def test_pauses_do_not_count():
    watch = Stopwatch(seconds=10.0)
    watch.start()
    with watch.stopped():
        time.sleep(0.2)
    first = watch.lap()
    assert first < 0.1
    time.sleep(0.05)
    second = watch.lap()
    assert 0.05 <= second < 0.15
    assert watch.seconds == pytest.approx(10.0 + first + second)


def test_an_error_inside_a_pause_ends_it():
    watch = Stopwatch()
    with pytest.raises(TypeError), watch.stopped():
        time.sleep(time.sleep(0.1))
    assert watch.lap() < 0.05
