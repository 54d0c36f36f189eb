"""Gives hostile settings, files and folders to the commands: each answers with one message, in bounded time.

A command survives when it ends with exit code 0 or 2, prints no traceback and no control character, takes less than
a minute, and leaves what is not its own alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import lzma
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from affine_attention.cli import main
from affine_attention.lab.recipe import Recipe
from tests.lab.report.folders import make_run

from .tally import Battery

LONGEST_SECONDS = 60.0
SETTINGS, FILES = 500, 200
VALUES = (
    "", " ", "-1", "0", "1e400", "NaN", "Infinity", "null", "true", "[]", "{}", "[[[]]]", '"x"', "../../x", "a\x1b[2Jb",
    "\u202etxt", "9" * 5000, "[" * 5000, str(2**64), "1.5", "nope", "~nobody-has-this/x", "/dev/zero", "/dev/null",
    "💥" * 300,
    '{"a": 1}', "x" * 100_000,
)  # fmt: skip
CONTENTS = (
    b"", b"{", b"[", b"null", b"[]", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b"9" * 10_000, b'{"step": "x"}\n{"step": 1e999}\n', b'{"step": ' + b"9" * 400 + b"}\n", b"\x00" * 10_000,
    json.dumps({"name": "n" * 2_000_000}).encode(), json.dumps({f"k{n}": n for n in range(100_000)}).encode(),
    json.dumps({"mechanism": [], "steps": {}, "seed": None}).encode(),
    json.dumps({"perplexity": {"\x1b[31m": 3, "a": {"token": "x"}}, "tasks": [1]}).encode(),
    json.dumps({"row_sum": {"mean": [[1.0] * 5000, *[[]] * 5000]}, "maps": {"tokens": 3}}).encode(),
)  # fmt: skip
NAMES = ("recipe.json", "manifest.json", "log.jsonl", "events.jsonl", "evaluation.json", "inspection.json",
         "inspection/maps.safetensors")  # fmt: skip


def attack(battery: Battery, folder: Path, seed: int, share: float = 1.0) -> None:
    numbers = random.Random(seed)
    precious = folder / "precious"
    precious.mkdir(parents=True)
    (precious / ".tmp-notes").write_text("keep")
    fields = list(Recipe().to_dict())
    pairs = list(itertools.product(fields, VALUES))
    numbers.shuffle(pairs)
    battery.run(
        "a hostile setting",
        (
            lambda p=p: command(["train", "--dry-run", "--set", f"{p[0]}={p[1]}"])
            for p in pairs[: round(SETTINGS * share)]
        ),
    )
    others = list(_commands(folder, precious))
    battery.run(
        "a hostile path or data file", (lambda c=c: command(c) for c in others[: max(6, round(len(others) * share))])
    )
    good = make_run(folder / "good", "softmax", steps=20)
    cases = [*itertools.product(NAMES, range(len(CONTENTS))), *((name, kind) for name in NAMES for kind in KINDS)]
    numbers.shuffle(cases)
    battery.run(
        "a hostile file of a run",
        (lambda c=c: run_file(folder, good, *c) for c in cases[: round(FILES * share)]),
    )
    battery.run("foreign files stay", [lambda: None if (precious / ".tmp-notes").exists() else "deleted foreign data"])


def command(arguments: list[str]) -> str | None:
    out, begin = io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(arguments)
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    seconds, text, shown = time.monotonic() - begin, out.getvalue(), " ".join(arguments)[:200]
    if code not in (0, 2):
        return f"affine {shown}: exit code {code}: {text[-300:]}"
    if "Traceback" in text:
        return f"affine {shown}: a traceback"
    if code == 2 and any(ord(letter) < 32 and letter not in "\n\t\r" for letter in text.replace("\x1b[?25h", "")):
        return f"affine {shown}: control characters in {text[:200]!r}"
    if seconds > LONGEST_SECONDS:
        return f"affine {shown}: took {seconds:.0f} s"
    return None


def run_file(folder: Path, good: Path, name: str, content: int | str) -> str | None:
    """A report of a good run and one with a hostile file: the good one is shown whatever the other holds."""
    bad = folder / f"bad-{NAMES.index(name)}-{str(content).replace(' ', '-')}"
    make_run(bad, "affine", steps=5)
    path = bad / name
    path.unlink(missing_ok=True)
    if isinstance(content, int):
        path.write_bytes(CONTENTS[content])
    else:
        KINDS[content](path)
    page = folder / "page.html"
    fault = command(["report", str(good), str(bad), "-o", str(page), "--markdown", str(folder / "page.md")])
    no_run = name == "recipe.json" and "archive" in str(content)  # it is not read compressed: a folder without a run
    if fault is None and not no_run and (not page.is_file() or "softmax" not in page.read_text()):
        fault = f"{name}, {content}: the good run is not on a page"
    for made in (page, folder / "page.md"):
        made.unlink(missing_ok=True)
    return fault


@functools.cache
def bomb() -> bytes:
    """A few kilobytes that expand to more than any file of a run may have."""
    return lzma.compress(bytes(700 * 2**20), preset=0)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a torn archive": lambda path: path.with_name(path.name + ".xz").write_bytes(lzma.compress(b"{}" * 99)[:-9]),
    "an archive that expands": lambda path: path.with_name(path.name + ".xz").write_bytes(bomb()),
}


def _commands(folder: Path, precious: Path) -> Iterator[list[str]]:
    data = folder / "data"
    data.mkdir()
    for number, content in enumerate(CONTENTS):
        for suffix in (".jsonl", ".txt", ".txt.gz", ".parquet"):
            file = data / f"{number}{suffix}"
            file.write_bytes(content)
            if number % 3 == 0 or suffix == ".jsonl":
                settings = ("steps=1", "warmup_steps=0", "decay_steps=0", "heldout=0")
                yield ["train", "--data", str(file), "--out", str(folder / "run"), "--device", "cpu", "--cache",
                       str(folder / "c"), *(part for setting in settings for part in ("--set", setting))]  # fmt: skip
    for path in ("", "/dev/zero", "/dev/null", "~nobody-has-this/x", str(precious), "hf:", "embedded:x", "**/\x1b[2J"):
        for option in ("--data", "--teacher", "--out", "--cache"):
            yield ["train", option, path, "--device", "cpu", "--dry-run"]
        yield ["gradients", path]
        yield ["report", path, "-o", str(folder / "r.html")]
        yield ["evaluate", path]
        yield ["inspect", path]
    yield ["train", "--out", str(precious), "--device", "cpu", "--cache", str(folder / "c")]
    for device in ("nope", "cuda:77", "meta", ""):
        yield ["train", "--device", device, "--out", str(folder / "run")]
        yield ["evaluate", str(precious), "--device", device]
    for key, value in (("vocab_size", 10**9), ("num_hidden_layers", 10**9), ("hidden_size", 0), ("hidden_size", -8),
                       ("num_attention_heads", 0), ("num_attention_heads", "many"), ("head_dim", 2**62)):  # fmt: skip
        yield ["train", "--device", "cpu", "--out", str(folder / "run"), "--set", f"student_changes.{key}={value}"]
    yield ["study", "--mechanisms", "affine+learning_rate=1 ,affine+learning_rate=1_", "--plan"]
    yield ["train", "--set", "name=../../escaped", "--device", "cpu"]
    yield ["train", "unknown\x1b[2J", "--unknown\u202e"]
    yield ["report", str(precious), "-o", "no\nsuch\nfolder"]
    yield ["study", "--seeds", ",".join(map(str, range(20_000))), "--plan"]
    yield ["train", *(part for n in range(5000) for part in ("--set", f"k{n}=1"))]
