"""Draws the pictures of README.md, docs/concepts.md and docs/study.md from the stored runs into docs/images.

    python -m studies.smollm2.pictures        # or make pictures

The stored maps hold the weights w = α p + β of the first 64 tokens. A row with n visible keys sums to
α + n (α_ma − α) / N, from which α and β of each row are computed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from safetensors.numpy import load_file

from affine_attention.files import read_json
from affine_attention.lab.run import RunFolder

from .study_figures import FIGURES

RUNS = Path(__file__).parent / "30m"
IMAGES = Path(__file__).parent.parent.parent / "docs" / "images"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
         "axes.titlelocation": "left", "svg.hashsalt": "affine"}  # fmt: skip
# In this head the softmax student puts the median weight of all its heads on the first token, and α varies.
LAYER, HEAD, TOKENS = 9, 7, 21
BLUE, ORANGE, GREY = "#2b6cb0", "#c05621", "#8a8a8a"


def inspection(mechanism: str) -> dict[str, Any]:
    return read_json(RunFolder(RUNS / f"{mechanism}-seed0").inspection_file)


def weights(mechanism: str, layer: int) -> np.ndarray:
    """The weights [head, query, key] of one layer for the first 64 tokens."""
    return load_file(RUNS / f"{mechanism}-seed0/inspection/maps.safetensors")[f"layer.{layer}"].astype(np.float64)


def alpha_of(found: dict[str, Any], layer: int) -> np.ndarray:
    """α [head, query] of the affine student, from the sums of its rows."""
    w = weights("affine", layer)
    visible, length = np.arange(1, w.shape[1] + 1), found["mechanism"]["bias_length"]
    average = np.array(found["running_alpha"][layer])[:, None]
    return (w.sum(-1) - visible * average / length) / (1 - visible / length)


def alpha_picture() -> Figure:
    """A softmax head, an affine head with the α of each of its rows, and the mean α of every head."""
    found = inspection("affine")
    tokens = [token.replace("\n", "↵").strip() or "␣" for token in found["maps"]["tokens"][:TOKENS]]
    alpha = alpha_of(found, LAYER)[HEAD, :TOKENS]
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, middle, bars, right = figure.subplots(1, 4, width_ratios=[1, 1, 0.35, 0.72])
    for ax, mechanism in ((left, "softmax"), (middle, "affine")):
        shown = weights(mechanism, LAYER)[HEAD, :TOKENS, :TOKENS]
        shown = np.where(np.tri(TOKENS, dtype=bool), shown, np.nan)
        image = ax.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        ax.set(xticks=range(TOKENS), yticks=range(TOKENS))
        ax.set_xticklabels(tokens, rotation=90, fontsize=6.5)
        ax.tick_params(length=0)
    left.set_yticklabels(tokens, fontsize=6.5)
    middle.set_yticklabels([])
    left.set_title("softmax: every row sums to 1")
    middle.set_title("affine: a row sums to about its α")
    figure.colorbar(image, ax=left, location="left", shrink=0.6, label="weight", pad=0.02)
    bars.barh(range(TOKENS), alpha, color=BLUE, height=0.8)
    bars.set(ylim=(TOKENS - 0.5, -0.5), xlim=(0, 1), yticks=[], xticks=[0, 0.5, 1], title="α of the row")
    means = np.array(found["alpha"]["mean"])
    image = right.imshow(means, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    right.set(xticks=range(means.shape[1]), yticks=range(means.shape[0]), xlabel="head", ylabel="layer")
    right.set_xticklabels(range(1, means.shape[1] + 1))
    right.set_yticklabels(range(1, means.shape[0] + 1))
    right.set_title("mean α of each head")
    figure.colorbar(image, ax=right, shrink=0.8)
    return figure


def beta_picture() -> Figure:
    """What β does to the sum of a row: by the number of visible keys, and over all rows of a student."""
    found = inspection("affine")
    length = found["mechanism"]["bias_length"]
    average = found["running_alpha"][LAYER][HEAD]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    visible = np.arange(0, length + 1)
    for alpha, colour in ((0.1, ORANGE), (0.5, GREY), (0.9, BLUE)):
        left.plot(visible, alpha + visible * (average - alpha) / length, color=colour, label=f"α = {alpha}")
    left.axhline(average, color="black", linewidth=0.8, linestyle="--")
    left.annotate(
        f"running average α_ma = {average:.2f}", (20, average), (0, -11), textcoords="offset points", fontsize=8
    )
    left.set(xlabel="visible keys n", ylabel="sum of the row", ylim=(0, 1), xlim=(0, length))
    left.set_title("α + nβ, with β = (α_ma − α) / N and N = 1024")
    left.legend(frameon=False, fontsize=8)
    for key, colour, label in (("alpha", GREY, "α"), ("row_sum", BLUE, "sum of the row, α + nβ")):
        counts = np.array(found[key]["histogram"]["counts"])[LAYER].sum(0)
        edges = np.array(found[key]["histogram"]["edges"])
        inner = counts[: len(edges) - 1] / counts.sum()
        right.stairs(inner, edges, color=colour, fill=True, alpha=0.35)
        right.stairs(inner, edges, color=colour, label=label)
    right.set(xlim=(-0.1, 1.1), xlabel="value", ylabel="share of rows")
    right.set_title(f"layer {LAYER + 1} of a trained student, all heads")
    right.legend(frameon=False, fontsize=8)
    return figure


PICTURES = {"alpha.png": alpha_picture, "beta.png": beta_picture, **FIGURES}


def main(folder: Path = IMAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            draw().savefig(folder / name, dpi=160, facecolor="white", metadata={"Software": None},
                           pil_kwargs={"optimize": True})  # fmt: skip
            print(folder / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
