"""Two-by-two designs among the runs of a setting: the effect of each factor, averaged over the other, per seed."""

from __future__ import annotations

from dataclasses import dataclass

from . import attention_measures as attention
from .claims import SIGMOID, Claim
from .gradient_windows import AFTER_WARMUP, WINDOWS, clipped_measure, cv_measure
from .groups import Group
from .measures import Measure, gradient_measures, quality_measures
from .settings import Setting, settings_of
from .verdicts import EITHER, combine


@dataclass(frozen=True)
class Factorial:
    """Cells by (first factor present, second factor present); names are presets, or a preset's variant."""

    key: str
    title: str
    first: str
    second: str
    both: str
    only_first: str
    only_second: str
    neither: str


FACTORIALS = (
    Factorial("beta", "β and the activation of α", "β", "linear clipping instead of a sigmoid",
              "affine", f"affine {SIGMOID}", "affine_no_bias", "head_gated"),
    Factorial("gate", "affine scaling and the output gate", "affine scaling", "the output gate",
              "affine_gated", "affine", "gated", "softmax"),
)  # fmt: skip


def factorials(groups: list[Group]) -> list[Claim]:
    """One claim per effect of each factorial whose four cells have runs: its measures are one family of tests."""
    tested, _ = quality_measures(groups)
    cv = [measure for measure in gradient_measures() if measure.label == "CV"]
    measures = [*tested, attention.ENTROPY_OF_SOFTMAX, attention.FIRST_TOKEN_OF_SOFTMAX, *cv, cv_measure(WINDOWS[1]),
                clipped_measure(AFTER_WARMUP)]  # fmt: skip
    found: dict[str, Claim] = {}
    for setting in settings_of(groups):
        for design in FACTORIALS:
            cells = [_cell(setting, name) for name in
                     (design.both, design.only_first, design.only_second, design.neither)]  # fmt: skip
            complete = [cell for cell in cells if cell is not None and cell.finished]
            if len(complete) == len(cells):
                for claim in _effects(design, setting, complete, measures):
                    if claim.key in found:
                        found[claim.key].comparisons += claim.comparisons
                    else:
                        found[claim.key] = claim
    return list(found.values())


def _effects(design: Factorial, setting: Setting, cells: list[Group], measures: list[Measure]) -> list[Claim]:
    effects = (
        ("first", design.first, (0.5, 0.5, -0.5, -0.5)),
        ("second", design.second, (0.5, -0.5, 0.5, -0.5)),
        ("interaction", f"{design.first} × {design.second}", (1.0, -1.0, -1.0, 1.0)),
    )
    names = f"{design.both}, {design.only_first}, {design.only_second}, {design.neither}"
    claims = []
    for key, name, weights in effects:
        # The cells are in the order both, first only, second only, neither.
        terms = tuple(zip(weights, cells, strict=True))
        words = (
            f"The mean of the two differences that {name} makes."
            if key != "interaction"
            else f"The difference that {design.first} makes with {design.second}, minus the one without."
        )
        claims.append(Claim(
            f"factorial-{design.key}-{key}", f"Effect of {name}", f"two by two: {names}", words,
            [combine(measure, (name, ""), terms, EITHER, setting) for measure in measures],
        ))  # fmt: skip
    return claims


def _cell(setting: Setting, name: str) -> Group | None:
    if name.endswith(SIGMOID):
        return dict(setting.variants(name.removesuffix(SIGMOID).strip())).get(name)
    return setting.plain(name)
