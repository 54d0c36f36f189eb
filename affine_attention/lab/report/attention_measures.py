"""The statistics of a run's inspection that the paper's claims about attention are based on."""

from __future__ import annotations

import math

import numpy as np

from .collect import Run, grid, number
from .measures import Measure

EVEN = 1e-6  # if total weights of all heads differ by less than this, they cannot be scaled to [0, 1]


def first_token(run: Run) -> float:
    """Mean over layers and heads of the weight w on the first token."""
    return _mean(run.inspected("first_token", "mean"))


def first_token_of_softmax(run: Run) -> float:
    """The first token's share of the softmax part: mean(α p₁) / mean(α), which does not shrink with a smaller α.

    Computed from the means of the inspection. Without a bias, w is α p and its sum over keys is α (minus the mass of a
    sink). With a bias, mean(α p₁) = mean(w₁) − mean(β), and β = (running_alpha − α) / N is linear in α for constant N.
    """
    held = run.inspected("first_token", "softmax")
    if held is not None:
        return _mean(held)
    weight = run.inspected("first_token", "mean")
    mechanism = run.inspection.get("mechanism")
    if weight is None or not isinstance(mechanism, dict):
        return math.nan
    if not mechanism.get("bias"):
        return _mean(_ratio(weight, run.inspected("total_weight", "mean")))
    alpha, running = run.inspected("alpha", "mean"), run.inspected("running_alpha")
    length, inspected = number(mechanism.get("bias_length")), number(run.inspection.get("length"))
    if alpha is None or running is None or mechanism.get("sink") or not length >= inspected:
        return math.nan
    if not weight.shape == alpha.shape == running.shape:
        return math.nan
    return _mean(_ratio(weight - (running - alpha) / length, alpha))


def entropy_of_weights(run: Run) -> float:
    return _mean(run.inspected("entropy", "weights"))


def entropy_of_softmax(run: Run) -> float:
    return _mean(run.inspected("entropy", "softmax"))


def entropy_of_bias(run: Run) -> float:
    """The effect of β: the entropy of the weights minus the entropy of their softmax part."""
    return entropy_of_weights(run) - entropy_of_softmax(run)


def total_weight_spread(run: Run) -> float:
    """Standard deviation of the total weight over the heads of a layer, averaged over layers."""
    return _over_heads(run.inspected("total_weight", "mean"))


def scaled_weight_spread(run: Run) -> float:
    """The same for weights scaled to [0, 1] over the model, as in Figure 5."""
    total = run.inspected("total_weight", "mean")
    if total is None or np.nanmax(total) - np.nanmin(total) < EVEN:
        return math.nan
    return _over_heads((total - np.nanmin(total)) / (np.nanmax(total) - np.nanmin(total)))


def entropy_spread(run: Run) -> float:
    """Standard deviation over the heads of a layer of the entropy of the softmax part, averaged over layers."""
    return _over_heads(run.inspected("entropy", "softmax"))


def row_sum_spread(run: Run) -> float:
    """Standard deviation over queries of the row sum averaged over heads (Figure 3), averaged over layers."""
    rows = run.inspection.get("row_sum")
    found = rows.get("over_heads") if isinstance(rows, dict) else None
    return _mean(grid(found.get("std")) if isinstance(found, dict) else None)


FIRST_TOKEN = Measure("First token, w", first_token, digits=4,
                      title="weight on the first token, mean over layers and heads")  # fmt: skip
FIRST_TOKEN_OF_SOFTMAX = Measure(
    "First token, softmax part",
    first_token_of_softmax,
    digits=4,
    title="mean(α p) / mean(α) of the first token: its share of the softmax part, independent of α and β",
)
ENTROPY = Measure("Entropy of weights", entropy_of_weights, better="higher",
                  title="of |w| / Σ|w| in nats, mean over layers and heads")  # fmt: skip
ENTROPY_OF_SOFTMAX = Measure("Entropy of softmax part", entropy_of_softmax, better="higher",
                             title="of p in nats, mean over layers and heads")  # fmt: skip
ENTROPY_OF_BIAS = Measure("Entropy that β adds", entropy_of_bias, better="higher",
                          title="entropy of weights − entropy of softmax part")  # fmt: skip
TOTAL_WEIGHT_SPREAD = Measure("Spread of total weight", total_weight_spread, better="higher", digits=4,
                              title="standard deviation over the heads of a layer, mean over layers")  # fmt: skip
SCALED_WEIGHT_SPREAD = Measure("The same, scaled to [0, 1]", scaled_weight_spread, better="higher", digits=4,
                               title="total weights scaled over the model, as in Figure 5")  # fmt: skip
ENTROPY_SPREAD = Measure("Spread of entropy of softmax part", entropy_spread, better="higher", digits=4,
                         title="standard deviation over the heads of a layer, mean over layers")  # fmt: skip
ROW_SUM_SPREAD = Measure("Spread of row sums", row_sum_spread, better="higher", digits=4,
                         title="standard deviation over queries of the row sum averaged over heads")  # fmt: skip


def _mean(values: np.ndarray | None) -> float:
    return math.nan if values is None or not values.size or np.isnan(values).all() else float(np.nanmean(values))


def _over_heads(values_LH: np.ndarray | None) -> float:
    """Standard deviation over heads, averaged over the layers with at least two heads."""
    if values_LH is None or values_LH.shape[1] < 2:
        return math.nan
    layers = [row[~np.isnan(row)] for row in values_LH]
    spreads = [float(row.std()) for row in layers if row.size > 1]
    return math.fsum(spreads) / len(spreads) if spreads else math.nan


def _ratio(above: np.ndarray, below: np.ndarray | None) -> np.ndarray | None:
    if below is None or above.shape != below.shape:
        return None
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
