"""The paper's claims, each with the differences between groups of runs that support or contradict it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import attention_measures as attention
from .cells import shown
from .first_tokens import uniform_share
from .gradient_windows import AFTER_WARMUP, WINDOWS, clipped_measure, cv_measure
from .groups import Group
from .measures import Measure, gradient_measures, quality_measures, spike_measures, task_measures
from .settings import Setting, main_settings, settings_of
from .verdicts import Comparison, combine, compare, family_verdict, in_families

SIGMOID = "(activation=sigmoid)"  # suffix of the name of a variant that differs only in this


@dataclass
class Claim:
    """A claim of the paper (or a control that the paper lacks) and its comparisons, the main one first.

    The tested comparisons of one setting are one family: their p values are corrected together.
    """

    key: str
    title: str
    where: str
    sentence: str
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comparisons = in_families(self.comparisons)

    def verdict(self, setting: str) -> str:
        """The verdict of all tests in one setting."""
        return family_verdict(each for each in self.comparisons if each.setting == setting and each.side)

    @property
    def compared(self) -> list[Comparison]:
        """The comparisons that have a difference."""
        return [comparison for comparison in self.comparisons if comparison.delta is not None]

    @property
    def absent(self) -> list[str]:
        """Mechanisms that the claim needs but that have no run."""
        return list(dict.fromkeys(name for comparison in self.comparisons for name in comparison.absent))


@dataclass(frozen=True)
class Measures:
    """Quality: the measure that is tested, further ones of the same runs, and the average accuracy."""

    tested: list[Measure]
    same_runs: list[Measure]
    average: list[Measure]


def claims(groups: list[Group]) -> list[Claim]:
    """Every claim, tested in the main setting of each student, where all other settings are equal."""
    chosen = main_settings(settings_of(groups))
    average = [measure for measure in task_measures(groups) if measure.label.startswith("Avg.")]
    measures = Measures(*quality_measures(groups), average)
    found = []
    for make in (_loss, _accuracy, _gradients, _after_warmup, _first_token, _first_token_part, _diversity,
                 _diversity_part, _entropy, _entropy_part, _gate, _activation, _controls):  # fmt: skip
        parts = [make(setting, measures) for setting in chosen]
        whole = parts[0]
        for part in parts[1:]:
            whole.comparisons += part.comparisons
            whole.notes += part.notes
        found.append(whole)
    return [claim for claim in found if claim.comparisons]


def _pairs(
    setting: Setting,
    pairs: Sequence[tuple[str, str]],
    measures: Sequence[Measure],
    side: str | None = None,
    same_runs: Sequence[Measure] = (),
) -> list[Comparison]:
    """Every measure of every pair of presets in one setting; those of `same_runs` have no verdict."""
    return [
        compare(measure, (ours, setting.plain(ours)), (other, setting.plain(other)), side, setting, tested)
        for ours, other in pairs
        for chosen, tested in ((measures, True), (same_runs, False))
        for measure in chosen
    ]


_BOTH = (("affine", "softmax"), ("affine", "sink"))
_ONE_TEST = "Losses and perplexities of the same runs are one test: {}. The other rows have no verdict of their own."


def _loss(setting: Setting, measures: Measures) -> Claim:
    return Claim(
        "claim-loss", "Lower loss", "5.2, Table 1, Figures 7 and 10",
        "Affine-Scaled Attention reaches a lower training loss than softmax and than a learned sink, and a lower "
        "perplexity on held-out text.",
        _pairs(setting, _BOTH, measures.tested, None, measures.same_runs),
        [_ONE_TEST.format(measure.label) for measure in measures.tested if measures.same_runs],
    )  # fmt: skip


def _accuracy(setting: Setting, measures: Measures) -> Claim:
    return Claim(
        "claim-accuracy", "Higher zero-shot accuracy", "5.2, Table 1",
        "Affine-Scaled Attention has the best average accuracy on common-sense tasks.",
        _pairs(setting, _BOTH, measures.average),
    )  # fmt: skip


def _gradients(setting: Setting, measures: Measures) -> Claim:
    chosen = [measure for measure in gradient_measures() if measure.label in ("Variance", "CV")]
    steps = max((run.steps for group in setting.groups for run in group.runs), default=0)
    notes = [f"From steps 0–500 of the log; the longest run has {steps:,} steps."] if steps < 500 else []
    return Claim(
        "claim-gradients", "Steadier gradients, steps 0–500", "B.3, Tables 4 and 5, Figure 8",
        "The gradient norm has a lower variance and fewer spikes early in training.",
        _pairs(setting, _BOTH, [*chosen, *spike_measures()]),
        notes,
    )  # fmt: skip


def _after_warmup(setting: Setting, measures: Measures) -> Claim:
    chosen = [cv_measure(WINDOWS[1]), cv_measure(WINDOWS[2]), clipped_measure(AFTER_WARMUP)]
    return Claim(
        "claim-after-warmup", "Steadier gradients after warm-up", "not in the paper",
        "The same after the first 100 steps: the gradient norm varies less, and fewer steps are clipped.",
        _pairs(setting, _BOTH, chosen, None, [clipped_measure(window) for window in WINDOWS]),
    )  # fmt: skip


def _first_token(setting: Setting, measures: Measures) -> Claim:
    return Claim(
        "claim-first-token", "Less weight on the first token", "4.2, Figure 4",
        "The first token gets less attention than with softmax and than with a learned sink.",
        _pairs(setting, _BOTH, [attention.FIRST_TOKEN]),
        ["If rows sum to less than 1, all weights are smaller, including that of the first token. The next table shows "
         "whether attention moved away from it."],
    )  # fmt: skip


def _first_token_part(setting: Setting, measures: Measures) -> Claim:
    notes = []
    for group in [group for name in ("softmax", "affine") if (group := setting.plain(name))]:
        level, even = attention.FIRST_TOKEN_OF_SOFTMAX.of(group), uniform_share(group.runs[0])
        if level is not None and not math.isnan(even):
            place = f"{setting.label}: " if setting.label else ""
            notes.append(f"{place}{group.method} puts {100 * level.mean:.2f} % of its softmax part on the first token; "
                         f"uniform attention would put {100 * even:.2f} % there.")  # fmt: skip
    return Claim(
        "claim-first-token-part", "Less weight on the first token, softmax part", "not in the paper",
        "The first token's share of the softmax part, which does not shrink with α, is lower.",
        _pairs(setting, _BOTH, [attention.FIRST_TOKEN_OF_SOFTMAX]),
        notes,
    )  # fmt: skip


def _diversity(setting: Setting, measures: Measures) -> Claim:
    spreads = [attention.TOTAL_WEIGHT_SPREAD, attention.SCALED_WEIGHT_SPREAD, attention.ROW_SUM_SPREAD]
    return Claim(
        "claim-diversity", "More diverse heads", "4.1, 4.3, Figures 3 and 5",
        "Total weights differ more between the heads of a layer than with a learned sink, and the row sums of queries "
        "have a wider distribution.",
        _pairs(setting, [("affine", "sink")], spreads),
        ["The paper shows heatmaps without numbers; these are standard deviations over the heads of a layer. With "
         "softmax the total weight of every head is exactly 1, so total weights are compared with the sink, as in "
         "Figure 5."],
    )  # fmt: skip


def _diversity_part(setting: Setting, measures: Measures) -> Claim:
    return Claim(
        "claim-diversity-part", "More diverse heads, softmax part", "not in the paper",
        "Heads also attend differently: the entropy of the softmax part differs more between the heads of a layer.",
        _pairs(setting, [("affine", "sink"), ("affine", "softmax")], [attention.ENTROPY_SPREAD]),
    )  # fmt: skip


def _entropy(setting: Setting, measures: Measures) -> Claim:
    plain = ("affine", "softmax")
    tests = _pairs(setting, [plain, ("affine", "sink")], [attention.ENTROPY])
    parts = _pairs(setting, [plain], [attention.ENTROPY_OF_SOFTMAX, attention.ENTROPY_OF_BIAS], side="")
    notes = []
    whole, learned, added = (part.delta for part in (tests[0], *parts))
    if whole and learned and added:
        place = f"{setting.label}: " if setting.label else ""
        of_whole, of_learned, of_added = (shown(part.mean, 3, sign=True) for part in (whole, learned, added))
        notes.append(
            f"{place}Of {of_whole} nats, {of_learned} are in the softmax part and {of_added} come from β, which adds "
            "the same weight to all keys if α is below its running average and subtracts it if α is above: a property "
            "of the formula, independent of what was learned."
        )
    return Claim(
        "claim-entropy", "Higher entropy", "4.4, Figure 6",
        "Attention is spread over more tokens than with softmax and than with a learned sink.",
        [*tests, *parts],
        notes,
    )  # fmt: skip


def _entropy_part(setting: Setting, measures: Measures) -> Claim:
    return Claim(
        "claim-entropy-part", "Higher entropy, softmax part", "not in the paper",
        "The softmax part alone, without β, is spread over more tokens.",
        _pairs(setting, _BOTH, [attention.ENTROPY_OF_SOFTMAX]),
    )  # fmt: skip


def _gate(setting: Setting, measures: Measures) -> Claim:
    pairs = [("affine_gated", "gated"), ("affine_gated", "affine")]
    found = _pairs(setting, pairs, measures.tested, None, [*measures.same_runs, *measures.average])
    both, gated, affine, softmax = (setting.plain(name) for name in ("affine_gated", "gated", "affine", "softmax"))
    if both and gated and affine and softmax:
        names = ("(affine_gated − gated)", "(affine − softmax)")
        terms = ((1.0, both), (-1.0, gated), (-1.0, affine), (1.0, softmax))
        every = [*measures.tested, *measures.same_runs, *measures.average]
        found += [combine(measure, names, terms, "", setting) for measure in every]
    return Claim(
        "claim-gate", "Affine and gate add up", "5.4, Table 2",
        "Affine scaling improves a gated model, and a gate improves an affine one.",
        found,
        ["The last rows: the effect of affine scaling with a gate minus its effect without one. Zero means that the "
         "effects add up; the opposite sign of affine’s own gain means that together they gain less than the sum."],
    )  # fmt: skip


def _activation(setting: Setting, measures: Measures) -> Claim:
    found = []
    for name in ("affine", "affine_gated"):
        variant = dict(setting.variants(name)).get(f"{name} {SIGMOID}")
        if name == "affine" or variant is not None:
            ours, other = (name, setting.plain(name)), (f"{name} (sigmoid)", variant)
            found += [compare(m, ours, other, None, setting) for m in (*measures.average, *measures.tested)]
            found += [compare(m, ours, other, None, setting, False) for m in measures.same_runs]
    return Claim(
        "claim-activation", "Linear clipping over sigmoid", "6, Table 3",
        "α = φ(W_a x) with linear clipping is better than with a sigmoid.",
        found,
    )  # fmt: skip


def _controls(setting: Setting, measures: Measures) -> Claim:
    pairs = [("affine", "head_gated"), ("affine", "affine_no_bias"), ("head_gated", "softmax"), ("gated", "softmax"),
             ("gated", "head_gated"), ("sink", "softmax"), ("off_by_one", "softmax")]  # fmt: skip
    return Claim(
        "claim-controls", "Controls that the paper lacks", "not in the paper",
        "“holds” means that the first of the two is better. head_gated scales each head with as many parameters as "
        "affine, without changing the softmax; affine_no_bias is affine with β = 0.",
        _pairs(setting, pairs, measures.tested, None, measures.same_runs),
    )  # fmt: skip
