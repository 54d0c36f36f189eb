"""Turns `--set` options into settings of every student and grids of values: `learning_rate=5e-4,1e-3,2e-3`.

The rule: a comma separates the values of a grid, except inside [...], {...} and "...". Settings that are lists (`data`,
`heldout`) have no grid, so that a list cannot be mistaken for one: write `data=["a.txt","b.txt"]`. A text with a comma
is written in quotes: `student='"a,b"'`.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..lab.recipe import Recipe, parse_setting
from ..messages import shown

# What distinguishes students in other ways: seeds and mechanisms have options of their own, a name is for tables.
NOT_SWEPT = {
    "seed": "use --seeds",
    "data_seed": "use --seeds",
    "mechanism": "use --mechanisms",
    "name": "one name each",
}
# Shared with a teacher that the study trains: its students cannot differ in these.
OF_TEACHER = (
    "text_column", "tokenizer", "vocabulary_size", "sequence_length", "special_tokens", "student_changes.vocab_size",
)  # fmt: skip


def parse_settings(texts: Iterable[str]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """`key=value` options -> (settings, grids by key); refuses repeated keys, empty values and grids of lists."""
    settings: dict[str, Any] = {}
    sweeps: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, value = parse_setting(text)
        if key in settings or key in sweeps:
            raise ValueError(f"--set must name a setting once, got {shown(key)} twice; write {key}=A,B for a grid")
        parts = split_values(text.partition("=")[2])
        if any(not part.strip() for part in parts):
            raise ValueError(f"--set {key} must not have an empty value, got {shown(text)}; is a variable unset?")
        if len(parts) == 1:
            settings[key] = value
            continue
        if key in _lists():
            raise ValueError(
                f'{key} is a list and has no grid of values, got {shown(text)}; write {key}=["A","B"] for one list'
            )
        sweeps[key] = tuple(parse_setting(f"{key}={part.strip()}")[1] for part in parts)
    return settings, sweeps


def split_values(text: str) -> list[str]:
    """The parts of a value between commas that are outside of brackets, braces and quotes."""
    parts, start, depth, quoted, escaped = [], 0, 0, False, False
    for index, letter in enumerate(text):
        if quoted:
            quoted = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            quoted = True
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth = max(0, depth - 1)
        elif letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def check_sweeps(sweeps: Mapping[str, Sequence[Any]], trains_teacher: bool) -> None:
    """Raises ValueError for a grid that no study can have; unknown keys are found when the recipes are made."""
    for key, values in sweeps.items():
        if key in NOT_SWEPT:
            raise ValueError(f"{key} cannot be swept: {NOT_SWEPT[key]}")
        if key in _lists():
            raise ValueError(f"{key} is a list and has no grid of values")
        if len(values) < 2:
            raise ValueError(f"a grid of {key} needs at least two values, got {shown(list(values))}")
        texts = [repr(value) for value in values]
        if repeated := [text for text in dict.fromkeys(texts) if texts.count(text) > 1]:
            raise ValueError(f"the values of {key} must not repeat, got {shown(repeated[0])} twice")
        if trains_teacher and key in OF_TEACHER:
            raise ValueError(
                f"{key} cannot be swept, because the teacher that the study trains has it too; give a teacher with "
                "--teacher, or --teacher none"
            )


def points(sweeps: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the grids; one empty point without grids."""
    return [dict(zip(sweeps, values, strict=True)) for values in itertools.product(*sweeps.values())]


def label_of(point: Mapping[str, Any]) -> str:
    """`+learning_rate=0.0005`, appended to the name of a mechanism."""
    return "".join(f"+{key.removeprefix('mechanism.')}={_text(value)}" for key, value in point.items())


def _text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _lists() -> set[str]:
    hints = typing.get_type_hints(Recipe)
    kinds = {item.name: typing.get_args(hints[item.name]) or (hints[item.name],) for item in dataclasses.fields(Recipe)}
    return {
        name
        for name, parts in kinds.items()
        if typing.get_origin(hints[name]) is tuple or any(typing.get_origin(part) is tuple for part in parts)
    }
