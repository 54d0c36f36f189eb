"""Comparisons that the paper does not make: variants of a mechanism, learning rates and other settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...nn import PRESETS
from ..recipe import Recipe
from .cells import shown
from .claims import SIGMOID, Claim
from .groups import BASELINE, Group
from .measures import Measure, quality_measures
from .settings import FAMILY, Setting, main_settings, settings_of
from .text import short
from .verdicts import Comparison, combine, compare

# The objective: the losses of runs that differ in one of these are not comparable.
OBJECTIVE = ("teacher", "kd_weight", "ce_weight", "temperature", "divergence")


@dataclass
class Swept:
    """One mechanism at several values of one setting, with all other settings equal."""

    key: str
    mechanism: str
    setting: str
    measure: Measure
    groups: dict[Any, Group]

    @property
    def best(self) -> Any:
        means = {value: found.mean for value, group in self.groups.items() if (found := self.measure.of(group))}
        if not means:
            return None
        return (min if self.measure.better == "lower" else max)(means, key=lambda value: means[value])


def questions(groups: list[Group]) -> list[Claim]:
    """The questions that have runs."""
    every = settings_of(groups)
    measures = quality_measures(groups)
    found = []
    if variants := _variants(every, *measures):
        found.append(variants)
    if others := _other_settings(every, *measures):
        found.append(others)
    return found


def swept(groups: list[Group], key: str) -> list[Swept]:
    """Mechanisms that were trained with two or more values of a setting, with all other settings equal."""
    measures, _ = quality_measures(groups)
    found: list[Swept] = []
    settings = settings_of(groups)
    mains = {setting.family: setting for setting in main_settings(settings)}
    for family in _families(settings, key) if measures else ():
        others = [other for other in mains[family[0].family].changes(family[0]) if other != key]
        label = ", ".join(part for part in (family[0].student, *family[0].named(others)) if part)
        for name in PRESETS:
            plain = {setting.values[key]: setting.plain(name) for setting in family}
            having = {value: group for value, group in plain.items() if group is not None and group.finished}
            if len(having) > 1:
                ordered = dict(sorted(having.items(), key=lambda entry: _rank(entry[0])))
                found.append(Swept(key, name, label, measures[0], ordered))
    return found


def rates(groups: list[Group]) -> list[Swept]:
    """Mechanisms at several learning rates."""
    return swept(groups, "learning_rate")


def swept_keys(groups: list[Group]) -> list[str]:
    """The settings of which some mechanism has several values; the objective is no such setting."""
    held = {key for setting in settings_of(groups) for key in setting.values}
    known = [item.name for item in fields(Recipe)]  # other keys of a recipe.json are untrusted text
    return [key for key in known if key in held and key not in (*OBJECTIVE, *FAMILY) and swept(groups, key)]


def signs(swept: list[Swept]) -> list[str]:
    """Sentences about whether the sign of each mechanism's difference to softmax is the same at every shared value."""
    found = []
    for each in swept:
        base = next((b for b in swept if b.mechanism == BASELINE and b.setting == each.setting), None)
        if base is None or each is base:
            continue
        shared = [value for value in each.groups if value in base.groups]
        found_gaps = {value: each.measure.delta(each.groups[value], base.groups[value]) for value in shared}
        gaps = {value: gap.mean for value, gap in found_gaps.items() if gap}
        if len(gaps) < 2:
            continue
        below = {gap < 0 for gap in gaps.values()}
        key = each.key.replace("_", " ")
        word = f"changes sign with the {key}"
        if len(below) == 1:
            word = f"is {'below' if True in below else 'not below'} zero at every {key}"
        numbers = ", ".join(f"{shown(gap, 3, sign=True)} at {value_text(value)}" for value, gap in gaps.items())
        place = f"{each.setting}: " if each.setting else ""
        found.append(f"{place}{each.mechanism} − {BASELINE} {word} (means): {numbers}.")
    return found


def _variants(settings: list[Setting], tested: list[Measure], same_runs: list[Measure]) -> Claim | None:
    """Each variant of a mechanism against its preset; the sigmoid is a separate claim."""
    found = []
    for setting in settings:
        for name in PRESETS:
            plain = setting.plain(name)
            for label, group in setting.variants(name):
                if plain is not None and not label.endswith(SIGMOID):
                    found += _compared((label, group), (name, plain), setting, tested, same_runs)
    if not found:
        return None
    return Claim(
        "question-variants", "Readings of the formula", "not in the paper",
        "“holds” means that the variant is better than the preset.",
        found,
    )  # fmt: skip


def _other_settings(settings: list[Setting], tested: list[Measure], same_runs: list[Measure]) -> Claim | None:
    """Every mechanism against softmax in settings other than the main one, and how the gap changes between settings."""
    mains = {setting.family: setting for setting in main_settings(settings)}
    found: list[Comparison] = []
    lone: list[str] = []
    for setting in settings:
        main = mains[setting.family]
        if setting is main:
            continue
        if (softmax := setting.plain(BASELINE)) is None:
            lone.append(setting.label)
            continue
        gaps = _gap_measures([*tested, *same_runs], main.changes(setting))
        for name in PRESETS:
            group = setting.plain(name)
            if group is None or group is softmax:
                continue
            found += _compared((name, group), (BASELINE, softmax), setting, tested, same_runs)
            there, base = main.plain(name), main.plain(BASELINE)
            if there and base:
                names = (f"({name} − softmax here)", "(in the main setting)")
                terms = ((1.0, group), (-1.0, softmax), (-1.0, there), (1.0, base))
                found += [combine(measure, names, terms, "", setting.label) for measure in gaps]
    found += _at_best_rates(settings, tested, same_runs)
    if not found:
        return None
    described = []
    for family, main in mains.items():
        changed = dict.fromkeys(key for s in settings if s.family == family for key in main.changes(s))
        if changed:
            described.append(", ".join(part for part in (main.student, *main.named(changed)) if part))
    return Claim(
        "question-settings", "The same comparison in other settings", "not in the paper",
        "“holds” means that the mechanism is better than softmax in that setting. The other rows compare this gap with "
        "the gap in the main setting, for the logarithm of perplexity (whose differences are comparable between "
        "levels), and for losses only if the objective is the same.",
        found,
        [f"The main setting, in which the claims above are tested: {'; '.join(described)}."] * bool(described)
        + [f"No softmax run to compare with: {'; '.join(lone)}."] * bool(lone),
    )  # fmt: skip


def _at_best_rates(settings: list[Setting], tested: list[Measure], same_runs: list[Measure]) -> list[Comparison]:
    """Each mechanism at its best learning rate against softmax at its best."""
    found = []
    groups = [group for setting in settings for group in setting.groups]
    by_setting: dict[str, dict[str, Swept]] = {}
    for each in rates(groups):
        by_setting.setdefault(each.setting, {})[each.mechanism] = each
    for setting, table in by_setting.items():
        label = f"{setting}, each at its best rate" if setting else "each at its best rate"
        base = table.get(BASELINE)
        for name, each in table.items():
            if base is None or each is base or base.best is None or each.best is None:
                continue
            if each.best == base.best:  # one setting, in which they are compared already
                continue
            names = (f"{name} at {each.best:g}", f"{BASELINE} at {base.best:g}")
            ours, other = (names[0], each.groups[each.best]), (names[1], base.groups[base.best])
            found += _compared(ours, other, label, tested, same_runs)
    return found


def _families(settings: list[Setting], key: str) -> list[list[Setting]]:
    """Groups of settings that differ only in one setting, which is a number, a text or a truth value."""
    families: list[list[Setting]] = []
    for setting in settings:
        if not isinstance(setting.values.get(key), int | float | str):
            continue
        for family in families:
            if family[0].recipe_name == setting.recipe_name and family[0].changes(setting) == [key]:
                family.append(setting)
                break
        else:
            families.append([setting])
    return [family for family in families if len(family) > 1]


def _rank(value: Any) -> tuple[bool, Any]:
    """Numbers in order, then texts."""
    return (True, value) if isinstance(value, str) else (False, value)


def value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else short(value, 30)


def _compared(
    ours: tuple[str, Group], other: tuple[str, Group], setting: Setting | str, tested: list[Measure],
    same_runs: list[Measure],
) -> list[Comparison]:  # fmt: skip
    found = [compare(measure, ours, other, None, setting) for measure in tested]
    return found + [compare(measure, ours, other, None, setting, False) for measure in same_runs]


def _gap_measures(quality: list[Measure], changed: list[str]) -> list[Measure]:
    """The logarithms of perplexities, and the losses if the objective is the same."""
    other_objective = bool(set(changed) & set(OBJECTIVE))
    return [measure for measure in quality if measure.label.startswith("ln ") or not other_objective]
