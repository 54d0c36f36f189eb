"""Draws the four figures of docs/study.md from the stored runs; `python -m studies.smollm2.pictures` writes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from affine_attention.files import read_json
from affine_attention.lab.report.groups import COLOURS
from affine_attention.lab.report.measures import quality_measures
from affine_attention.lab.report.settings import Setting, main_settings, settings_of
from affine_attention.lab.report.verdicts import compare
from affine_attention.lab.run import RunFolder

from .details import RUNS, SEEDS, stored

# Okabe and Ito's, as in the report.
COLOUR = {name: on_white for name, (on_white, _) in COLOURS.items()}
COMPARED = ("sink", "off_by_one", "affine_gated", "affine", "affine_no_bias", "head_gated", "gated")
SMOOTHING = 25  # steps of the moving average
RATE = 0.004  # of the unstable runs


def differences() -> Figure:
    """The held-out loss of each mechanism minus softmax, with the pooled interval and the pair's own."""
    setting = _main_setting()
    (measure,), _ = quality_measures(list(stored()))
    softmax = ("softmax", setting.plain("softmax"))
    figure = Figure(figsize=(8, 3.1), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(COMPARED):
        found = compare(measure, (name, setting.plain(name)), softmax, None, setting)
        assert found.delta is not None
        assert found.pooled is not None
        assert found.pooled.interval is not None
        own = found.delta.interval
        if own is not None:
            axes.plot(own, [row - 0.22] * 2, color="#b9bec5", linewidth=2)
        axes.plot(found.pooled.interval, [row] * 2, color=COLOUR[name], linewidth=4, solid_capstyle="butt")
        axes.plot(found.pooled.mean, row, "o", color=COLOUR[name], markersize=7)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(yticks=range(len(COMPARED)), xlabel="held-out loss minus softmax, nats", xlim=(-0.36, 0.36))
    axes.set_yticklabels([f"{name} (2 seeds)" if name == "off_by_one" else name for name in COMPARED])
    axes.set_title("coloured: interval with the error term of all mechanisms; grey: of the pair alone")
    return figure


def gap_over_steps() -> Figure:
    """The training loss minus that of softmax at the same step, mean of three seeds, smoothed."""
    figure = Figure(figsize=(8, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.6])
    base = _series("softmax", "loss")
    for name in ("sink", "affine", "affine_no_bias", "head_gated", "gated", "affine_gated"):
        gap = (_series(name, "loss") - base).mean(axis=0)
        smooth = np.convolve(gap, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
        steps = np.arange(smooth.size) + 1 + SMOOTHING // 2
        for axes in (left, right):
            axes.plot(steps, smooth, color=COLOUR[name], linewidth=1.4, label=name)
    left.set(xlim=(0, 300), xlabel="step", ylabel="loss minus softmax, nats")
    right.set(xlim=(300, 1200), ylim=(-0.36, 0.12), xlabel="step")
    left.set_title("warm-up ends at step 100")
    right.set_title("the rest of training, enlarged")
    for axes in (left, right):
        axes.axhline(0, color="black", linewidth=0.8)
    right.legend(frameon=False, fontsize=8, ncols=3, loc="upper center")
    return figure


def gradient_norms() -> Figure:
    """The gradient norm of softmax and affine: all seeds at 1e-3, one seed at 4e-3."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name in ("softmax", "affine"):
        for index, norms in enumerate(_series(name, "grad_norm")):
            left.plot(np.arange(1, norms.size + 1), norms, color=COLOUR[name], linewidth=0.6, alpha=0.7,
                      label=name if index == 0 else None)  # fmt: skip
        log = RunFolder(RUNS / f"{name}_learning_rate={RATE}-seed0").log()
        right.plot([line["step"] for line in log], [line["grad_norm"] for line in log], color=COLOUR[name],
                   linewidth=0.6, alpha=0.8, label=name)  # fmt: skip
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set(yscale="log", xlabel="step", xlim=(0, 1200))
    left.set(ylabel="gradient norm before clipping")
    left.set_title("learning rate 1e-3, three seeds; dashed: clipping")
    right.set_title("learning rate 4e-3, one seed")
    left.legend(frameon=False, fontsize=8)
    return figure


def inside_attention() -> Figure:
    """By layer, mean of heads and seeds: alpha, the entropy of the softmax part, and the first token's share."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    alpha, entropy, first = figure.subplots(1, 3)
    for name in ("affine", "affine_no_bias", "head_gated"):
        values = _by_layer(name, "alpha", "mean")
        alpha.plot(range(1, values.size + 1), values, marker="o", markersize=3, color=COLOUR[name], label=name)
    for name in ("softmax", "affine", "affine_no_bias", "head_gated"):
        values = _by_layer(name, "entropy", "softmax")
        entropy.plot(range(1, values.size + 1), values, marker="o", markersize=3, color=COLOUR[name], label=name)
    for name in ("softmax", "affine", "head_gated"):
        values = 100 * _by_layer(name, "first_token", "mean")
        first.plot(range(1, values.size + 1), values, marker="o", markersize=3, color=COLOUR[name], label=name)
    even = 100 * sum(1 / n for n in range(1, 1025)) / 1024
    first.axhline(even, color="black", linewidth=0.8, linestyle="--")
    first.annotate(f"uniform attention: {even:.2f} %", (4, even), (0, -11), textcoords="offset points", fontsize=8)
    alpha.set(ylim=(0, 1), xlabel="layer")
    entropy.set(ylim=(0, 7), xlabel="layer")
    first.set(ylim=(0, 1.8), xlabel="layer")
    alpha.set_title("mean α")
    entropy.set_title("entropy of the softmax part, nats")
    first.set_title("weight on the first token, %")
    for axes in (alpha, entropy, first):
        axes.legend(frameon=False, fontsize=8)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "study-differences.png": differences,
    "study-gap.png": gap_over_steps,
    "study-gradients.png": gradient_norms,
    "study-attention.png": inside_attention,
}


def _main_setting() -> Setting:
    return next(setting for setting in main_settings(settings_of(list(stored()))) if setting.recipe_name == "30m")


def _series(mechanism: str, key: str) -> np.ndarray:
    """One entry of the logs, [seed, step]."""
    return np.array([[line[key] for line in RunFolder(RUNS / f"{mechanism}-seed{seed}").log()] for seed in SEEDS])


def _by_layer(mechanism: str, *keys: str) -> np.ndarray:
    """A quantity of the inspection, mean over seeds and heads."""
    found = []
    for seed in SEEDS:
        value = read_json(RunFolder(RUNS / f"{mechanism}-seed{seed}").inspection_file)
        for key in keys:
            value = value[key]
        found.append(value)
    return np.array(found).mean(axis=(0, 2))
