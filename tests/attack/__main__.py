"""Runs every battery, prints tried, survived and fell short, and writes the table into docs/reliability.md.

python -m tests.attack [--minutes 20] [--seed 0] [--only crash,fuzz] [--no-write]
"""

from __future__ import annotations

import argparse
import os

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from . import browser, corruption, crash, fuzz, hostile_files
from .tally import Battery, Row, table

BATTERIES = {  # (attack, share of the time: what it takes on two cores that others use as well)
    "crash": (crash.attack, 0.72),
    "corruption": (corruption.attack, 0.09),
    "hostile files": (hostile_files.attack, 0.09),
    "fuzz": (fuzz.attack, 0.07),
    "browser": (browser.attack, 0.03),
}
PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- attack:begin -->", "<!-- attack:end -->"


def run(minutes: float, seed: int, only: list[str], share: float = 1.0) -> list[Row]:
    """The rows of every battery. What a battery does not use of its time goes to those after it."""
    torch.set_num_threads(1)
    ends, rows = time.monotonic() + 60 * minutes, list[Row]()
    names = [name for name in BATTERIES if name in only]
    for number, name in enumerate(names):
        (attack, part), begin = BATTERIES[name], time.monotonic()
        rest = sum(BATTERIES[other][1] for other in names[number:])
        battery = Battery(name, time.monotonic() + (ends - time.monotonic()) * part / rest)
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            attack(battery, Path(folder).resolve(), seed, share)
        rows += battery.rows
        for row in battery.rows:
            print(f"{row.battery}, {row.what}: {row.tried} tried, {len(row.failures)} fell short", flush=True)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return rows


def write(rows: list[Row], minutes: float, seed: int) -> None:
    text = PAGE.read_text(encoding="utf-8")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    made = (
        f"Seed {seed}, {minutes:.0f} minutes. Hardware: {machine}. Versions: torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}. Date: {datetime.now(UTC):%Y-%m-%d}."
    )
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{made}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="at most (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(BATTERIES), help="batteries with commas")
    parser.add_argument("--no-write", action="store_true", help="leave docs/reliability.md as it is")
    options = parser.parse_args()
    begin = time.monotonic()
    rows = run(options.minutes, options.seed, options.only.split(","))
    print(table(rows))
    failures = [line for row in rows for line in row.failures]
    for line in failures:
        print(f"FELL SHORT: {line}")
    if not options.no_write:
        write(rows, (time.monotonic() - begin) / 60, options.seed)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
