"""Writes one line per step to log.jsonl, and removes the lines after a checkpoint when a run resumes from it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from ...files import open_for_appending, plain_numbers, read_lines, replacing

TIMING = ("tokens_per_second", "mfu", "seconds")  # differ between two otherwise equal runs


class StepLog:
    """Appends one line per step, each with a single write, so that a killed process leaves complete lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def rewind(self, step: int) -> None:
        """Removes the lines after a step, so that the log continues where the checkpoint does."""
        kept = [line for line in read_lines(self.path) if _step_of(line) <= step]
        if [_step_of(line) for line in kept] != list(range(1, step + 1)):
            raise ValueError(
                f"{self.path} does not hold steps 1 to {step} in order, so it is not the log of this checkpoint; "
                "restore the file, or start again in an empty folder"
            )
        self.close()
        with replacing(self.path) as file:
            file.writelines(as_line(line) for line in kept)

    def add(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self._file = open_for_appending(self.path)  # stays open during the run
        line = as_line(entry)
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path} could not be written at step {entry['step']}: is the disk full?")

    def sync(self) -> None:
        """fsync, because a checkpoint must not be newer than its log."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step_of(line: dict[str, Any]) -> float:
    """The step of a line; infinity if it has none, so that it is removed."""
    return line["step"] if type(line.get("step")) is int else math.inf


def as_line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(plain_numbers(entry), allow_nan=False) + "\n").encode()


def keep_whole_lines(path: Path) -> None:
    """Removes an incomplete last line, left by a full disk or a crash, so that the next line starts on its own."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
