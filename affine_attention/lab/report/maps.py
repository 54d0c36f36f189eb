"""Packs attention maps into a few megabytes for the page."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from .collect import Run
from .groups import Group
from .text import short, visible

BUDGET = 3_600_000  # bytes of weights for the whole page, before base64
LONGEST = 64  # tokens; the cells of a larger map would be too small
SHORTEST = 30  # tokens, as in the paper's Fig. 9


def packed_maps(groups: list[Group]) -> tuple[list[dict[str, Any]], list[str]]:
    """Maps of every run if they fit, else of each group's first seed; with notes about omitted maps."""
    loaded: list[tuple[int, Run, dict[int, np.ndarray]]] = []
    for index, group in enumerate(groups):
        loaded += [(index, run, maps) for run in group.runs if (maps := run.maps())]
    if not loaded:
        return [], []
    notes = []
    share = BUDGET // len(loaded)
    if any(_size(maps, SHORTEST, 1) > share for _, _, maps in loaded):
        firsts = {index: (index, run, maps) for index, run, maps in reversed(loaded)}
        if len(firsts) < len(loaded):
            notes.append("Maps are shown for the first seed of each mechanism; the others are in their run folders.")
        loaded, share = sorted(firsts.values(), key=lambda found: found[0]), BUDGET // len(firsts)
    packed = []
    for index, run, maps in loaded:
        entry = pack(maps, run.map_tokens, share)
        kept, there = len(entry["layers"]), len(maps)
        if kept < there:
            notes.append(f"{short(groups[index].label)}: {kept} of {there} layers, evenly spaced, to save space.")
        packed.append({"group": index, "seed": visible(run.seed_label), **entry})
    return packed, notes


def pack(maps: dict[int, np.ndarray], tokens: list[str], share: int) -> dict[str, Any]:
    """The first n tokens of each map as integers; n, the layers and the bits are chosen to fit into `share` bytes.

    A weight is sign · scale · (q / top)², with one scale per layer and head, so that small weights are not rounded to
    zero. Rows end at the diagonal if all weights above it are zero.
    """
    length = min(min(m.shape[1] for m in maps.values()), LONGEST)
    bits, layers = 16, list(maps)
    if _size(maps, length, 2) > share:
        bits = 8
    while _size(maps, length, bits // 8) > share and length > SHORTEST:
        length -= 1
    while len(layers) > 1 and _size({layer: maps[layer] for layer in layers}, length, bits // 8) > share:
        kept = len(layers) - 1
        every = list(maps)
        layers = [every[round(i * (len(every) - 1) / max(1, kept - 1))] for i in range(kept)]
    causal = not any(np.triu(np.nan_to_num(maps[layer][:, :length, :length]), 1).any() for layer in layers)
    rows, columns = np.tril_indices(length) if causal else np.indices((length, length)).reshape(2, -1)
    top = 2 ** (bits - 1) - 1
    scales, blocks = [], []
    for layer in layers:
        weights = np.nan_to_num(maps[layer].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)[:, rows, columns]
        scale = np.abs(weights).max(axis=1, initial=0.0)
        part = np.abs(weights) / np.where(scale == 0, 1, scale)[:, None]
        blocks.append((np.sign(weights) * np.rint(top * np.sqrt(part))).astype(f"<i{bits // 8}"))
        scales.append([float(f"{value:.6g}") for value in scale])
    names = [*tokens[:length], *("" for _ in range(length - len(tokens)))]
    return {
        "length": length,
        "layers": layers,
        "bits": bits,
        "causal": causal,
        "scales": scales,
        "tokens": [short(token, 80) for token in names],
        "data": base64.b64encode(b"".join(block.tobytes() for block in blocks)).decode("ascii"),
    }


def _size(maps: dict[int, np.ndarray], length: int, width: int) -> int:
    cells = length * (length + 1) // 2
    return sum(weights.shape[0] for weights in maps.values()) * cells * width
