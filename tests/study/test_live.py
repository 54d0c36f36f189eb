"""The live table shows the progress of a study, or prints lines without a terminal."""

from __future__ import annotations

from rich.console import Console

from affine_attention.study.live import LiveTable


def shown(table: LiveTable) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_lines_without_a_terminal(capsys):
    with LiveTable([("softmax-seed0", 10)]) as table:
        table.start("softmax-seed0", "training")
        for step in range(1, 11):
            table.step("softmax-seed0", {"step": step, "loss": 3.0 - step / 10, "tokens_per_second": 1000.0})
        table.finish("softmax-seed0", perplexity=1812.345)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "softmax-seed0: training"
    assert lines[1].startswith("softmax-seed0: step 2 of 10, loss 2.8000")
    assert lines[-1] == "softmax-seed0: done, held-out word perplexity 1,812.35"
    assert len(lines) == 7


def test_the_table_has_a_row_for_each_run_and_the_time_left():
    table = LiveTable([("a", 10), ("[b]", 10)], quiet=True)
    assert table.seconds_left() is None
    table.start("a", "training")
    for step in range(1, 6):
        table.step("a", {"step": step, "loss": 2.5})
    assert table.seconds_left() >= 0
    text = shown(table)
    assert "5/10" in text
    assert "2.5000" in text
    assert "[b]" in text, "names are text, not markup"
    assert "5/20" in text


def test_quiet_prints_nothing(capsys):
    with LiveTable([("a", 2)], quiet=True) as table:
        table.start("a", "training")
        table.finish("a")
    assert capsys.readouterr().err == ""


def test_a_resumed_run_does_not_count_its_earlier_steps():
    table = LiveTable([("a", 100)], quiet=True)
    table.start("a", "training")
    table.step("a", {"step": 51, "loss": 1.0})
    table.step("a", {"step": 52, "loss": 1.0})
    table.step("a", {"step": 53, "loss": 1.0})
    assert table.seconds_left() < 60


def test_parallel_runs_are_timed_separately(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("affine_attention.study.live.time.monotonic", lambda: clock[0])
    tables = [LiveTable([("a", 11), ("b", 11), ("c", 10)], quiet=True, parallel=count) for count in (1, 2)]
    for table in tables:
        table.start("a", "training")
        clock[0] += 50.0  # data is prepared, a teacher runs: no steps yet
        table.start("b", "training")
        for step in range(1, 7):
            clock[0] += 2.0
            table.step("a", {"step": step, "loss": 1.0})
            table.step("b", {"step": step, "loss": 1.0})
    # 20 steps are left at 2 s each.
    assert tables[0].seconds_left() == 40.0
    assert tables[1].seconds_left() == 20.0
    assert tables[1].rows["a"].seconds == 10.0


def test_the_time_left_comes_from_recent_steps(monkeypatch):
    """After a slow phase (other programs on the machine, say), the estimate must follow the present speed."""
    clock = [0.0]
    monkeypatch.setattr("affine_attention.study.live.time.monotonic", lambda: clock[0])
    table = LiveTable([("a", 300), ("b", 100)], quiet=True)
    for step in range(1, 201):
        clock[0] += 30.0 if step <= 150 else 1.0
        table.step("a", {"step": step, "loss": 1.0})
    assert table.seconds_left() == 200.0, "100 steps of a and 100 of b, at one second each"
    for step in range(201, 301):
        clock[0] += 4.0
        table.step("a", {"step": step, "loss": 1.0})
    assert table.seconds_left() == 400.0
