"""Shows the progress of a study: a table of its runs and the time left, or plain lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from ..visible import printable

RECENT_STEPS = 20  # per parallel run: the time left is estimated from the durations of these


@dataclass
class Row:
    """The state of one run."""

    name: str
    steps: int
    stage: str = "waiting"
    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    perplexity: float | None = None  # per word
    seconds: float = 0.0


class LiveTable:
    """A context manager whose `start`, `step` and `finish` update the table; prints plain lines without a terminal."""

    def __init__(self, runs: Sequence[tuple[str, int]], quiet: bool | None = None, parallel: int = 1) -> None:
        self.console = Console(file=sys.stderr)
        self.rows = {name: Row(name, steps) for name, steps in runs}
        self.quiet, self.parallel = bool(quiet), parallel
        self.live: Live | None = None
        self._first: dict[
            str, float
        ] = {}  # time of the first step in this process: data and compilation come before it
        self._last: dict[str, float] = {}  # time of the last step
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS * max(1, parallel))

    def __enter__(self) -> LiveTable:
        if not self.quiet and self.console.is_terminal:
            self.live = Live(self, console=self.console, refresh_per_second=4, transient=False)
            self.live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*exception)

    def start(self, name: str, stage: str) -> None:
        """A stage of a run starts: `training`, `evaluating`, `inspecting`."""
        self.rows[name].stage = stage
        self._say(f"{name}: {stage}")

    def step(self, name: str, record: dict[str, Any]) -> None:
        """One entry of the run's log."""
        row = self.rows[name]
        row.step, row.loss = record["step"], record.get("loss")
        row.tokens_per_second = record.get("tokens_per_second")
        now = time.monotonic()
        if name in self._last:
            self._durations.append(now - self._last[name])
        self._last[name] = now
        row.seconds = now - self._first.setdefault(name, now)
        if self.live is None and row.step % max(1, row.steps // 5) == 0 and row.loss is not None:
            self._say(f"{name}: step {row.step} of {row.steps}, loss {row.loss:.4f}{self._left_text()}")

    def finish(
        self, name: str, stage: str = "done", loss: float | None = None, perplexity: float | None = None
    ) -> None:
        row = self.rows[name]
        row.stage, row.step = stage, row.steps if stage == "done" else row.step
        row.loss = row.loss if loss is None else loss
        row.perplexity = row.perplexity if perplexity is None else perplexity
        text = f", held-out word perplexity {row.perplexity:,.2f}" if row.perplexity is not None else ""
        self._say(f"{name}: {stage}{text}")

    def seconds_left(self) -> float | None:
        """Estimated from the most recent steps of this process; None before there are any."""
        if not self._durations:
            return None
        pace = sum(self._durations) / len(self._durations)
        left = [row.steps - row.step for row in self.rows.values() if row.stage not in ("failed", "stopped")]
        return pace * sum(left) / max(1, min(self.parallel, sum(steps > 0 for steps in left)))

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("run", "stage"):
            table.add_column(title)
        for title in ("step", "loss", "tokens/s", "held-out word ppl", "time"):
            table.add_column(title, justify="right")
        for row in self.rows.values():
            table.add_row(
                Text(row.name),
                Text(row.stage, style={"done": "green", "waiting": "dim", "failed": "red"}.get(row.stage, "cyan")),
                f"{row.step}/{row.steps}",
                _number(row.loss, ".4f"),
                _number(row.tokens_per_second, ",.0f"),
                _number(row.perplexity, ",.2f"),
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
