"""Draws the figure of E1 on a CPU into docs/images: held-out loss below softmax for every student."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from affine_attention.lab.report.pooled import pool

from .design_runs import Values
from .e1_cpu import LETTERS
from .e1_report import STORED_CELLS
from .e3_figure import BLUE, GREY, ORANGE, STYLE
from .verdicts import contrast_of

IMAGE = Path(__file__).parent.parent.parent / "docs" / "images" / "start-scale.png"
WORDS = {
    "a": "softmax, W_o × ½ at the start",
    "b": "softmax, W_o × 0 at the start",
    "c": "α = ½, never learned",
    "d": "one learned α per head",
    "e": "2σ(W_a x), starts at 1",
    "f": "affine, centred β",
    "g": "σ(W_a x), starts at ¼",
    "h": "softmax at 1e-3",
    "i": "head_gated at 1e-3",
}
ORDER = ("h", "a", "b", "c", "d", "e", "i", "g", "head_gated", "affine_no_bias", "affine", "f")


def draw(losses: Values) -> Figure:
    """One point per seed, the mean and its pooled 95 % interval: loss − softmax at 2e-3 with the same seed."""
    noise, softmax = pool([*losses.values()]), losses["softmax"]
    gap = fmean(losses["head_gated"][seed] - softmax[seed] for seed in softmax)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        ax = figure.subplots()
        for row, name in enumerate(ORDER):
            cell = LETTERS.get(name, name)
            color = GREY if name in "hi" else ORANGE if name in STORED_CELLS else BLUE
            found = contrast_of(losses, [(1.0, cell), (-1.0, "softmax")], noise, 0.95)
            assert found is not None
            values = [loss - softmax[seed] for seed, loss in losses[cell].items()]
            ax.plot(values, [row] * len(values), "o", ms=3, color=color, alpha=0.4, mec="none")
            ax.errorbar(found.pooled.mean, row, xerr=found.pooled.half_width, fmt="o", ms=5, lw=1.2, color=color)
        for value, words in ((0.0, "softmax"), (gap / 2, "half of the gap"), (gap, "head_gated")):
            ax.axvline(value, color=GREY, lw=0.8, ls=":")
            ax.annotate(words, (value, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)
        labels = [f"{name}: {WORDS[name]}" if name in WORDS else name for name in ORDER]
        ax.set(yticks=range(len(ORDER)), yticklabels=labels, xlabel="held-out loss − softmax at 2e-3, nats per token")
        ax.invert_yaxis()
    return figure


def write_figure(losses: Values, path: Path = IMAGE) -> Path:
    draw(losses).savefig(path, dpi=130, metadata={"Software": None})
    return path
