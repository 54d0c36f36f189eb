"""Settings: groups that were trained with the same settings except for the mechanism, and are thus comparable."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...nn import PRESETS
from .groups import Group
from .measures import Measure
from .pooled import Pool, pool
from .text import short

FAMILY = ("student", "student_changes")  # runs with another student are never compared
KIND = ("activation", "bias", "sink", "gate")  # settings that define a mechanism


@dataclass
class Setting:
    """Groups of one recipe with equal settings.

    `student` distinguishes it from settings of other students, `label` also from other settings of the same student; ""
    if there is only one.
    """

    recipe_name: str
    values: dict[str, Any]
    groups: list[Group]
    student: str = ""
    label: str = ""
    _pools: dict[str, Pool | None] = field(default_factory=dict, repr=False)

    def pool(self, measure: Measure) -> Pool | None:
        """The residual variance of a measure over all finished groups of the setting."""
        if measure.label not in self._pools:
            self._pools[measure.label] = pool([measure.by_seed(group) for group in self.groups if group.finished])
        return self._pools[measure.label]

    @property
    def runs(self) -> int:
        return sum(len(group.runs) for group in self.groups)

    @property
    def family(self) -> str:
        return json.dumps([self.recipe_name, *(self.values.get(key) for key in FAMILY)], sort_keys=True, default=str)

    def plain(self, name: str) -> Group | None:
        """The group of an unchanged preset; of several, the closest one, with bias_length at the training length."""
        usual = PRESETS[name].to_dict()

        def distance(group: Group) -> tuple[int, int]:
            changed = sum(group.mechanism.get(k, v) != v for k, v in usual.items() if k not in ("name", "bias_length"))
            length = group.mechanism.get("bias_length")
            return changed, 0 if length == self.values.get("sequence_length") else 1 if isinstance(length, int) else 2

        alike = [
            group
            for group in self.groups
            if group.mechanism_name == name and all(group.mechanism.get(key, usual[key]) == usual[key] for key in KIND)
        ]
        return min(alike, key=distance, default=None)

    def variants(self, name: str) -> list[tuple[str, Group]]:
        """(name with differences, group) of the other groups of a preset: `affine (bias_length=visible)`."""
        plain = self.plain(name)
        usual = PRESETS[name].to_dict() if plain is None else plain.mechanism
        found = []
        for group in self.groups:
            if group.mechanism_name == name and group is not plain:
                mine = group.mechanism
                keys = [key for key in dict.fromkeys((*usual, *mine)) if mine.get(key) != usual.get(key)]
                found.append((f"{name} ({', '.join(_named(key, mine.get(key)) for key in keys)})", group))
        return found

    def named(self, keys: Iterable[str]) -> list[str]:
        """`learning_rate=0.002` for each of these settings."""
        return [_named(key, self.values.get(key)) for key in keys]

    def changes(self, other: Setting) -> list[str]:
        """Names of the settings that differ."""
        keys = dict.fromkeys((*self.values, *other.values))
        return [key for key in keys if self.values.get(key) != other.values.get(key)]


def settings_of(groups: list[Group]) -> list[Setting]:
    """Every setting, in the order of the groups."""
    found: dict[tuple[str, str], Setting] = {}
    for group in groups:
        key = (group.recipe_name, group.settings)
        found.setdefault(key, Setting(group.recipe_name, json.loads(group.settings), [])).groups.append(group)
    settings = list(found.values())
    mains = {setting.family: setting for setting in main_settings(settings)}
    recipes = {setting.recipe_name for setting in settings}
    for setting in settings:
        main = mains[setting.family]
        rivals = [other for other in mains.values() if other.recipe_name == setting.recipe_name]
        keys = [key for key in FAMILY if any(key in main.changes(other) for other in rivals)]
        parts = [setting.recipe_name] if len(recipes) > 1 else []
        setting.student = ", ".join([*parts, *setting.named(keys)])
        setting.label = ", ".join(part for part in (setting.student, *setting.named(main.changes(setting))) if part)
    return settings


def main_settings(settings: list[Setting]) -> list[Setting]:
    """For each student the setting with the most mechanisms, then the most runs; claims are tested in it."""
    best: dict[str, Setting] = {}
    for setting in settings:
        rival = best.get(setting.family)
        if rival is None or _size(setting) > _size(rival):
            best[setting.family] = setting
    return list(best.values())


def _size(setting: Setting) -> tuple[int, int]:
    return len(setting.groups), setting.runs


def _named(key: str, value: Any) -> str:
    """`learning_rate=0.002` or `no teacher`; a teacher's folder is shown by the end of its path."""
    if key == "teacher":
        return "no teacher" if value is None else f"teacher={short('/'.join(str(value).split('/')[-2:]), 40)}"
    if isinstance(value, float):
        return f"{key}={value:g}"
    return f"{key}={short(value, 30)}"
