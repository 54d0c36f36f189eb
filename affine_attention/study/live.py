"""Shows a study while it runs: a table of its runs and a bar with the time left, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..visible import printable


@dataclass
class Row:
    """What is known of one run."""

    name: str
    steps: int
    stage: str = "waits"
    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    perplexity: float | None = None
    seconds: float = 0.0


class LiveTable:
    """A context that is told what happens by `start`, `step`, `finish`; plain lines without a terminal."""

    def __init__(self, runs: Sequence[tuple[str, int]], quiet: bool | None = None, parallel: int = 1) -> None:
        self.console = Console(file=sys.stderr)
        self.rows = {name: Row(name, steps) for name, steps in runs}
        self.quiet, self.parallel = bool(quiet), parallel
        self.live: Live | None = None
        self._spent: dict[str, float] = {}  # seconds of steps that were made now, not in an earlier call
        self._made: dict[str, int] = {}
        self._began: dict[str, float] = {}

    def __enter__(self) -> LiveTable:
        if not self.quiet and self.console.is_terminal:
            self.live = Live(self, console=self.console, refresh_per_second=4, transient=False)
            self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*exception)

    def start(self, name: str, stage: str) -> None:
        """A stage of a run begins: `trains`, `evaluates`, `inspects`."""
        self.rows[name].stage = stage
        self._began[name] = time.monotonic()
        self._say(f"{name}: {stage}")

    def step(self, name: str, record: dict[str, Any]) -> None:
        """One line of the run's log."""
        row = self.rows[name]
        first = row.step == 0 or name not in self._made
        row.step, row.loss = record["step"], record.get("loss")
        row.tokens_per_second = record.get("tokens_per_second")
        self._made[name] = self._made.get(name, 0) + (0 if first else 1)
        now = time.monotonic()
        if first:  # what came before its first step is no pace: data, a teacher, compilation
            self._began[name] = now
        row.seconds = self._spent[name] = now - self._began[name]
        if self.live is None and row.step % max(1, row.steps // 5) == 0 and row.loss is not None:
            self._say(f"{name}: step {row.step} of {row.steps}, loss {row.loss:.4f}{self._left_text()}")

    def finish(
        self, name: str, stage: str = "done", loss: float | None = None, perplexity: float | None = None
    ) -> None:
        row = self.rows[name]
        row.stage, row.step = stage, row.steps if stage == "done" else row.step
        row.loss = row.loss if loss is None else loss
        row.perplexity = row.perplexity if perplexity is None else perplexity
        text = f", held-out perplexity {row.perplexity:.2f}" if row.perplexity is not None else ""
        self._say(f"{name}: {stage}{text}")

    def seconds_left(self) -> float | None:
        """From the pace of the steps made so far; None before there are any."""
        made = sum(self._made.values())
        if made < 2:
            return None
        pace = sum(self._spent[name] for name in self._made) / made
        left = [row.steps - row.step for row in self.rows.values() if row.stage not in ("failed", "stopped")]
        return pace * sum(left) / max(1, min(self.parallel, sum(steps > 0 for steps in left)))

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("run", "stage"):
            table.add_column(title)
        for title in ("step", "loss", "tokens/s", "held-out ppl", "time"):
            table.add_column(title, justify="right")
        for row in self.rows.values():
            table.add_row(
                Text(row.name),
                Text(row.stage, style={"done": "green", "waits": "dim", "failed": "red"}.get(row.stage, "cyan")),
                f"{row.step}/{row.steps}",
                _number(row.loss, ".4f"),
                _number(row.tokens_per_second, ",.0f"),
                _number(row.perplexity, ".2f"),
                _clock(row.seconds) if row.seconds else "",
            )
        left = TextColumn("{task.fields[left]}")
        bar = Progress(TextColumn("steps"), BarColumn(bar_width=40), MofNCompleteColumn(), left)
        done, total = sum(row.step for row in self.rows.values()), sum(row.steps for row in self.rows.values())
        bar.add_task("", total=total, completed=done, left=self._left_text().lstrip(", "))
        return Group(table, bar)

    def _left_text(self) -> str:
        left = self.seconds_left()
        return "" if left is None else f", {_clock(left)} left"

    def _say(self, text: str) -> None:
        if self.live is None and not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
