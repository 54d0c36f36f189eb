"""Computes the gradient-norm statistics of Tables 4 and 5 from a training log.

Table 4: mean, standard deviation, variance and coefficient of variation (std / mean) of the raw norms of steps 0 to
500, unsmoothed. Table 5: spikes, steps whose norm exceeds median(g) + k * MAD(g) for k = 6 and 9, with median and MAD
of the run itself over the same steps.

Our reading: norms before clipping; MAD is the plain median of abs(g - median(g)), without the factor 1.4826 that makes
it an estimate of a standard deviation (the paper mentions none); the standard deviation is that of the population. A
log counts steps from 1, so "0 to 500" are the first 500 steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import is_there, read_lines
from .run import RunFolder

FIRST_STEP, LAST_STEP = 0, 500
THRESHOLDS = (6, 9)
NAMED_STEPS = 20  # steps that a sentence lists; the rest is counted


def gradient_statistics(
    log: str | Path | Iterable[float | None] | Iterable[Mapping[str, Any]],
    *,
    first_step: int = FIRST_STEP,
    last_step: int = LAST_STEP,
    thresholds: Sequence[float] = THRESHOLDS,
) -> dict[str, Any]:
    """Tables 4 and 5 for one run; `missing` lists in sentences which steps were not counted, and why.

    >>> gradient_statistics([1.0, 1.1, 0.9, 1.0, 9.0])["spikes"]
    {'6': 1, '9': 1}

    Args:
        log: a `log.jsonl`, a run folder, lines of a log (with `step` and `grad_norm`), or a list of norms that starts
            at step 1.
        first_step, last_step: the range of steps, both included.
        thresholds: the values of k for the spikes.

    Returns:
        `steps` [first, last], `count`, `mean`, `std`, `variance`, `cv`, `median`, `mad`, and by k (as text)
        `thresholds`, `spikes` (counts) and `spike_steps`; `missing_steps` and `not_finite_steps`; `missing`. Statistics
        are None if no step can be counted. Steps whose norm is not finite are excluded from all statistics.
    """
    if last_step < first_step:
        raise ValueError(f"last_step must not be before first_step = {first_step}, got {last_step}")
    norms, repeated = _norms(log)
    chosen = {step: norm for step, norm in norms.items() if first_step <= step <= last_step}
    finite = {step: norm for step, norm in chosen.items() if norm is not None and math.isfinite(norm)}
    not_finite = sorted(step for step in chosen if step not in finite)
    # Steps after the last logged one are not missing: the run ended early.
    expected = range(max(first_step, 1), min(last_step, max(norms, default=0)) + 1)
    absent = [step for step in expected if step not in chosen]
    return {
        "steps": [first_step, last_step],
        "count": len(finite),
        **_moments(list(finite.values())),
        **_spikes(finite, thresholds),
        "missing_steps": absent,
        "not_finite_steps": not_finite,
        "missing": _sentences(norms, last_step, absent, not_finite, sorted(s for s in repeated if s in chosen)),
    }


def format_statistics(name: str | Path, found: Mapping[str, Any]) -> str:
    """The statistics as lines for a terminal."""
    lines = [f"{name}, steps {found['steps'][0]} to {found['steps'][1]}: {found['count']} gradient norms"]
    if found["count"]:
        cv = "none" if found["cv"] is None else f"{found['cv']:.4f}"
        lines.append(f"  mean {found['mean']:.4f}  std {found['std']:.4f}  variance {found['variance']:.5f}  CV {cv}")
        spikes = "  ".join(f"k={k}: {count}" for k, count in found["spikes"].items())
        lines.append(f"  median {found['median']:.4f}  MAD {found['mad']:.4f}  spikes above median + k MAD  {spikes}")
    return "\n".join([*lines, *(f"  {sentence}" for sentence in found["missing"])])


def _norms(log: Any) -> tuple[dict[int, float | None], set[int]]:
    """(norm of each step, steps that were logged more than once; the last line is used)."""
    where = "the log, line"
    if isinstance(log, str | Path):
        path = RunFolder(log).log_file if Path(log).is_dir() else Path(log)
        if not is_there(path):
            raise FileNotFoundError(f"log must be a log.jsonl or a run folder, but {path} does not exist")
        where, log = f"{path}, line", read_lines(path)
    norms: dict[int, float | None] = {}
    repeated: set[int] = set()
    for number, entry in enumerate(log, start=1):
        step, norm = (entry.get("step"), entry.get("grad_norm")) if isinstance(entry, Mapping) else (number, entry)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"{where} {number} must have an integer step, got {str(step)[:80]!r}")
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, int | float)):
            raise TypeError(f"grad_norm of step {step} must be a number or null, got {norm!r}")
        if step in norms:
            repeated.add(step)
        norms[step] = norm
    return norms, repeated


def _moments(norms: list[float]) -> dict[str, float | None]:
    if not norms:
        return {"mean": None, "std": None, "variance": None, "cv": None}
    mean = statistics.fmean(norms)
    variance = statistics.pvariance(norms)
    return {"mean": mean, "std": variance**0.5, "variance": variance, "cv": variance**0.5 / mean if mean else None}


def _spikes(norms: dict[int, float], thresholds: Sequence[float]) -> dict[str, Any]:
    if not norms:
        nothing = {f"{k:g}": None for k in thresholds}
        return {"median": None, "mad": None, "thresholds": nothing, "spikes": nothing, "spike_steps": nothing}
    median = statistics.median(norms.values())
    mad = statistics.median(abs(norm - median) for norm in norms.values())
    limits = {f"{k:g}": median + k * mad for k in thresholds}
    steps = {k: sorted(step for step, norm in norms.items() if norm > limit) for k, limit in limits.items()}
    spikes = {k: len(each) for k, each in steps.items()}
    return {"median": median, "mad": mad, "thresholds": limits, "spikes": spikes, "spike_steps": steps}


def _sentences(
    norms: dict[int, float | None], last_step: int, absent: list[int], not_finite: list[int], repeated: list[int]
) -> list[str]:
    sentences = []
    if not norms:
        sentences.append("the log has no steps")
    elif max(norms) < last_step:
        sentences.append(f"the log ends at step {max(norms)}, before step {last_step}")
    for steps, words in (
        (absent, "not in the log"),
        (not_finite, "skipped: the gradient norm is missing or not finite"),
        (repeated, "logged more than once: the last line was used"),
    ):
        if steps:
            named = ", ".join(map(str, steps[:NAMED_STEPS]))
            more = f" and {len(steps) - NAMED_STEPS} more" if len(steps) > NAMED_STEPS else ""
            sentences.append(f"{'step' if len(steps) == 1 else 'steps'} {named}{more} {words}")
    return sentences
