"""Checks a shell command of the documentation as cheaply as possible: runs it small, asks for its plan, or parses it.

What is only parsed has a reason next to it. Every other command fails the test until it is added here.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from affine_attention import cli

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STORED = [str(ROOT / f"studies/smollm2/30m/{mechanism}-seed0") for mechanism in ("softmax", "affine")]
PARSED_ONLY = ("tune",)  # needs a GPU
# Modules without options, which tests/test_docs.py and tests/studies run themselves.
WITHOUT_OPTIONS = ("benchmarks.readme", "studies.smollm2.pictures", "studies.smollm2.details")


def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands_of(block: str) -> list[str]:
    """The commands of a block, without comments and with continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


def inline_commands(text: str) -> list[str]:
    """Commands between backticks: they may leave out arguments."""
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    return re.findall(r"`((?:make|affine|python -m|pip install|uv pip install) [^`]+)`", text)


def check_command(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, whole: bool = True) -> None:
    """Raises when a command of the docs cannot work. `whole=False`: only its program, subcommand and options exist."""
    words = shlex.split(command, comments=True)
    monkeypatch.chdir(folder)
    match words:
        case ["make", target, *_]:
            done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        case ["pip", "install", *rest] | ["uv", "pip", "install", *rest]:
            check_install(rest)
        case ["uv", "venv", *_]:
            pass  # uv is not part of the environment
        case ["pre-commit", "install"]:
            assert (ROOT / ".pre-commit-config.yaml").is_file()
        case ["affine", *rest]:
            check_affine(rest, monkeypatch) if whole else check_words(rest)
        case ["torchrun", *rest] if "torchtitan.train" in rest:
            pass  # tests/test_torchtitan.py parses it with torchtitan
        case ["torchrun" | "accelerate", *rest] if "-m" in rest:  # needs several devices: its training part is planned
            at = rest.index("-m")
            assert rest[at + 1] == "affine_attention"
            check_affine(rest[at + 2 :], monkeypatch)
        case ["transformers", "serve", _, *rest]:  # tests/hf/test_serving.py runs it
            from transformers.cli.serve import Serve

            options = [word.removeprefix("--").replace("-", "_") for word in rest if word.startswith("--")]
            assert set(options) <= set(inspect.signature(Serve).parameters)
        case ["python", "-m", module, *rest]:
            check_module(module, rest if whole else None, monkeypatch)
        case _:
            raise AssertionError(f"no check for the command {command!r}; add one to tests/docs_commands.py")


def check_install(words: list[str]) -> None:
    if "--constraint" in words:
        assert (ROOT / words[words.index("--constraint") + 1]).is_file()
    (package,) = [word for word in words if not word.startswith("--") and word != "constraints.txt"]
    name, _, extra = package.partition("[")
    assert name in (".", PROJECT["name"])
    assert not extra or extra.rstrip("]") in PROJECT["optional-dependencies"], package


def check_affine(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains and studies are planned, reports are made of stored runs, and a tiny run is evaluated and inspected."""
    options = cli.build_parser().parse_args(words)
    if options.command == "train" and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    elif options.command == "study" and "--plan" not in words:
        words = [*words, "--plan"]
    elif options.command in ("report", "compare", "gradients"):
        monkeypatch.setattr(sys, "argv", ["affine"])
        words = [words[0], *STORED, *(word for word in words[1:] if not word.startswith(("runs/", "studies/")))]
        Path("docs").mkdir(exist_ok=True)
    elif options.command == "publish":
        words = [words[0], tiny_run(), *words[2:]]
    elif options.command in ("evaluate", "inspect"):
        words = [words[0], tiny_run(), "--device", "cpu", *small_options(words[1:])]
    elif options.command == "convert":
        at = words.index("--out")
        words = ["convert", tiny_checkpoint(), "--device", "cpu", *words[2:at], "--out", tempfile.mkdtemp() + "/out"]
    elif options.command == "cache":
        words = [*words, "--cache", "cache"]
    if options.command not in PARSED_ONLY:
        assert cli.main(words) == 0


@functools.cache
def tiny_run() -> str:
    """A run of a few steps on text of its own, trained once."""
    folder = Path(tempfile.mkdtemp())
    text = folder / "stories.txt"
    text.write_text("\n\n".join(f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 20 for n in range(60)))
    small = {"heldout": 0.2, "vocabulary_size": 300, "student_changes.num_hidden_layers": 1,
             "student_changes.vocab_size": 300, "steps": 2, "warmup_steps": 1, "decay_steps": 0, "sequence_length": 32,
             "global_batch": 2, "save_every": 0, "probe_every": 0}  # fmt: skip
    changes = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    options = ["--data", str(text), "--mechanism", "affine", "--out", str(folder / "run"), "--quiet", "--device", "cpu"]
    assert cli.main(["train", *options, *changes]) == 0
    return str(folder / "run")


@functools.cache
def tiny_checkpoint() -> str:
    """A plain llama without a tokenizer."""
    import transformers

    folder = tempfile.mkdtemp()
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def small_options(words: list[str]) -> list[str]:
    """The options for a tiny run: its text for every corpus, few sequences. Tasks have tests of their own."""
    text = str(Path(tiny_run()).parent / "stories.txt")
    small = {"--sequences": "2", "--length": "32", "--instruments": words[words.index("--instruments") + 1]
             if "--instruments" in words else ""}  # fmt: skip
    kept: list[str] = []
    for option, value in itertools.pairwise([*words, ""]):
        if option == "--perplexity":
            kept += [option, f"{value.partition('=')[0]}={text}"]
        elif option in small:
            kept += [option, small[option]]
        else:
            assert not option.startswith("-") or option in ("--tasks", "--task-data", "--output"), option
    return [*kept, *(["--limit", "2"] if "--perplexity" in kept else [])]


def check_words(words: list[str]) -> None:
    """A subcommand that exists, and options that it has."""
    if words == ["--version"]:
        return
    commands: Any = next(a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert words[0] in commands.choices, words
    known = commands.choices[words[0]]._option_string_actions
    assert all(word in known for word in words if word.startswith("-")), words


def check_module(module: str, words: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists; with `words`, its parser takes them. Nothing is measured or trained here."""
    if module == "affine_attention":
        return check_words(words or ["recipes"])
    found = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    assert importlib.util.find_spec(found) is not None, f"no module {module}"
    if words is None or module in WITHOUT_OPTIONS:
        return None

    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any) -> None:
        parse(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(Parsed):
        importlib.import_module(found).main()
    return None
