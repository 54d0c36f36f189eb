"""Turns groups of runs into the data of the paper's Figures 2 to 11 and of a few more, ready for the page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .groups import Group, baseline_of
from .histograms import histogram_views
from .measures import EARLY, loss_measures, perplexity_measures, task_measures
from .series import Line, layer_lines, line_data, nanmean, probe_lines, rounded, step_lines
from .text import short

LATE = 7 / 9  # Fig. 10 shows steps 7,000 to 9,000 of 9,000
INSPECT = "`affine inspect RUN`"
TRAIN = "`affine train`"


def figures(groups: list[Group]) -> list[dict[str, Any]]:
    """Every figure in the order of the page; one without data says under `missing` what makes it."""
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
        "Lower is better; thin lines are single seeds, and a gap smaller than their spread may be chance.",
        _loss_views(groups, 0.0),
        f"No run has logged a step yet; {TRAIN} writes the log.",
        x="step", smooth=True, log=True,
    )  # fmt: skip


def _late_losses(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-10", "line", "Figure 10: loss in the last two ninths of training",
        "The end of Figure 7 under a magnifying glass (the paper: steps 7,000 to 9,000), where small gaps show.",
        _loss_views(groups, LATE),
        f"No run has come this far; {TRAIN} goes on from the last checkpoint.",
        x="step", smooth=True, smoothing=0.8,
    )  # fmt: skip


def _loss_views(groups: list[Group], since: float) -> list[dict[str, Any]]:
    names = {"loss": "training loss", "kd_loss": "distillation", "ce_loss": "cross-entropy", "eval_loss": "held-out"}
    views = [_view(name, "loss (nats)", step_lines(groups, key, since)) for key, name in names.items()]
    # Without a teacher, or with nothing but one, a part of the loss is the loss.
    return views[:1] + [view for view in views[1:] if view["lines"] != views[0]["lines"]]


def _gradient_norms(groups: list[Group]) -> dict[str, Any]:
    longest = max(run.steps for group in groups for run in group.runs)
    views = [
        _view("all steps", "gradient norm", step_lines(groups, "grad_norm")),
        _view(f"steps 0–{EARLY}", "gradient norm", step_lines(groups, "grad_norm", until=EARLY)),
    ]
    return _figure(
        "figure-8", "line", "Figure 8: gradient norm",
        "Norm before clipping; single high peaks are the spikes that Table 5 counts.",
        views[: 2 if longest > EARLY else 1],
        f"No run has logged a gradient norm yet; {TRAIN} writes it.",
        x="step", log=True, logged=True,
    )  # fmt: skip


def _logits(groups: list[Group]) -> dict[str, Any]:
    layers = max((run.probes("mean_logit")[1].shape[1] for group in groups for run in group.runs), default=0)
    views = [_view("all layers", "mean logit", probe_lines(groups, "mean_logit"))]
    for layer in range(layers if layers > 1 else 0):
        lines = [line for line in probe_lines(groups, "mean_logit", layer) if not line.thin]  # there are many layers
        views.append(_view(f"layer {layer}", "mean logit", lines))
    return _figure(
        "figure-2", "line", "Figure 2: mean attention logit",
        "The mean of q·k/√d over visible pairs; a falling line says that queries and keys match less and less.",
        views,
        f"No run was probed; {TRAIN} with probe_every above 0 writes mean_logit.",
        x="step",
    )  # fmt: skip


def _row_sums(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-3", "histogram", "Figure 3: sum of attention weights per query",
        "Softmax puts every query at exactly 1; the wider a histogram, the more freely a query sets how much it reads.",
        histogram_views(groups, "row_sum"),
        f"No run was inspected; {INSPECT} counts the row sums.",
        x="sum of weights over keys",
    )  # fmt: skip


def _first_token(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-4", "line", "Figure 4: attention weight on the first token",
        "High values mean that a layer parks its attention on the first token because it has to put it somewhere.",
        [
            _view(name, "weight on first token", layer_lines(groups, "first_token", "mean", how=how))
            for name, how in (("mean of heads", "mean"), ("strongest head", "max"))
        ],
        f"No run was inspected; {INSPECT} measures the first token's weight.",
        x="layer", whole=True, zero=True,
    )  # fmt: skip


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
        "Each cell is one head; even rows mean that heads of a layer do the same, mixed rows that they share the work.",
        [
            {"name": "total weight", "panels": raw, "floor": 0.0},
            {"name": "scaled to 0–1 in each mechanism", "panels": scaled, "floor": 0.0, "ceiling": 1.0},
        ],
        f"No run was inspected; {INSPECT} sums the weights of each head.",
    )  # fmt: skip


def _entropy(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "figure-6", "line", "Figure 6: attention entropy",
        "Higher means attention spread over more tokens; weights can be negative, so that part is shown as well.",
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
        "Linear clipping keeps a straight middle, so that α can rest between 0 and 1; the sigmoid flattens early.",
        [{"name": "φ", "y": "α = φ(x)", "lines": lines}], "", x="x = W_a X",
    )  # fmt: skip


def _alphas(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "alpha", "histogram", "α of each query",
        "Bars piled up at 0 or 1 are saturated: there linear clipping passes no gradient on.",
        histogram_views(groups, "alpha"),
        f"No inspected run has an α; train a mechanism with one (affine, head_gated, ..), then {INSPECT}.",
        x="α", domain=[-0.01, 1.01],
    )  # fmt: skip


def _saturation(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "saturation", "line", "α and gate during training",
        "The running average is what α drifts around; a saturated share that climbs is a warning.",
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
        "The numbers behind the curves, head by head: choose a quantity and look for heads that stand apart.",
        [{"name": name, "panels": _grids(groups, *keys)} for name, keys in quantities.items()],
        f"No run was inspected; {INSPECT} looks at every head.",
    )  # fmt: skip


def _speed(groups: list[Group]) -> dict[str, Any]:
    return _figure(
        "speed", "line", "Speed and learning rate",
        "Tokens a second on the hardware named under “what was run”; compare runs of the same machine only.",
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
    for measure in [*loss_measures(groups), *perplexity_measures(groups), *task_measures(groups)]:
        rows = []
        for index, group in enumerate(groups):
            baseline = baseline_of(group, groups)
            delta = measure.delta(group, baseline) if baseline else None
            if delta:
                low, high = rounded(delta.interval) if delta.interval else (None, None)
                rows.append({"group": index, "name": short(group.label), "mean": rounded([delta.mean])[0],
                             "low": low, "high": high, "seeds": delta.seeds})  # fmt: skip
        settings = {"better": measure.better, "digits": measure.digits}
        views.append({"name": measure.label, "x": f"Δ {measure.label}", "rows": rows, **settings})
    return _figure(
        "forest", "forest", "Differences to softmax",
        "A dot is the mean difference over seeds and its line the 95 % interval; one that crosses zero may be chance.",
        views,
        "There is no finished pair of softmax and another mechanism with the same recipe and settings. "
        "`affine train --mechanism softmax` makes the baseline.",
    )  # fmt: skip


def _grids(groups: list[Group], *keys: str) -> list[dict[str, Any]]:
    """[layers][heads] of each group, averaged over seeds."""
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
