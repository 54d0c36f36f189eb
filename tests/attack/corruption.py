"""Damages and forges checkpoints, data, teachers and caches; nothing of it may be used, and no log may be lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from affine_attention.lab.data.store import cached
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.train import train
from tests.lab.training.hostile import STATES, TENSORS, change_json, change_tensors
from tests.lab.training.runs import differences, tiny_recipe, write_text

from .tally import Battery

DAMAGED, FLIPPED = 90, 60


class Stop(Exception):
    """Ends a run in the middle."""


class Corruption:
    """A run of 6 steps that was stopped at 5, with checkpoints of steps 2 and 4, and the whole one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.recipe = tiny_recipe(write_text(folder / "text.txt"))
        self.whole = self.train(folder / "whole")

        def stop(entry: dict) -> None:
            if entry["step"] == 5:
                raise Stop

        with contextlib.suppress(Stop):
            self.train(folder / "stopped", on_step=stop)
        self.number = 0

    def train(self, run: Path, **options) -> Path:
        return train(self.recipe, run, quiet=True, device="cpu", cache=self.folder / "cache", **options)

    def copy(self) -> RunFolder:
        self.number += 1
        return RunFolder(shutil.copytree(self.folder / "stopped", self.folder / f"copy-{self.number}"))

    def damaged(self, damage: Callable[[Path, random.Random], None], seed: int, both: bool) -> str | None:
        """Damages one checkpoint, or both: training ends as the whole run does, or stops and changes nothing."""
        run, numbers = self.copy(), random.Random(seed)
        checkpoints = sorted(run.checkpoints.iterdir())
        for checkpoint in checkpoints if both else checkpoints[-1:]:
            damage(checkpoint, numbers)
        log = run.log_file.read_bytes()
        try:
            self.train(run.path)
        except (ValueError, OSError) as error:
            if not both:
                return f"did not take the older checkpoint: {error}"
            if run.log_file.read_bytes() != log:
                return "the log was changed although no checkpoint could be used"
            shutil.rmtree(run.path)
            return None
        found = differences(run.path, self.whole)
        shutil.rmtree(run.path)
        if both:
            return "trained with a damaged checkpoint"
        return "; ".join(found) or None

    def forged(self, case: str) -> str | None:
        name, change, _ = (TENSORS | STATES)[case]

        def forge(checkpoint: Path, numbers: random.Random) -> None:
            if checkpoint.name.endswith("4"):
                (change_tensors if case in TENSORS else change_json)(checkpoint, name, change)
            else:
                shutil.rmtree(checkpoint)

        return self.damaged(forge, 0, both=True)


def _files(checkpoint: Path) -> list[Path]:
    return [path for path in sorted(checkpoint.iterdir()) if path.is_file()]


def flip(checkpoint: Path, numbers: random.Random) -> None:
    path = numbers.choice(_files(checkpoint))
    content = bytearray(path.read_bytes())
    content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content)


def cut(checkpoint: Path, numbers: random.Random) -> None:
    path = numbers.choice(_files(checkpoint))
    os.truncate(path, numbers.randrange(path.stat().st_size))


def lose(checkpoint: Path, numbers: random.Random) -> None:
    numbers.choice(_files(checkpoint)).unlink()


def add(checkpoint: Path, numbers: random.Random) -> None:
    (checkpoint / f"more-{numbers.randrange(9)}.pt").write_bytes(b"x")


def swap(checkpoint: Path, numbers: random.Random) -> None:
    one, two = numbers.sample(_files(checkpoint), 2)
    one.rename(checkpoint / "away")
    two.rename(one)
    (checkpoint / "away").rename(two)


def pipe(checkpoint: Path, numbers: random.Random) -> None:
    path = numbers.choice(_files(checkpoint))
    path.unlink()
    os.mkfifo(path)


DAMAGES = (flip, cut, lose, add, swap, pipe)


def attack(battery: Battery, folder: Path, seed: int, share: float = 1.0) -> None:
    corruption = Corruption(folder)
    numbers = random.Random(seed)
    cases = [*TENSORS, *STATES]
    numbers.shuffle(cases)
    forged = cases[: max(3, round(len(cases) * share))]
    battery.run("a forged checkpoint with right hashes", (lambda c=c: corruption.forged(c) for c in forged))
    battery.run(
        "a flipped bit in the cache",
        (lambda n=n: flipped_cache(folder / "bits", seed * 1000 + n) for n in range(round(FLIPPED * share))),
    )
    several = [(numbers.choice(DAMAGES), numbers.random(), number % 2 == 1) for number in range(round(DAMAGED * share))]
    battery.run("a damaged checkpoint", (lambda a=a: corruption.damaged(*a) for a in several))


def flipped_cache(folder: Path, seed: int) -> str | None:
    """A damaged entry is made again."""
    numbers = random.Random(seed)
    content = numbers.randbytes(500)

    def write(part: Path) -> None:
        (part / "ids").write_bytes(content)

    key = f"tokens-{seed:024x}"
    file = cached(folder, key, write) / "ids"
    flip(file.parent, numbers)
    found = (cached(folder, key, write) / "ids").read_bytes()
    return None if found == content else "a damaged entry was used"
