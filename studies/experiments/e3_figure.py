"""Draws the figure of E3 into docs/images: attention maps, the first-token share, the value norm and its course."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.bigram_backcopy.task import TRIGGERS

from .e3 import MECHANISMS, SEEDS
from .e3_report import Runs, eviction, first_softmax, first_weight, mean_and_half, of_seeds, value_norm

IMAGE = Path(__file__).parent.parent.parent / "docs" / "images" / "bigram-backcopy.png"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5,
         "axes.titlelocation": "left"}  # fmt: skip
BLUE, ORANGE, GREY = "#2b6cb0", "#c05621", "#8a8a8a"
MAPPED = ("softmax", "sink", "head_gated", "affine")
LINES = {"softmax": "#1a1a1a", "sink": "#8a8a8a", "gated": "#6b46c1", "head_gated": "#2f855a", "affine": "#c05621"}
TOKENS = 20


def map_panel(ax: Axes, run: dict[str, Any], characters: str, first: bool) -> Any:
    """The weights of the first tokens of one sequence; triggers are orange."""
    found = run["map"]["layers"][0]
    weights = np.array(found["weights"])[:TOKENS, :TOKENS]
    image = ax.imshow(
        np.where(np.tri(TOKENS, dtype=bool), weights, np.nan), cmap="Blues", vmin=0, vmax=1, aspect="auto"
    )
    ids = run["map"]["tokens"][:TOKENS]
    names = ["<s>" if n == len(characters) else characters[n].replace(" ", "␣").replace("\n", "↵") for n in ids]
    ax.set(xticks=range(TOKENS), yticks=range(TOKENS))
    ax.set_xticklabels(names, fontsize=6.5)
    ax.set_yticklabels(names, fontsize=6.5)
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        for token, label in zip(ids, labels, strict=True):
            if token < TRIGGERS:
                label.set(color=ORANGE)
    ax.get_xticklabels()[0].set(rotation=90)  # <s> is wider than a column
    ax.tick_params(length=0, pad=1)
    if first:
        ax.set_ylabel("query (triggers in orange)")
    if found["alpha"] is not None:
        for row, alpha in enumerate(found["alpha"][:TOKENS]):
            ax.text(TOKENS - 0.2, row, f"{alpha:.2f}", fontsize=5.5, va="center", color=ORANGE)
        ax.text(TOKENS - 0.2, -1.0, "α", fontsize=7, color=ORANGE)
    ax.set_title(run["mechanism"])
    return image


def dots(ax: Axes, runs: Runs, measure: Any, color: str, offset: float, filled: bool, label: str) -> None:
    """One point per seed, the mean and its 95 % interval, for every mechanism."""
    for row, mechanism in enumerate(MECHANISMS):
        values = of_seeds(runs, 1, mechanism, measure)
        mean, half = mean_and_half(values)
        ax.plot(values, [row + offset] * len(values), "o", ms=3, color=color, alpha=0.35, mec="none")
        ax.errorbar(mean, row + offset, xerr=half, fmt="o", ms=5, lw=1.2, color=color, mfc=color if filled else "white",
                    label=label if row == 0 else None)  # fmt: skip


def bars_panel(ax: Axes, runs: Runs) -> None:
    dots(ax, runs, first_softmax, BLUE, -0.14, True, "softmax part, F_p")
    dots(ax, runs, first_weight, ORANGE, 0.14, False, "weights α p + β, F_w")
    ax.axvline(0.3, color=GREY, lw=0.8, ls=":")
    ax.set(yticks=range(len(MECHANISMS)), yticklabels=MECHANISMS, xlim=(-0.03, 1.0))
    ax.invert_yaxis()
    ax.set_title("weight on <s> at bigram queries")
    ax.legend(frameon=False, fontsize=7.5, loc="upper left", bbox_to_anchor=(0.0, 0.93))


def one_panel(ax: Axes, runs: Runs, measure: Any, title: str) -> None:
    dots(ax, runs, measure, BLUE, 0.0, True, "")
    ax.set(yticks=range(len(MECHANISMS)), yticklabels=[])
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_title(title)


def course_panel(ax: Axes, runs: Runs) -> None:
    """The share of the softmax part on <s> during training, mean over seeds."""
    for mechanism, color in LINES.items():
        curves = [runs[1, mechanism, seed]["curve"] for seed in SEEDS]
        steps = [point["step"] for point in curves[0]]
        means = [fmean(curve[n]["first_softmax"] for curve in curves) for n in range(len(steps))]
        ax.plot(steps, means, color=color, lw=1.6, label=mechanism)
    ax.set(ylim=(0, 1), xlabel="step")
    ax.set_title("F_p during training")
    ax.legend(frameon=False, fontsize=7.5, loc="upper left", ncols=2)


def draw(head: dict[str, Any], runs: Runs) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 6.6), layout="constrained")
        upper, lower = figure.subfigures(2, 1, height_ratios=[1, 0.95])
        maps = upper.subplots(1, len(MAPPED))
        for ax, mechanism in zip(maps, MAPPED, strict=True):
            image = map_panel(ax, runs[1, mechanism, SEEDS[0]], head["characters"], ax is maps[0])
        upper.colorbar(image, ax=maps, fraction=0.015, pad=0.035, label="weight")
        shares, norms, evictions, course = lower.subplots(1, 4, width_ratios=[1.25, 0.8, 0.8, 1.25])
        bars_panel(shares, runs)
        one_panel(norms, runs, value_norm, "value norm of <s> / others")
        one_panel(evictions, runs, eviction, "loss of hiding <s>, nats")
        course_panel(course, runs)
    return figure


def write_figure(head: dict[str, Any], runs: Runs, path: Path = IMAGE) -> Path:
    draw(head, runs).savefig(path, dpi=130, metadata={"Software": None})
    return path
