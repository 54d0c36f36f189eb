"""Draws the figure of E4 into docs/images: held-out loss and clipped steps at five learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .e3_figure import LINES, STYLE
from .e4_report import TWO, losses_of
from .plans import E4_MECHANISMS, RATES

IMAGE = Path(__file__).parent.parent.parent / "docs" / "images" / "learning-rates.png"
COLORS = LINES | {"affine_no_bias": "#2b6cb0"}
MARKERS = dict(zip(E4_MECHANISMS, "osD^v", strict=True))


def panel(ax: Axes, values: dict[tuple[str, float, int], float], title: str, label: str) -> None:
    """A line through the means of the seeds, and a small point for each seed."""
    for mechanism in E4_MECHANISMS:
        means = [fmean(values[mechanism, rate, seed] for seed in TWO) for rate in RATES]
        color = COLORS[mechanism]
        ax.plot(RATES, means, "-", color=color, marker=MARKERS[mechanism], ms=4.5, lw=1.5, label=mechanism)
        for seed in TWO:
            ax.plot(RATES, [values[mechanism, rate, seed] for rate in RATES], "o", ms=2.5, color=color, alpha=0.5)
    ax.set_xscale("log", base=2)
    ax.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    ax.minorticks_off()
    ax.set(xlabel="learning rate", ylabel=label, title=title)


def draw(runs: Sequence[dict[str, Any]]) -> Figure:
    shares = {(run["mechanism"], run["learning_rate"], run["seed"]): 100 * (run["clipped_share"] or 0) for run in runs}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        losses, clipped = figure.subplots(1, 2)
        panel(losses, losses_of(runs), "held-out loss at the end", "nats per token")
        panel(clipped, shares, "clipped steps after warm-up", "%")
        losses.legend(frameon=False, fontsize=8)
    return figure


def write_figure(runs: Sequence[dict[str, Any]], path: Path = IMAGE) -> Path:
    draw(runs).savefig(path, dpi=130, metadata={"Software": None})
    return path
