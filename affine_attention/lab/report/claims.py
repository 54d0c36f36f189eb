"""Turns groups of runs into the paper's claims, each with the differences that speak for or against it."""

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

SIGMOID = "(activation=sigmoid)"  # ends the name of a variant that differs in this alone


@dataclass
class Claim:
    """A sentence of the paper (or a control that it leaves out) and its comparisons, the headline first."""

    key: str
    title: str
    where: str
    sentence: str
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> list[Comparison]:
        """Those that have a difference."""
        return [comparison for comparison in self.comparisons if comparison.delta is not None]

    @property
    def absent(self) -> list[str]:
        """Mechanisms that the claim needs and that have no run."""
        return list(dict.fromkeys(name for comparison in self.comparisons for name in comparison.absent))


def claims(groups: list[Group]) -> list[Claim]:
    """Every claim, judged in the main setting of each student: mechanisms compare at otherwise equal settings."""
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
        "Affine-Scaled Attention trains to a lower loss than softmax and than a learned sink, and has a lower "
        "perplexity on held-out text.",
        _pairs(setting, _BOTH, quality),
    )  # fmt: skip


def _accuracy(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    return Claim(
        "claim-accuracy", "Higher zero-shot accuracy", "5.2, Table 1",
        "Affine-Scaled Attention has the best average accuracy on tasks of common sense.",
        _pairs(setting, _BOTH, average),
    )  # fmt: skip


def _gradients(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    chosen = [measure for measure in gradient_measures() if measure.label in ("Variance", "CV")]
    steps = max((run.steps for group in setting.groups for run in group.runs), default=0)
    notes = [f"Of steps 0–500 of the log; the longest run here has {steps:,} steps."] if steps < 500 else []
    return Claim(
        "claim-gradients", "Steadier gradients", "B.3, Tables 4 and 5, Figure 8",
        "The gradient norm varies less early in training, and has fewer spikes.",
        _pairs(setting, _BOTH, [*chosen, *spike_measures()]),
        notes,
    )  # fmt: skip


def _first_token(setting: Setting, quality: list[Measure], average: list[Measure]) -> Claim:
    return Claim(
        "claim-first-token", "Less weight on the first token", "4.2, Figure 4",
        "Less attention rests on the first token than with softmax and than with a learned sink.",
        _pairs(setting, _BOTH, [attention.FIRST_TOKEN, attention.FIRST_TOKEN_OF_SOFTMAX]),
        ["Where rows sum to less than 1, every weight is smaller, the first token’s too. The softmax part says whether "
         "attention also moved away from it."],
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
        "spread more widely.",
        [*_pairs(setting, [("affine", "sink")], spreads),
         *_pairs(setting, [("affine", "softmax")], [attention.ENTROPY_SPREAD])],
        ["The paper shows heatmaps and gives no number; these are standard deviations over the heads of a layer. With "
         "softmax every head weighs exactly 1, so total weights are compared with the sink, as in Figure 5. The "
         "entropy of the softmax part says whether heads also look at different things."],
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
            f"{_signed(added.mean)} come from β, which adds weight evenly to all keys where α is below its running "
            "average and takes it away where α is above: the formula does that whatever was learned."
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
        ["The last rows: what affine scaling does under a gate less what it does without. Zero: the two add up; on the "
         "other side than affine’s own gain: together they give less than their sum."],
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
        "claim-controls", "Controls that the paper leaves out", "not in the paper",
        "“holds” says that the first of the two is better. head_gated scales each head with as many parameters as "
        "affine, without touching the softmax; affine_no_bias is affine with β = 0.",
        _pairs(setting, pairs, quality),
    )  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
