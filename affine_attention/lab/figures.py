"""Draws the paper's figures for run folders on matplotlib axes: one function a figure, colours as in the report.

    from affine_attention.lab import figures
    ax = figures.plot_loss(["runs/softmax-0", "runs/affine-0", "runs/affine-1"])
    ax.figure.savefig("loss.pdf")

Every function takes one run folder or several (seeds of one setting are found and averaged) and an axis to draw on, and
returns the axis. matplotlib is imported when a function has to make an axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .report.collect import Run, load_runs
from .report.groups import Group, group_runs
from .report.histograms import histogram_views
from .report.series import Line, layer_lines, nanmean, probe_lines, step_lines
from .report.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Path | str | Run | Iterable[Path | str | Run]


def plot_loss(
    runs: Runs, ax: Axes | None = None, *, key: str = "loss", since: float = 0.0, smoothing: float = 0.0
) -> Axes:
    """Fig. 7: the training loss over steps; `since=7 / 9` is Fig. 10, the last part of it.

    Args:
        runs: run folders.
        ax: where to draw; None makes one.
        key: "loss", "kd_loss", "ce_loss" or "eval_loss" of the log.
        since: the share of the planned steps that is left out at the start.
        smoothing: from 0 to below 1; each point keeps this part of the one before it.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be from 0 to below 1, got {smoothing}")
    groups = _groups(runs)
    lines = step_lines(groups, key, since)
    for line in lines:
        line.y = _smoothed(line.y, smoothing)
    return _draw(groups, lines, ax, f"{key} in log.jsonl, which `affine train` writes", "step", key.replace("_", " "))


def plot_gradient_norm(runs: Runs, ax: Axes | None = None, *, until: int | None = None) -> Axes:
    """Fig. 8: the gradient norm before clipping, on a logarithmic axis; `until=500` shows what Tables 4 and 5 count."""
    groups = _groups(runs)
    lines = step_lines(groups, "grad_norm", until=until)
    ax = _draw(groups, lines, ax, "grad_norm in log.jsonl, which `affine train` writes", "step", "gradient norm")
    ax.set_yscale("log")
    return ax


def plot_mean_logit(runs: Runs, ax: Axes | None = None, *, layer: int | None = None) -> Axes:
    """Fig. 2: the mean attention logit over steps, over all layers or one."""
    groups = _groups(runs)
    lines = probe_lines(groups, "mean_logit", layer)
    missing = "mean_logit in log.jsonl, which `affine train` writes with probe_every above 0"
    return _draw(groups, lines, ax, missing, "step", "mean logit")


def plot_row_sums(runs: Runs, ax: Axes | None = None, *, layer: int | None = None) -> Axes:
    """Fig. 3: histograms of the sum of weights per query, averaged over heads; dashed: mean, dotted: median."""
    groups = _groups(runs)
    views = {view["name"]: view["panels"] for view in histogram_views(groups, "row_sum")}
    panels = next(iter(views.values())) if layer is None else views.get(f"layer {layer}")
    if not panels:
        raise ValueError(_nothing(groups, "row sums" if layer is None else f"row sums of layer {layer}", "inspect"))
    ax = ax or _new_axes()
    for panel in panels:
        group = groups[panel["group"]]
        ax.stairs(panel["shares"], panel["edges"], fill=True, alpha=0.35, color=group.colour[0], label=_legend(group))
        ax.stairs(panel["shares"], panel["edges"], color=group.colour[0])
        ax.axvline(panel["mean"], color=group.colour[0], linestyle="--", linewidth=1)
        ax.axvline(panel["median"], color=group.colour[0], linestyle=":", linewidth=1)
    return _labelled(ax, "sum of weights over keys", "share of queries")


def plot_first_token(runs: Runs, ax: Axes | None = None) -> Axes:
    """Fig. 4: the weight on the first token, layer by layer, averaged over heads."""
    groups = _groups(runs)
    return _draw_layers(groups, layer_lines(groups, "first_token", "mean"), ax, "weight on first token")


def plot_entropy(runs: Runs, ax: Axes | None = None, *, of: str = "softmax") -> Axes:
    """Fig. 6: attention entropy layer by layer; of "softmax" p, of "weights" |w|/Σ|w|, or the "negative_mass" of w."""
    if of not in ("softmax", "weights", "negative_mass"):
        raise ValueError(f'of must be "softmax", "weights" or "negative_mass", got {of!r}')
    groups = _groups(runs)
    label = "negative part of Σ|w|" if of == "negative_mass" else "entropy (nats)"
    return _draw_layers(groups, layer_lines(groups, "entropy", of), ax, label)


def plot_total_weight(runs: Runs, ax: Axes | None = None, *, normalise: bool = False) -> Axes:
    """Fig. 5: the total attention weight of each head of one setting, as a layer x head image.

    `normalise` scales the smallest head to 0 and the largest to 1, as the paper's figure does.
    """
    group = _one_group(runs)
    found = [values for run in group.runs if (values := run.inspected("total_weight", "mean")) is not None]
    if not found:
        raise ValueError(_nothing([group], "total weights", "inspect"))
    values = nanmean(np.stack(found), axis=0)
    if normalise:
        low, high = np.nanmin(values), np.nanmax(values)
        values = (values - low) / (high - low) if high > low else np.ones_like(values)
    ax = ax or _new_axes()
    image = ax.imshow(values, aspect="auto", cmap="Blues", vmin=min(0.0, float(np.nanmin(values))))
    ax.figure.colorbar(image, ax=ax, label="total weight")
    ax.set_title(_legend(group))
    ax.locator_params(integer=True)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return ax


def plot_attention_map(
    runs: Runs, ax: Axes | None = None, *, layer: int | None = None, head: int | None = None, tokens: int = 30
) -> Axes:
    """Fig. 9: signed attention weights of one run's map; the mean of all heads, or one head; blue adds, red subtracts.

    Args:
        runs: one run folder; of several seeds of one setting the first.
        ax: where to draw; None makes one.
        layer: None takes the middle one of those that were kept.
        head: None takes the mean of all heads.
        tokens: the block of the first so many tokens (the paper: 30).
    """
    run = _one_group(runs).runs[0]
    maps = run.maps()
    if not maps:
        raise ValueError(f"{run.folder.path} holds no attention maps; `affine inspect {run.folder.path}` writes them")
    layer = list(maps)[len(maps) // 2] if layer is None else layer
    if layer not in maps:
        raise ValueError(f"layer must be one of those kept, {', '.join(map(str, maps))}, got {layer}")
    heads = len(maps[layer])
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head must be from 0 to {heads - 1}, got {head}")
    weights = (maps[layer].mean(axis=0) if head is None else maps[layer][head])[:tokens, :tokens]
    ax = ax or _new_axes()
    reach = float(np.nanmax(np.abs(weights), initial=0.0)) or 1.0
    image = ax.imshow(weights, cmap="RdBu", vmin=-reach, vmax=reach)
    ax.figure.colorbar(image, ax=ax, label="weight")
    names = [short(token, 20) for token in run.map_tokens[: len(weights)]]
    if names:
        ax.set_yticks(range(len(names)), [_literal(name) for name in names], fontsize=6)
    whose = "mean of heads" if head is None else f"head {head}"
    ax.set_title(f"{_literal(short(run.mechanism_name, 40))}, layer {layer}, {whose}")
    ax.set_xlabel("token that is read")
    ax.set_ylabel("token that reads")
    return ax


def plot_alpha(runs: Runs, ax: Axes | None = None) -> Axes:
    """Histograms of alpha over all layers and heads."""
    groups = _groups(runs)
    panels = histogram_views(groups, "alpha")[0]["panels"]
    if not panels:
        raise ValueError(_nothing(groups, "alphas", "inspect"))
    ax = ax or _new_axes()
    for panel in panels:
        group = groups[panel["group"]]
        ax.stairs(panel["shares"], panel["edges"], fill=True, alpha=0.35, color=group.colour[0], label=_legend(group))
    return _labelled(ax, "alpha", "share of queries")


def plot_activations(ax: Axes | None = None) -> Axes:
    """Fig. 11: linear clipping and the sigmoid."""
    import torch

    from ..nn.scaling import ACTIVATION_FUNCTIONS

    ax = ax or _new_axes()
    x = torch.linspace(-10, 10, 401, dtype=torch.float64)
    for name, function in ACTIVATION_FUNCTIONS.items():
        ax.plot(x.numpy(), function(x).numpy(), label=name.replace("_", " "))
    return _labelled(ax, "x", "alpha")


def _groups(runs: Runs) -> list[Group]:
    loaded = load_runs(runs)
    if not loaded:
        raise ValueError("runs must name at least one run folder, got none")
    return group_runs(loaded)


def _one_group(runs: Runs) -> Group:
    groups = _groups(runs)
    if len(groups) > 1:
        names = ", ".join(short(group.label, 60) for group in groups)
        raise ValueError(f"this figure shows one setting on an axis, got {len(groups)}: {names}; draw them one by one")
    return groups[0]


def _draw(groups: list[Group], lines: list[Line], ax: Axes | None, missing: str, x: str, y: str) -> Axes:
    if not lines:
        raise ValueError(f"none of {', '.join(str(run.folder.path) for g in groups for run in g.runs)} has {missing}")
    ax = ax or _new_axes()
    named: set[int] = set()
    for line in lines:
        group = groups[line.group]
        style: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.4}
        if not line.thin:
            style = {
                "linewidth": 1.6,
                "dashes": _dashes(group),
                "label": None if line.group in named else _legend(group),
            }
            named.add(line.group)
        ax.plot(line.x, line.y, color=group.colour[0], **style)
    return _labelled(ax, x, y)


def _draw_layers(groups: list[Group], lines: list[Line], ax: Axes | None, y: str) -> Axes:
    ax = _draw(groups, lines, ax, "this in inspection.json, which `affine inspect` writes", "layer", y)
    for line, drawn in zip(lines, ax.get_lines()[-len(lines) :], strict=True):
        drawn.set_marker("" if line.thin else "o")
        drawn.set_markersize(3)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    ax.locator_params(axis="x", integer=True)
    return ax


def _new_axes() -> Axes:
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def _labelled(ax: Axes, x: str, y: str) -> Axes:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _legend(group: Group) -> str:
    """The label of a group; matplotlib would leave one out that starts with an underscore."""
    text = _literal(short(group.label, 60))
    return f" {text}" if text.startswith("_") else text


def _literal(text: str) -> str:
    """Text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")


def _dashes(group: Group) -> tuple[float, ...]:
    """The dashes of the page, in line widths."""
    return tuple(float(part) / 1.6 for part in group.dash.split()) or (None, None)  # type: ignore[return-value]


def _smoothed(values: np.ndarray, smoothing: float) -> np.ndarray:
    """Exponential smoothing that starts without a bias to zero; what is not a number stays out of it."""
    if smoothing == 0:
        return values
    total = weight = 0.0
    smooth = np.full_like(values, np.nan)
    for index, value in enumerate(values):
        if np.isfinite(value):
            total = smoothing * total + (1 - smoothing) * value
            weight = smoothing * weight + (1 - smoothing)
            smooth[index] = total / weight
    return smooth


def _nothing(groups: list[Group], what: str, command: str) -> str:
    names = ", ".join(str(run.folder.path) for group in groups for run in group.runs)
    return f"none of {names} has {what}; `affine {command} RUN` measures them"
