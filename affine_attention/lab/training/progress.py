"""A progress bar on the terminal: loss, learning rate, tokens per second and the time left."""

from __future__ import annotations

import sys
from typing import Any

from ...visible import printable


def wants_progress(quiet: bool | None) -> bool:
    """Whether to show progress: as requested, else if stderr is a terminal."""
    return sys.stderr.isatty() if quiet is None else not quiet


class Progress:
    """A tqdm bar over the steps of a run, on stderr; without output if `shown` is False."""

    def __init__(self, steps: int, shown: bool, name: str = "train") -> None:
        self._steps, self._shown, self._name = steps, shown, name
        self._bar: Any = None

    def start(self, done: int) -> None:
        """Starts the bar after `done` steps, which are not used to estimate the time left."""
        if self._shown and self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._steps, initial=done, desc=self._name, unit="step", dynamic_ncols=True, file=sys.stderr
            )

    def add(self, entry: dict[str, Any]) -> None:
        """Shows an entry of the log."""
        if self._bar is not None:
            self._bar.set_postfix_str(describe(entry), refresh=False)
            self._bar.update()

    def say(self, text: str) -> None:
        """Prints a line to stderr, above the bar if there is one."""
        text = printable(text)
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def describe(entry: dict[str, Any]) -> str:
    """`loss 3.214, lr 1.00e-03, 12.3k tokens/s`."""
    speed = entry["tokens_per_second"]
    for unit in ("", "k", "M"):
        if speed < 1000 or unit == "M":
            break
        speed /= 1000
    return f"loss {entry['loss']:.4f}, lr {entry['learning_rate']:.2e}, {speed:.3g}{unit} tokens/s"
