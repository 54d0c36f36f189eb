"""Pools the histograms of inspected runs over heads and seeds, for all layers together and for each layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from .collect import Run, number
from .groups import Group
from .series import rounded
from .text import short


def histogram_views(groups: list[Group], key: str) -> list[dict[str, Any]]:
    """Views of all layers, then `layer 0`, ..: one panel per group with edges, shares, mean and median.

    Row sums are shown averaged over heads, as in the paper's Fig. 3, and per head; alphas per head.
    """
    averaged = [(index, group, _pooled(group, key, "over_heads")) for index, group in enumerate(groups)]
    by_head = [(index, group, _pooled(group, key, "histogram")) for index, group in enumerate(groups)]
    first = averaged if any(found for _, _, found in averaged) else by_head
    layers = max((len(found[1]) for _, _, found in first if found), default=0)
    views = [{"name": "all layers", "panels": _panels(first, None)}]
    if first is averaged:
        views[0]["name"] = "averaged over heads, all layers"
        views.append({"name": "single heads, all layers", "panels": _panels(by_head, None)})
    views += [
        {"name": f"layer {layer}", "panels": _panels(first, layer)} for layer in range(layers if layers > 1 else 0)
    ]
    return views


Pooled = tuple[np.ndarray, np.ndarray] | None


def _panels(pooled: list[tuple[int, Group, Pooled]], layer: int | None) -> list[dict[str, Any]]:
    panels = []
    for index, group, found in pooled:
        if found is None or (layer is not None and layer >= len(found[1])):
            continue
        edges, counts = found
        chosen = counts.sum(axis=0) if layer is None else counts[layer]
        if chosen.sum() > 0:
            panels.append({"group": index, "name": short(group.label), **describe(edges, chosen)})
    return panels


def _pooled(group: Group, key: str, kind: str) -> Pooled:
    """Edges [bins + 1] and counts [layers, bins] over heads and seeds; seeds with other bins are skipped."""
    edges: np.ndarray | None = None
    total: np.ndarray | None = None
    for run in group.runs:
        found = _counts(run, key, kind)
        if found is None:
            continue
        if edges is None or total is None:
            edges, total = found
        elif np.array_equal(edges, found[0]) and total.shape == found[1].shape:
            total = total + found[1]
        else:
            run.note(f"its {key} histogram has other bins or layers than the other seeds and was not pooled")
    return None if edges is None or total is None else (edges, total)


def describe(edges: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Shares of a histogram without its empty ends, and the mean and median computed from its bins."""
    filled = np.flatnonzero(counts)
    first, last = int(filled[0]), int(filled[-1])
    share = counts / counts.sum()
    cumulative = np.cumsum(share)
    middle = int(np.searchsorted(cumulative, 0.5))
    before = cumulative[middle] - share[middle]
    median = edges[middle] + (0.5 - before) / share[middle] * (edges[middle + 1] - edges[middle])
    return {
        "edges": rounded(edges[first : last + 2]),
        "shares": rounded(share[first : last + 1]),
        "mean": rounded([float((share * (edges[:-1] + edges[1:]) / 2).sum())])[0],
        "median": rounded([float(median)])[0],
    }


def _counts(run: Run, key: str, kind: str) -> Pooled:
    part = run.inspection.get(key)
    histogram = part.get("histogram") if isinstance(part, dict) else None
    source = part.get(kind) if isinstance(part, dict) else None
    if not isinstance(histogram, dict) or not isinstance(source, dict):
        return None
    edges = np.array([number(edge) for edge in histogram.get("edges") or []])
    layers = source.get("counts")
    if edges.size < 2 or np.isnan(edges).any() or not isinstance(layers, list) or not layers:
        return None
    counts = np.zeros((len(layers), edges.size - 1))
    for index, layer in enumerate(layers):
        heads = layer if isinstance(layer, list) else []
        for head in [heads] if kind == "over_heads" else heads:
            if isinstance(head, list) and len(head) == edges.size - 1:
                counts[index] += np.nan_to_num([number(count) for count in head])
    return (edges, counts) if counts.any() else None
