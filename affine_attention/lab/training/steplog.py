"""Turns steps into lines of log.jsonl, and takes back the lines of steps that were not saved."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from ...files import open_for_appending, read_lines, replacing
from ..run import plain_numbers

TIMING = ("tokens_per_second", "mfu", "seconds")  # what differs between two runs of the same numbers


class StepLog:
    """Appends one line a step. A line is one write, so that a process that is killed leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def rewind(self, step: int) -> None:
        """Drops what came after a step: the log goes on where the checkpoint does. Beside and renamed."""
        kept = [line for line in read_lines(self.path) if _step_of(line) <= step]
        if [_step_of(line) for line in kept] != list(range(1, step + 1)):
            raise ValueError(
                f"{self.path} does not hold steps 1 to {step} in order, so it is not the log of this checkpoint; "
                "put the file back, or start again in an empty folder"
            )
        self.close()
        with replacing(self.path) as file:
            file.writelines(as_line(line) for line in kept)

    def add(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self._file = open_for_appending(self.path)  # open as long as the run
        line = as_line(entry)
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path} could not take the line of step {entry['step']}: is the disk full?")

    def sync(self) -> None:
        """Waits for the disk: a checkpoint must not be newer than its log."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step_of(line: dict[str, Any]) -> float:
    """Infinity where a line names no step: it belongs to no checkpoint."""
    return line["step"] if type(line.get("step")) is int else math.inf


def as_line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(plain_numbers(entry), allow_nan=False) + "\n").encode()


def keep_whole_lines(path: Path) -> None:
    """Cuts off a last line that a full disk or a lost machine has left unfinished: the next one must stand alone."""
    if not path.is_file():
        return
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)
