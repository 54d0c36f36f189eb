"""Counts what was tried, what survived and what fell short, and turns the counts into a Markdown table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Row:
    """One kind of attack. `failures` says what fell short, one line each."""

    battery: str
    what: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""  # why nothing was tried

    @property
    def survived(self) -> int:
        return self.tried - len(self.failures)


@dataclass
class Battery:
    """Runs attacks until a number or a time is reached. An attack returns None, or what fell short."""

    name: str
    deadline: float
    rows: list[Row] = field(default_factory=list)

    def run(self, what: str, attacks: Iterable[Callable[[], str | None]]) -> Row:
        row = Row(self.name, what)
        self.rows.append(row)
        for attack in attacks:
            if time.monotonic() > self.deadline:
                break
            self.note(row, attack)
        return row

    def note(self, row: Row, attack: Callable[[], str | None]) -> None:
        row.tried += 1
        try:
            fault = attack()
        except Exception as error:  # an attack never ends the others
            fault = f"{type(error).__name__}: {error}"
        if fault:
            row.failures.append(" ".join(f"{row.what}: {fault}".split())[:600])

    def skip(self, what: str, why: str) -> None:
        self.rows.append(Row(self.name, what, skipped=why))


def table(rows: list[Row]) -> str:
    """One line for each kind of attack, one for each battery, and one for all."""
    lines = ["| battery | attack | tried | survived | fell short |", "| :--- | :--- | ---: | ---: | ---: |"]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        counts = f"{row.tried:,} | {row.survived:,} | {len(row.failures):,}" if not row.skipped else "– | – | –"
        lines.append(f"| {row.battery} | {row.what}{f' ({row.skipped})' if row.skipped else ''} | {counts} |")
        if following is None or following.battery != row.battery:
            lines.append(_sum(f"**{row.battery}**", [other for other in rows if other.battery == row.battery]))
    return "\n".join([*lines, _sum("all", rows)])


def _sum(name: str, rows: list[Row]) -> str:
    tried, failed = sum(row.tried for row in rows), sum(len(row.failures) for row in rows)
    return f"| {name} | | {tried:,} | {tried - failed:,} | {failed:,} |"
