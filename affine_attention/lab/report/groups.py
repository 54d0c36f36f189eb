"""Groups runs by setting (the seeds of a setting are one group), with a label, a colour and a dash pattern each."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from ...nn import PRESETS
from ..recipe import Recipe
from . import paper_numbers
from .collect import Run

BASELINE = "softmax"

# Colour-blind safe (after Okabe and Ito), as (on white, on dark).
COLOURS = {
    "softmax": ("#5c6570", "#aab3bf"),
    "sink": ("#d17f00", "#f0a830"),
    "affine": ("#0067b0", "#5ab0f0"),
    "gated": ("#00875f", "#2dc498"),
    "affine_gated": ("#b0458a", "#e389bf"),
    "off_by_one": ("#8d7a00", "#d9c83c"),
    "head_gated": ("#c24a00", "#ff8a4c"),
    "affine_no_bias": ("#2b9cc4", "#8ed8f2"),
    "affine_low_start": ("#1f4e9e", "#8fa9f5"),
    "affine_centred": ("#006d77", "#5fd0d8"),
    "affine_free": ("#4b3fa0", "#a79bf2"),
    "head_gated_double": ("#a83800", "#ffab7a"),
    "head_gated_softplus": ("#8f5a00", "#e8b75c"),
    "per_head_alpha": ("#5b7a00", "#b3d14f"),
    "constant_alpha": ("#7d6a76", "#c9b6c2"),
    "token_sink": ("#b86200", "#ffc46b"),
    "exclusive": ("#3d6b35", "#8fcf84"),
    "exclusive_gated": ("#00694a", "#4fe0a8"),
    "normed_gated": ("#006a8a", "#59c9ee"),
    "differential": ("#9c1f4f", "#f59ab8"),
    "signed_weights": ("#7a2a8c", "#d593e6"),
    "sigmoid_weights": ("#94530f", "#dfa468"),
    "softplus_weights": ("#54660c", "#c2d36a"),
    "normalized_weights": ("#2f5f66", "#86c3cb"),
}
OTHER_COLOURS = (("#6a4fb3", "#ab97f0"), ("#7a5230", "#c79a72"), ("#3f7d20", "#93cf70"), ("#a01830", "#f07f90"))
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4")

# Settings that affect how a run is stored, logged or distributed, but not what is trained.
BOOKKEEPING = {
    *("name", "seed", "data_seed", "mechanism", "device_batch", "gradient_checkpointing", "compile"),
    *("save_every", "keep_checkpoints", "probe_every", "eval_every", "streaming", "remember_teacher"),
}


@dataclass
class Group:
    """Runs that differ only in their seeds."""

    recipe_name: str
    mechanism_name: str
    variant: str
    runs: list[Run]
    colour: tuple[str, str] = OTHER_COLOURS[0]
    dash: str = ""
    label: str = ""

    @property
    def method(self) -> str:
        """The mechanism and its variant, without the recipe."""
        return self.mechanism_name + (f" ({self.variant})" if self.variant else "")

    @property
    def mechanism(self) -> dict[str, Any]:
        return self.runs[0].mechanism

    @property
    def settings(self) -> str:
        """All training settings except the mechanism; a baseline must have the same."""
        return _frozen(_training(self.runs[0]))

    @property
    def is_baseline(self) -> bool:
        return self.mechanism_name == BASELINE

    @property
    def finished(self) -> bool:
        return any(run.finished for run in self.runs)

    @property
    def paper_size(self) -> str | None:
        """0.5B, 1B or 3B if this is exactly the paper's setting; else None."""
        size, recipe = paper_numbers.SIZES.get(self.recipe_name), self.runs[0].recipe
        if size is None or recipe.get("teacher") is None or recipe.get("student") != paper_numbers.STUDENTS[size]:
            return None
        return size if all(recipe.get(key) == value for key, value in paper_numbers.SETTINGS.items()) else None


def group_runs(runs: list[Run]) -> list[Group]:
    """Groups in the order of the recipes, the baseline first in each recipe."""
    found: dict[tuple[str, str, str], Group] = {}
    for run in runs:
        key = (run.recipe_name, _frozen(run.mechanism), _frozen(_training(run)))
        found.setdefault(key, Group(run.recipe_name, run.mechanism_name, "", [])).runs.append(run)
    groups = list(found.values())
    for group in groups:
        group.runs.sort(
            key=lambda run: [(not isinstance(s, int), s if isinstance(s, int) else str(s)) for s in run.seeds]
        )
    names = list(dict.fromkeys(group.recipe_name for group in groups))
    rank = {name: index for index, name in enumerate(COLOURS)}
    groups.sort(key=lambda g: (names.index(g.recipe_name), rank.get(g.mechanism_name, len(rank))))
    _label(groups, several_recipes=len(names) > 1)
    _paint(groups)
    return groups


def baseline_of(group: Group, groups: list[Group]) -> Group | None:
    """The softmax group with the same recipe and the same settings except for the mechanism."""
    if group.is_baseline:
        return None
    for other in groups:
        if other.is_baseline and other.recipe_name == group.recipe_name and other.settings == group.settings:
            return other
    return None


def _label(groups: list[Group], several_recipes: bool) -> None:
    """Labels groups by what differs within a recipe and mechanism: `affine (learning_rate=0.002)`.

    Values of the preset, or of most runs of the recipe, are omitted: `affine` and `affine (activation=sigmoid)`.
    """
    for group in groups:
        related = [g for g in groups if (g.recipe_name, g.mechanism_name) == (group.recipe_name, group.mechanism_name)]
        tables = [_flat(g.runs[0]) for g in related]
        mine = _flat(group.runs[0])
        keys = dict.fromkeys(key for table in tables for key in table)
        usual = _preset(group.mechanism_name) | _of_most_runs(group.recipe_name, groups)
        differing = [
            key
            for key in keys
            if len({_frozen(table.get(key)) for table in tables}) > 1
            and (key not in usual or mine.get(key) != usual[key])
        ]
        group.variant = ", ".join(f"{key.removeprefix('mechanism.')}={_shown(mine.get(key))}" for key in differing)
        group.label = group.method
    if several_recipes:
        for group in groups:
            group.label = f"{group.recipe_name}: {group.label}"


def omitted_settings(groups: list[Group]) -> str:
    """A sentence about the settings that labels omit because most runs of a recipe share them; "" if there are none."""
    sentences = []
    for recipe in dict.fromkeys(group.recipe_name for group in groups):
        tables = [_flat(group.runs[0]) for group in groups if group.recipe_name == recipe]
        usual = _of_most_runs(recipe, groups)
        left_out = [
            f"{key.removeprefix('mechanism.')}={_shown(value)}"
            for key, value in usual.items()
            if len({_frozen(table[key]) for table in tables if key in table}) > 1
        ]
        if left_out:
            sentences.append(f"{recipe}: {', '.join(left_out)}")
    return f"Unless a label says otherwise: {'; '.join(sentences)}." if sentences else ""


def _is_of_presets(key: str) -> bool:
    """True for settings that differ between presets, so that the name of the mechanism implies them.

    N is not one of them, although some presets count the visible keys: with the others it is the training length.
    """
    return key != "mechanism.bias_length" and len({_frozen(_preset(name).get(key)) for name in PRESETS}) > 1


def _of_most_runs(recipe: str, groups: list[Group]) -> dict[str, Any]:
    """The values that more than half of a recipe's runs have, for settings that the mechanism's name does not imply."""
    held: dict[str, dict[str, int]] = {}
    values: dict[str, Any] = {}
    for group in groups:
        if group.recipe_name != recipe:
            continue
        for key, value in _flat(group.runs[0]).items():
            if _is_of_presets(key):
                continue
            frozen = _frozen(value)
            values[frozen] = value
            counts = held.setdefault(key, {})
            counts[frozen] = counts.get(frozen, 0) + len(group.runs)
    found = {}
    for key, counts in held.items():
        most = max(counts, key=counts.__getitem__)
        if 2 * counts[most] > sum(counts.values()):
            found[key] = values[most]
    return found


def _paint(groups: list[Group]) -> None:
    unknown = [name for name in dict.fromkeys(g.mechanism_name for g in groups) if name not in COLOURS]
    used: dict[str, int] = {}
    for group in groups:
        name = group.mechanism_name
        group.colour = COLOURS[name] if name in COLOURS else OTHER_COLOURS[unknown.index(name) % len(OTHER_COLOURS)]
        group.dash = DASHES[used.get(name, 0) % len(DASHES)]
        used[name] = used.get(name, 0) + 1


def _training(run: Run) -> dict[str, Any]:
    """The training settings; those that were added after the run was made have their default."""
    return {key: value for key, value in (_usual_settings() | run.recipe).items() if key not in BOOKKEEPING}


@functools.cache
def _usual_settings() -> dict[str, Any]:
    return Recipe().to_dict()


def _flat(run: Run) -> dict[str, Any]:
    inner = {f"mechanism.{key}": value for key, value in run.mechanism.items()}
    return {key: value for key, value in (_training(run) | inner).items() if key != "mechanism.name"}


def _preset(name: str) -> dict[str, Any]:
    return {f"mechanism.{key}": value for key, value in PRESETS[name].to_dict().items()} if name in PRESETS else {}


def _frozen(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
