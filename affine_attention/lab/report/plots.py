"""The data of the paper's Figures 2 to 11, and of some further figures, for the page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .first_tokens import uniform_share
from .groups import Group, baseline_of
from .histograms import histogram_views
from .measures import EARLY
from .series import Line, layer_lines, line_data, nanmean, probe_lines, rounded, step_lines
from .settings import settings_of
from .tables import delta_measures
from .text import short
from .verdicts import compare

LATE = 7 / 9  # Fig. 10 shows steps 7,000 to 9,000 of 9,000
INSPECT = "`affine inspect RUN`"
TRAIN = "`affine train`"


def figures(groups: list[Group]) -> list[dict[str, Any]]:
    """Every figure in the order of the page; `missing` explains how to get the data of an empty figure."""
    return [
        _deltas(groups),
        _losses(groups),
        _late_losses(groups),
        _gradient_norms(groups),
        _logits(groups),
        _row_sums(groups),
        _first_token(groups),
        _heads(groups),
        _entropy(groups),
        _activations(),
        _alphas(groups),
        _saturation(groups),
        _every_head(groups),
        _speed(groups),
    ]


def _figure(
    key: str, kind: str, title: str, aid: str, views: list[dict[str, Any]], missing: str, **more: Any
) -> dict[str, Any]:
    views = [view for view in views if view.get("lines") or view.get("panels") or view.get("rows")]
    base = {"key": key, "kind": kind, "title": title, "aid": aid, "views": views}
    return base | (more if views else {"missing": missing})


def _view(name: str, y: str, lines: list[Line]) -> dict[str, Any]:
    return {"name": name, "y": y, "lines": line_data(lines)}


def _losses(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-7", "line", "Figure 7: training loss",
        "Lower is better. Thin lines are single seeds; a gap smaller than their spread may be due to chance.",
        _loss_views(groups, 0.0),
        f"No run has logged a step yet; {TRAIN} writes the log.",
        x="step", smooth=True, log=True,
    )  # fmt: skip


def _late_losses(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-10", "line", "Figure 10: loss in the last two ninths of training",
        "The end of Figure 7 enlarged (the paper: steps 7,000 to 9,000), so that small gaps are visible.",
        _loss_views(groups, LATE),
        f"No run has come this far; {TRAIN} resumes from the last checkpoint.",
        x="step", smooth=True, smoothing=0.8,
    )  # fmt: skip


def _loss_views(groups: list[Group], since: float) -> list[dict[str, Any]]:
    names = {"loss": "training loss", "kd_loss": "distillation", "ce_loss": "cross-entropy", "eval_loss": "held-out"}
    views = [_view(name, "loss (nats)", step_lines(groups, key, since)) for key, name in names.items()]
    # If the loss has a single part, that part equals the loss and is not shown twice.
    return views[:1] + [view for view in views[1:] if view["lines"] != views[0]["lines"]]


def _gradient_norms(groups: list[Group]) -> dict[str, Any]:
    longest = max(run.steps for group in groups for run in group.runs)
    views = [
        _view("all steps", "gradient norm", step_lines(groups, "grad_norm")),
        _view(f"steps 0–{EARLY}", "gradient norm", step_lines(groups, "grad_norm", until=EARLY)),
    ]
    return _figure(
        "figure-8", "line", "Figure 8: gradient norm",
        "Norm before clipping. Isolated peaks are the spikes that Table 5 counts.",
        views[: 2 if longest > EARLY else 1],
        f"No run has logged a gradient norm yet; {TRAIN} writes it.",
        x="step", log=True, logged=True,
    )  # fmt: skip


def _logits(groups: list[Group]) -> dict[str, Any]:
    layers = max((run.probes("mean_logit")[1].shape[1] for group in groups for run in group.runs), default=0)
    views = [_view("all layers", "mean logit", probe_lines(groups, "mean_logit"))]
    for layer in range(layers if layers > 1 else 0):
        lines = [line for line in probe_lines(groups, "mean_logit", layer) if not line.thin]  # only means
        views.append(_view(f"layer {layer}", "mean logit", lines))
    return _figure(
        "figure-2", "line", "Figure 2: mean attention logit",
        "The mean of q·k/√d over visible pairs; a falling line means that queries and keys become less similar.",
        views,
        f"No run was probed; {TRAIN} with probe_every above 0 writes mean_logit.",
        x="step",
    )  # fmt: skip


def _row_sums(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-3", "histogram", "Figure 3: sum of attention weights per query",
        "With softmax every row sums to exactly 1; a wider histogram means that queries vary more in total attention.",
        histogram_views(groups, "row_sum"),
        f"No run was inspected; {INSPECT} counts the row sums.",
        x="sum of weights over keys",
    )  # fmt: skip


def _first_token(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-4", "line", "Figure 4: attention weight on the first token",
        "High values mean that a layer uses the first token as an attention sink." + _uniform_words(groups),
        [
            _view(name, "weight on first token", layer_lines(groups, "first_token", "mean", how=how))
            for name, how in (("mean of heads", "mean"), ("strongest head", "max"))
        ],
        f"No run was inspected; {INSPECT} measures the first token's weight.",
        x="layer", whole=True, zero=True,
    )  # fmt: skip


def _uniform_words(groups: list[Group]) -> str:
    """A sentence about what uniform attention would put on the first token, if it is the same for all runs."""
    shares = {uniform_share(run) for group in groups for run in group.runs}
    known = {share for share in shares if not math.isnan(share)}
    return f" Uniform attention would put {100 * known.pop():.2f} % there." if len(known) == 1 else ""


def _heads(groups: list[Group]) -> dict[str, Any]:
    raw = _grids(groups, "total_weight", "mean")
    scaled = []
    for panel in raw:
        values = np.array([[math.nan if v is None else v for v in row] for row in panel["values"]])
        low, high = np.nanmin(values), np.nanmax(values)
        flat = (values - low) / (high - low) if high > low else np.where(np.isnan(values), np.nan, 1.0)
        scaled.append({**panel, "values": [rounded(row) for row in flat]})
    return _figure(
        "figure-5", "heat", "Figure 5: total attention weight of each head",
        "Each cell is one head. Uniform rows mean that the heads of a layer are alike, mixed rows that they differ.",
        [
            {"name": "total weight", "panels": raw, "floor": 0.0},
            {"name": "scaled to 0–1 in each mechanism", "panels": scaled, "floor": 0.0, "ceiling": 1.0},
        ],
        f"No run was inspected; {INSPECT} sums the weights of each head.",
    )  # fmt: skip


def _entropy(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-6", "line", "Figure 6: attention entropy",
        "Higher means that attention is spread over more tokens. Weights can be negative; that share is shown as well.",
        [
            _view("of softmax p", "entropy (nats)", layer_lines(groups, "entropy", "softmax")),
            _view("of |w| / Σ|w|", "entropy (nats)", layer_lines(groups, "entropy", "weights")),
            _view("negative mass", "negative part of Σ|w|", layer_lines(groups, "entropy", "negative_mass")),
        ],
        f"No run was inspected; {INSPECT} measures the entropies.",
        x="layer", whole=True,
    )  # fmt: skip


def _activations() -> dict[str, Any]:
    """Fig. 11 does not depend on the runs. In numpy, so that the report does not need torch."""
    x = np.linspace(-10, 10, 201)
    functions = {"linear clipping": np.clip(0.1 * x + 0.5, 0, 1), "sigmoid": 1 / (1 + np.exp(-x))}
    lines = [
        {"colour": index, "name": name, "x": [round(v, 1) for v in x.tolist()], "y": rounded(y)}
        for index, (name, y) in enumerate(functions.items())
    ]
    return _figure(
        "figure-11", "line", "Figure 11: sigmoid and linear clipping",
        "Linear clipping is linear between its ends, so that α can stay between 0 and 1; the sigmoid saturates early.",
        [{"name": "φ", "y": "α = φ(x)", "lines": lines}], "", x="x = W_a X",
    )  # fmt: skip


def _alphas(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "alpha", "histogram", "α of each query",
        "Values at 0 or 1 are saturated: linear clipping has no gradient there.",
        histogram_views(groups, "alpha"),
        f"No inspected run has an α; train a mechanism with one (affine, head_gated, ..), then {INSPECT}.",
        x="α", domain=[-0.01, 1.01],
    )  # fmt: skip


def _saturation(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "saturation", "line", "α and gate during training",
        "α varies around its running average; a growing saturated share is a warning sign.",
        [
            _view("running average of α", "running α", probe_lines(groups, "running_alpha")),
            _view("α at 0 or 1", "saturated share", probe_lines(groups, "saturated")),
            _view("gate below 0.01 or above 0.99", "saturated share", probe_lines(groups, "gate_saturated")),
        ],
        f"No probed run has an α or a gate; {TRAIN} with probe_every above 0 writes them.",
        x="step",
    )  # fmt: skip


def _every_head(groups: list[Group]) -> dict[str, Any]:
    quantities = {
        "first token": ("first_token", "mean"),
        "entropy of p": ("entropy", "softmax"),
        "entropy of |w|": ("entropy", "weights"),
        "negative mass": ("entropy", "negative_mass"),
        "mean logit": ("mean_logit",),
        "mean α": ("alpha", "mean"),
        "spread of α": ("alpha", "std"),
        "running α": ("running_alpha",),
    }
    return _figure(
        "heads", "heat", "Every head",
        "The values of every head: choose a quantity to find heads that differ from the others.",
        [{"name": name, "panels": _grids(groups, *keys)} for name, keys in quantities.items()],
        f"No run was inspected; {INSPECT} measures every head.",
    )  # fmt: skip


def _speed(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "speed", "line", "Speed and learning rate",
        "Tokens per second on the hardware listed under “What was run”; compare only runs on the same machine.",
        [
            _view("tokens per second", "tokens / s", step_lines(groups, "tokens_per_second")),
            _view("model FLOPs utilisation", "MFU", step_lines(groups, "mfu")),
            _view("learning rate", "learning rate", step_lines(groups, "learning_rate")),
        ],
        f"No run has logged its speed yet; {TRAIN} writes it.",
        x="step", smooth=True, smoothing=0.8,
    )  # fmt: skip


def _deltas(groups: list[Group]) -> dict[str, Any]:
    views = []
    settings = settings_of(groups)
    for measure in delta_measures(groups):
        rows = []
        for index, group in enumerate(groups):
            setting = next(each for each in settings if group in each.groups)
            baseline = baseline_of(group, groups)
            found = compare(measure, ("", group), ("", baseline), None, setting) if baseline else None
            if found and (delta := found.decisive):
                low, high = rounded(delta.interval) if delta.interval else (None, None)
                rows.append({"group": index, "name": short(group.label), "mean": rounded([delta.mean])[0],
                             "low": low, "high": high, "seeds": delta.seeds})  # fmt: skip
        shape = {"better": measure.better, "digits": measure.digits}
        views.append({"name": measure.label, "x": f"Δ {measure.label}", "rows": rows, **shape})
    return _figure(
        "forest", "forest", "Differences to softmax",
        "A dot is the mean difference over seeds, its line the 95 % interval of the tables below; if it includes zero, "
        "the difference may be chance.",
        views,
        "There is no finished pair of softmax and another mechanism with the same recipe and settings. "
        "`affine train --mechanism softmax` makes the baseline.",
    )  # fmt: skip


def _grids(groups: list[Group], *keys: str) -> list[dict[str, Any]]:
    """[layers][heads] values of each group, averaged over seeds."""
    panels = []
    for index, group in enumerate(groups):
        found = [values for run in group.runs if (values := run.inspected(*keys)) is not None]
        if not found:
            continue
        shape = max(v.shape[0] for v in found), max(v.shape[1] for v in found)
        padded = [
            np.pad(v, [(0, shape[0] - v.shape[0]), (0, shape[1] - v.shape[1])], constant_values=np.nan) for v in found
        ]
        values = nanmean(np.stack(padded), axis=0)
        panels.append({"group": index, "name": short(group.label), "values": [rounded(row) for row in values]})
    return panels
