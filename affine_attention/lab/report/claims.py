"""The paper's claims, each with the differences between groups of runs that support or contradict it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import attention_measures as attention
from .groups import Group
from .measures import (
    Measure,
    gradient_measures,
    loss_measures,
    perplexity_measures,
    spike_measures,
    task_measures,
)
from .settings import Setting, main_settings, settings_of
from .verdicts import Comparison, compare, compare_gaps

SIGMOID = "(activation=sigmoid)"  # suffix of the name of a variant that differs only in this


@dataclass
class Claim:
    """A claim of the paper (or a control that the paper lacks) and its comparisons, the main one first."""

    key: str
    title: str
    where: str
    sentence: str
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> list[Comparison]:
        """The comparisons that have a difference."""
        return [comparison for comparison in self.comparisons if comparison.delta is not None]

    @property
    def absent(self) -> list[str]:
        """Mechanisms that the claim needs but that have no run."""
        return list(dict.fromkeys(name for comparison in self.comparisons for name in comparison.absent))


def claims(groups: list[Group]) -> list[Claim]:
    """Every claim, tested in the main setting of each student, where all other settings are equal."""
    chosen = main_settings(settings_of(groups))
    quality = [*loss_measures(groups), *perplexity_measures(groups)]
    average = [measure for measure in task_measures(groups) if measure.label.startswith("Avg.")]
    found = []
    for make in (_loss, _accuracy, _gradients, _first_token, _diversity, _entropy, _gate, _activation, _controls):
        parts = [make(setting, quality, average) for setting in chosen]
        whole = parts[0]
        for part in parts[1:]:
            whole.comparisons += part.comparisons
            whole.notes += part.notes
        found.append(whole)
    return [claim for claim in found if claim.comparisons]


def _pairs(
    setting: Setting, pairs: Sequence[tuple[str, str]], measures: Sequence[Measure], side: str | None = None
) -> list[Comparison]:
    """Every measure of every pair of presets in one setting."""
    return [
        compare(measure, (ours, setting.plain(ours)), (other, setting.plain(other)), side, setting.label)
        for ours, other in pairs
        for measure in measures
    ]


_BOTH = (("affine", "softmax"), ("affine", "sink"))


def _loss(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    return Claim(
        "claim-loss", "Lower loss", "5.2, Table 1, Figures 7 and 10",
        "Affine-Scaled Attention reaches a lower training loss than softmax and than a learned sink, and a lower "
        "perplexity on held-out text.",
        _pairs(setting, _BOTH, quality),
    )  # fmt: skip


def _accuracy(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    return Claim(
        "claim-accuracy", "Higher zero-shot accuracy", "5.2, Table 1",
        "Affine-Scaled Attention has the best average accuracy on common-sense tasks.",
        _pairs(setting, _BOTH, average),
    )  # fmt: skip


def _gradients(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    chosen = [measure for measure in gradient_measures() if measure.label in ("Variance", "CV")]
    steps = max((run.steps for group in setting.groups for run in group.runs), default=0)
    notes = [f"From steps 0–500 of the log; the longest run has {steps:,} steps."] if steps < 500 else []
    return Claim(
        "claim-gradients", "Steadier gradients", "B.3, Tables 4 and 5, Figure 8",
        "The gradient norm has a lower variance and fewer spikes early in training.",
        _pairs(setting, _BOTH, [*chosen, *spike_measures()]),
        notes,
    )  # fmt: skip


def _first_token(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    return Claim(
        "claim-first-token", "Less weight on the first token", "4.2, Figure 4",
        "The first token gets less attention than with softmax and than with a learned sink.",
        _pairs(setting, _BOTH, [attention.FIRST_TOKEN, attention.FIRST_TOKEN_OF_SOFTMAX]),
        ["If rows sum to less than 1, all weights are smaller, including that of the first token. The softmax part "
         "shows whether attention moved away from it."],
    )  # fmt: skip


def _diversity(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    spreads = [
        attention.TOTAL_WEIGHT_SPREAD,
        attention.SCALED_WEIGHT_SPREAD,
        attention.ROW_SUM_SPREAD,
        attention.ENTROPY_SPREAD,
    ]
    return Claim(
        "claim-diversity", "More diverse heads", "4.1, 4.3, Figures 3 and 5",
        "Total weights differ more between the heads of a layer than with a learned sink, and the row sums of queries "
        "have a wider distribution.",
        [*_pairs(setting, [("affine", "sink")], spreads),
         *_pairs(setting, [("affine", "softmax")], [attention.ENTROPY_SPREAD])],
        ["The paper shows heatmaps without numbers; these are standard deviations over the heads of a layer. With "
         "softmax the total weight of every head is exactly 1, so total weights are compared with the sink, as in "
         "Figure 5. The entropy of the softmax part shows whether heads also attend differently."],
    )  # fmt: skip


def _entropy(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    plain = ("affine", "softmax")
    parts = [
        *_pairs(setting, [plain], [attention.ENTROPY, attention.ENTROPY_OF_SOFTMAX]),
        *_pairs(setting, [plain], [attention.ENTROPY_OF_BIAS], side=""),
    ]
    notes = []
    whole, learned, added = (part.delta for part in parts)
    if whole and learned and added:
        place = f"{setting.label}: " if setting.label else ""
        notes.append(
            f"{place}Of {_signed(whole.mean)} nats, {_signed(learned.mean)} are in the softmax part and "
            f"{_signed(added.mean)} come from β, which adds the same weight to all keys if α is below its running "
            "average and subtracts it if α is above: a property of the formula, independent of what was learned."
        )
    return Claim(
        "claim-entropy", "Higher entropy", "4.4, Figure 6",
        "Attention is spread over more tokens than with softmax and than with a learned sink.",
        [*parts, *_pairs(setting, [("affine", "sink")], [attention.ENTROPY, attention.ENTROPY_OF_SOFTMAX])],
        notes,
    )  # fmt: skip


def _gate(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    measures = [*quality, *average]
    found = _pairs(setting, [("affine_gated", "gated"), ("affine_gated", "affine")], measures)
    four = [setting.plain(name) for name in ("affine_gated", "gated", "affine", "softmax")]
    both, gated, affine, softmax = four
    if both and gated and affine and softmax:
        names = ("(affine_gated − gated)", "(affine − softmax)")
        found += [compare_gaps(m, names, (both, gated), (affine, softmax), "", setting.label) for m in measures]
    return Claim(
        "claim-gate", "Affine and gate add up", "5.4, Table 2",
        "Affine scaling improves a gated model, and a gate improves an affine one.",
        found,
        ["The last rows: the effect of affine scaling with a gate minus its effect without one. Zero means that the "
         "effects add up; the opposite sign of affine’s own gain means that together they gain less than the sum."],
    )  # fmt: skip


def _activation(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    measures = [*average, *quality]
    found = []
    for name in ("affine", "affine_gated"):
        label = f"{name} {SIGMOID}"
        variant = dict(setting.variants(name)).get(label)
        if name == "affine" or variant is not None:
            other = (f"{name} (sigmoid)", variant)
            found += [compare(m, (name, setting.plain(name)), other, None, setting.label) for m in measures]
    return Claim(
        "claim-activation", "Linear clipping over sigmoid", "6, Table 3",
        "α = φ(W_a x) with linear clipping is better than with a sigmoid.",
        found,
    )  # fmt: skip


def _controls(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    pairs = [("affine", "head_gated"), ("affine", "affine_no_bias"), ("sink", "softmax"), ("gated", "softmax")]
    return Claim(
        "claim-controls", "Controls that the paper lacks", "not in the paper",
        "“holds” means that the first of the two is better. head_gated scales each head with as many parameters as "
        "affine, without changing the softmax; affine_no_bias is affine with β = 0.",
        _pairs(setting, pairs, quality),
    )  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
