"""E1 (e1.md): turns its runs and the stored runs of the study into the tests of the design and a table of losses.

python -m studies.experiments.report e1 RUNS...         # the GPU version
python -m studies.experiments.e1_cpu --report           # the stored result of the CPU version
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from affine_attention.lab.report.collect import load_run
from affine_attention.lab.report.measures import heldout_loss
from affine_attention.lab.report.pooled import UNEQUAL, Pool, pool
from affine_attention.lab.report.statistics import t_quantile

from .design_runs import Values, collect, design, missing_runs
from .plans import SEEDS
from .verdicts import (
    CONFIRMED,
    MISSING,
    REFUTED,
    Verdict,
    contrast_of,
    is_above,
    is_below,
    is_within,
    shown,
    signed,
    verdict_lines,
    waiting,
)

STORED = Path(__file__).parent.parent / "smollm2" / "30m"
STORED_CELLS = ("softmax", "affine", "affine_no_bias", "head_gated")
CONFIDENCE = 0.99  # of each of five tests
COMPARABLE = 0.02  # nats: H0
EQUAL = 0.04  # nats: what the design can show
NOT_USED = "stored runs are not used"


def letters_of(low_rate: float) -> dict[str, str]:
    """The letters of the design: the name of the runs without the seed."""
    return {
        "a": "softmax_start=0.5", "b": "softmax_start=0", "c": "constant_alpha", "d": "per_head_alpha_alpha_start=0.5",
        "e": "head_gated_double", "f": "affine_centred", "g": "head_gated_alpha_start=0.25",
        "h": f"softmax_learning_rate={low_rate}", "i": f"head_gated_learning_rate={low_rate}",
    }  # fmt: skip


LETTERS = letters_of(5e-4)


def report_e1(folders: Mapping[str, Path]) -> list[list[str]]:
    """The blocks of lines that the report prints: notes, verdicts and tables."""
    repeated = {f"{cell}-seed{seed}" for cell in STORED_CELLS for seed in SEEDS}
    expected = design("e1")
    own = {name: path for name, path in folders.items() if name in expected or name not in repeated}
    runs = collect(expected, own)
    loaded = {name: load_run(folders[name]) for name in sorted(repeated & set(folders))}
    again = {name: heldout_loss(run) for name, run in loaded.items() if run.finished}
    new = {cell: seeds for cell, seeds in runs.values(heldout_loss).items() if cell != "softmax"}
    verdicts, losses = tests(new, stored_losses(STORED), again, LETTERS)
    return [runs.notes(), verdict_lines(verdicts), loss_table(losses, LETTERS), start_lines(losses, LETTERS)]


def stored_losses(stored: Path) -> dict[str, float]:
    names = [f"{cell}-seed{seed}" for cell in STORED_CELLS for seed in SEEDS]
    return {name: heldout_loss(load_run(stored / name)) for name in names if (stored / name).is_dir()}


def tests(
    new: Values, stored: Mapping[str, float], again: Mapping[str, float], letters: Mapping[str, str]
) -> tuple[list[Verdict], Values]:
    """(verdicts, losses of all cells): `new` are the cells a to i, `stored` and `again` runs of the stored cells.

    `again` are the runs of the study that were repeated with E1, used only if all of them are.

    H0 decides which runs of the study the other tests use. If it fails and the runs were not repeated, the other tests
    have no verdict.
    """
    losses = {cell: dict(seeds) for cell, seeds in new.items()}
    all_again = {f"{cell}-seed{seed}" for cell in STORED_CELLS for seed in SEEDS} <= set(again)
    for name, loss in (again if all_again else stored).items():
        cell, _, seed = name.rpartition("-seed")
        losses.setdefault(cell, {})[int(seed)] = loss
    first = comparable(stored, again, all_again)
    noise = pool([*losses.values()])
    found = [first]
    for test in (start_scale, input_adaptive, start_of_a_gate, mean_value, wrong_rate):
        verdict = test(losses, noise, letters)
        if first.verdict not in (CONFIRMED, NOT_USED):
            remark = "H0 must hold first, or all stored runs must be repeated"
            verdict = verdict._replace(verdict="waits for H0", remark=remark)
        found.append(verdict)
    return found, losses


def comparable(stored: Mapping[str, float], again: Mapping[str, float], all_again: bool) -> Verdict:
    test = "H0, comparable"
    if "softmax-seed0" not in again:
        return Verdict(test, "–", MISSING, "needs softmax-seed0")
    gap = again["softmax-seed0"] - stored["softmax-seed0"]
    if all_again:
        return Verdict(test, signed(gap, 4), NOT_USED, "all of them were repeated")
    if abs(gap) <= COMPARABLE:
        return Verdict(test, signed(gap, 4), CONFIRMED)
    needed = sorted({f"{cell}-seed{seed}" for cell in STORED_CELLS for seed in SEEDS} - set(again))
    return Verdict(test, signed(gap, 4), REFUTED, f"repeat {', '.join(needed)}")


def start_scale(
    losses: Values, noise: Pool | None, letters: Mapping[str, str], seeds: Sequence[int] = SEEDS
) -> Verdict:
    terms = [(1.0, letters["c"]), (-0.5, "softmax"), (-0.5, "head_gated")]
    return two_sided("H1, it is the start scale", losses, noise, terms, "half of the gap", seeds=seeds)


def input_adaptive(losses: Values, noise: Pool | None, letters: Mapping[str, str]) -> Verdict:
    return _or_equal("H2, it is input-adaptive", losses, noise, letters["d"], "head_gated")


def start_of_a_gate(losses: Values, noise: Pool | None, letters: Mapping[str, str]) -> Verdict:
    return _or_equal("H3, the start matters for a gate", losses, noise, letters["e"], "head_gated")


def mean_value(losses: Values, noise: Pool | None, letters: Mapping[str, str]) -> Verdict:
    terms = [(1.0, letters["f"]), (-1.0, "affine")]
    return two_sided("H4, the mean value is what β removes", losses, noise, terms, equal="no difference")


def wrong_rate(losses: Values, noise: Pool | None, letters: Mapping[str, str]) -> Verdict:
    """H5: the better rate of head_gated is the one with the lower mean; the contrast is computed with it fixed."""
    test, cells = "H5, softmax had the wrong rate", (letters["h"], letters["i"], "softmax", "head_gated")
    if row := waiting(test, losses, cells, SEEDS):
        return row
    better = min((letters["i"], "head_gated"), key=lambda cell: fmean(losses[cell].values()))
    weights = {letters["h"]: 1.0, "softmax": -0.5, "head_gated": 0.5}
    weights[better] = weights.get(better, 0.0) - 1.0
    terms = [(weight, cell) for cell, weight in weights.items()]
    which = "lower" if better == letters["i"] else "usual"
    return two_sided(test, losses, noise, terms, f"head_gated is better at the {which} rate")


def two_sided(
    test: str,
    losses: Values,
    noise: Pool | None,
    terms: list[tuple[float, str]],
    remark: str = "",
    *,
    equal: str = "",
    seeds: Sequence[int] = SEEDS,
) -> Verdict:
    """Confirmed below 0, refuted above 0; with `equal`, that word for an interval within ±EQUAL."""
    if row := waiting(test, losses, [cell for _, cell in terms], seeds):
        return row
    found = contrast_of(losses, terms, noise, CONFIDENCE)
    assert found is not None
    assert noise is not None
    pooled = found.pooled
    is_equal = bool(equal) and is_within(pooled, EQUAL)
    verdict = CONFIRMED if is_below(pooled) else REFUTED if is_above(pooled) else equal if is_equal else "undecided"
    return Verdict(test, shown(pooled), verdict, _remarks(remark, f"own interval {shown(found.own)}", noise))


def _or_equal(test: str, losses: Values, noise: Pool | None, ours: str, baseline: str) -> Verdict:
    """Confirmed above 0, refuted within ±EQUAL. If both hold, the difference exists and is small."""
    if row := waiting(test, losses, [ours, baseline], SEEDS):
        return row
    found = contrast_of(losses, [(1.0, ours), (-1.0, baseline)], noise, CONFIDENCE)
    assert found is not None
    assert noise is not None
    pooled = found.pooled
    verdict = CONFIRMED if is_above(pooled) else REFUTED if is_within(pooled, EQUAL) else "undecided"
    small = f"by less than {EQUAL}" if verdict == CONFIRMED and is_within(pooled, EQUAL) else ""
    return Verdict(test, shown(pooled), verdict, _remarks(small, f"own interval {shown(found.own)}", noise))


def _remarks(first: str, second: str, noise: Pool) -> str:
    unequal = f"variances differ, Bartlett's p {noise.equal:.3f}" if noise.equal < UNEQUAL else ""
    return "; ".join(part for part in (first, second, unequal) if part)


def loss_table(
    losses: Values, letters: Mapping[str, str], cells: Sequence[str] = (), seeds: Sequence[int] = SEEDS
) -> list[str]:
    """Held-out loss of every student, by seed, and its difference to softmax with the pooled 95 % interval."""
    letter_of = {cell: letter for letter, cell in letters.items()}
    noise = pool([*losses.values()])
    lines = [
        f"| | student | {' | '.join(f'seed {seed}' for seed in seeds)} | − softmax |",
        f"|{'---|' * (3 + len(seeds))}",
    ]
    for cell in cells or (*STORED_CELLS, *letters.values()):
        own = losses.get(cell, {})
        found = [f"{own[seed]:.3f}" if seed in own else "missing" for seed in seeds]
        gap = "–"
        if cell != "softmax" and own and "softmax" in losses:
            both = contrast_of(losses, [(1.0, cell), (-1.0, "softmax")], noise, 0.95)
            gap = shown(both.pooled) if both is not None else "–"
        lines.append(f"| {letter_of.get(cell, '')} | {cell} | {' | '.join(found)} | {gap} |")
    return lines


def start_lines(losses: Values, letters: Mapping[str, str]) -> list[str]:
    """a − c and g − head_gated, which are descriptive, and the noise as a sentence."""
    noise, lines = pool([*losses.values()]), []
    for words, ours, theirs in (
        ("a − c (½ at the start against a lasting ½)", letters["a"], letters["c"]),
        ("g − head_gated (start ¼ against ½)", letters["g"], "head_gated"),
    ):
        both = contrast_of(losses, [(1.0, ours), (-1.0, theirs)], noise, 0.95) if ours in losses else None
        if both is not None and not missing_runs(losses, [ours, theirs], SEEDS):
            lines.append(f"Descriptive: {words} {shown(both.pooled)} (95 %).")
    if noise is not None and lines:
        half = t_quantile(noise.freedom, CONFIDENCE) * noise.deviation * (2 / len(SEEDS)) ** 0.5
        lines.append(
            f"One run's residual deviation is {noise.deviation:.4f} with {noise.freedom} degrees of freedom; the 99 % "
            f"interval of a difference over three seeds has the half-width {half:.3f}."
        )
    return lines
