"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import sys

from affine_attention.lab.training.progress import Progress, describe, wants_progress

ENTRY = {"loss": 3.21456, "learning_rate": 1e-3, "tokens_per_second": 12345.6}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_it_shows_loss_rate_speed_and_time_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert wants_progress(None)
    assert not wants_progress(True)
    bar = Progress(10, shown=True, name="tiny")
    bar.start(done=4)
    for _ in range(6):
        bar.add(ENTRY)
    bar.say("a word")
    bar.close()
    shown = terminal.getvalue()
    assert "10/10" in shown
    assert "loss 3.2146, lr 1.00e-03, 12.3k tokens/s" in shown
    assert "<00:00" in shown
    assert "a word" in shown


def test_there_is_no_bar_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not wants_progress(None)
    assert wants_progress(False)
    bar = Progress(10, shown=wants_progress(None))
    bar.start(0)
    bar.add(ENTRY)
    bar.close()
    assert sys.stderr.getvalue() == ""
    bar.say("important")
    assert sys.stderr.getvalue() == "important\n"


def test_speeds_have_units():
    assert "512 tokens/s" in describe(ENTRY | {"tokens_per_second": 512.4})
    assert "1.23M tokens/s" in describe(ENTRY | {"tokens_per_second": 1234567.0})
