"""Measures how a model's loss depends on its first key, on low precision and on the position of a token.

| instrument | loss of the same sequences |
|---|---|
| `eviction` | with the first key removed from the cache after EVICTED_AFTER tokens, as a cache of limited size does |
| `quantisation` | with simulated int8 and int4 inputs and weights of the linear layers (quantisation.py) |
| `length` | by position, up to four times the training length, with and without the tokens before the training length |

Every instrument runs one sequence at a time and keeps one number per token. Losses are in nats per token. A difference
is the mean over sequences of the difference to the same model without the change; its standard error is over sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...hf import attach, detach, is_attached
from ...hf.eviction import check_can_evict, without_first_key
from ...messages import did_you_mean
from ..inspection.sequences import Sequences, find_sequences
from ..recipe import Recipe
from .quantisation import VARIANTS, linear_layers, quantised
from .scoring import evaluating
from .token_losses import token_losses

SEQUENCES = 8
EVICTED_AFTER = 64  # tokens, at most half of the sequence
FACTORS = (1, 2, 4)  # of the training length
Losses = Callable[[dict[str, Any]], Tensor]  # inputs of one sequence -> losses [T - 1]


def parse_instruments(names: Sequence[str] | str | None) -> list[str]:
    """The names of instruments; "all" stands for every one of them."""
    given = [names] if isinstance(names, str) else list(names or ())
    found: list[str] = []
    for name in given:
        if name != "all" and name not in INSTRUMENTS:
            raise ValueError(
                f"instruments must be all or some of {', '.join(INSTRUMENTS)}, got {name!r}"
                f"{did_you_mean(name, (*INSTRUMENTS, 'all'))}"
            )
        found += list(INSTRUMENTS) if name == "all" else [name]
    return list(dict.fromkeys(found))


def run_instruments(
    model: Any,
    tokenizer: Any,
    text: Any,
    names: Sequence[str],
    *,
    source: str,
    length: int,
    sequences: int = SEQUENCES,
    recipe: Recipe | None = None,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """The entry `instruments` of evaluation.json: one table for each name.

    Args:
        model: a transformers causal LM. A model without a mechanism gets plain softmax attention for the time of the
            call, which changes no output; a family that does not support it has no `eviction`.
        tokenizer: of the model.
        text: documents, or sequences of ids (inspection/sequences.py).
        names: of `INSTRUMENTS`.
        source: description of the text.
        length: the training length.
        sequences: how many sequences are read.
        recipe: of the run, whose document boundaries are kept.
        autocast: dtype of the forward.
    """
    results: dict[str, Any] = {}
    documents = text if hasattr(text, "__getitem__") else list(text)
    for name in names:
        tokens = FACTORS[-1] * length if name == "length" else length
        found = find_sequences(documents, tokenizer, sequences, tokens, recipe)
        protocol = {
            "source": source, "sequences": len(found.inputs), "length": length, "text": found.fingerprint(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        }  # fmt: skip
        if not found.inputs:
            results[name] = {"missing": found.missing, "protocol": protocol}
            continue

        def losses(inputs: dict[str, Any]) -> Tensor:
            return token_losses(model, inputs, autocast)[0].double()

        with torch.autocast(next(model.parameters()).device.type, dtype=autocast, enabled=autocast is not None):
            results[name] = INSTRUMENTS[name](model, found, losses, length)
        results[name]["missing"] = found.missing + results[name].get("missing", [])
        results[name]["protocol"] = protocol
    return results


def measure_eviction(model: Any, found: Sequences, losses: Losses, length: int) -> dict[str, Any]:
    """The loss of the tokens after the first key was removed from the cache; both losses are of the same tokens.

    The tokens before that have seen the first key, so that no other token has taken its part as the sink. Packed
    documents are read as one, because a cache holds one document.
    """
    plain, evicted = [], []
    device = next(model.parameters()).device
    try:
        check_can_evict(model.config.get_text_config(), length)
        with with_mechanism(model):
            for each in found.inputs:
                ids = each["input_ids"].to(device)
                after = min(EVICTED_AFTER, ids.shape[1] // 2)
                cache = without_first_key(fill_cache(model, ids[:, :after]))
                rest = torch.arange(after, ids.shape[1], device=device)[None]
                loss = losses({"input_ids": ids[:, after:], "position_ids": rest, "past_key_values": cache})
                evicted.append(loss.mean().item())
                plain.append(losses({"input_ids": ids})[after:].mean().item())
    except ValueError as error:
        return {"missing": [f"the first key was not evicted: {error}"]}
    return {"loss": mean(plain), "after": EVICTED_AFTER, "first_key": difference(evicted, plain)}


@torch.no_grad()
def fill_cache(model: Any, ids: Tensor) -> Any:
    """The keys and values of these tokens."""
    with evaluating(model):
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values


def measure_quantisation(model: Any, found: Sequences, losses: Losses, length: int) -> dict[str, Any]:
    """The loss of every variant of quantisation.py."""
    plain = [losses(each).mean().item() for each in found.inputs]
    table: dict[str, Any] = {"loss": mean(plain), "layers": len(linear_layers(model)), "variants": {}}
    for name, how in VARIANTS.items():
        with quantised(model, how):
            changed = [losses(each).mean().item() for each in found.inputs]
        table["variants"][name] = {"what": str(how), **difference(changed, plain)}
    return table


def measure_length(model: Any, found: Sequences, losses: Losses, length: int) -> dict[str, Any]:
    """The loss by the number of tokens before a token, and beyond the training length.

    `factors` has one entry for each range of positions: up to the training length L, from L to 2 L, from 2 L to 4 L.
    `windowed` is the loss of the same tokens in separate windows of L tokens, so `delta` is what the longer context
    costs or gains. The first token of a window is predicted by no other, and is left out of both.
    """
    longest = FACTORS[-1] * length
    limit = position_limit(model)
    missing = []
    if limit is not None and limit < longest:
        missing.append(f"the model has {limit} positions, so longer contexts were not measured")
        longest = max(length, limit // length * length) if limit >= length else limit
    edges = [2**power for power in range(longest.bit_length() + 1)]
    sums, counts = torch.zeros(len(edges), dtype=torch.float64), torch.zeros(len(edges), dtype=torch.float64)
    whole: dict[int, list[float]] = {factor: [] for factor in FACTORS}
    windowed: dict[int, list[float]] = {factor: [] for factor in FACTORS}
    for each in found.inputs:
        inputs = {name: tensor[:, :longest] for name, tensor in each.items()}
        tokens = inputs["input_ids"].shape[1]
        loss_T = losses(inputs)  # of tokens 1 ..
        places = torch.bucketize(torch.arange(1, tokens), torch.tensor(edges), right=True) - 1
        sums.index_add_(0, places, loss_T)
        counts.index_add_(0, places, torch.ones_like(loss_T))
        for before, factor in zip((0, *FACTORS), FACTORS, strict=False):
            first, last = before * length, factor * length
            if tokens < last:
                continue
            starts = range(first, last, length)
            parts = [losses({name: x[:, s : s + length] for name, x in inputs.items()}) for s in starts]
            whole[factor].append(torch.cat([loss_T[s : s + length - 1] for s in starts]).mean().item())
            windowed[factor].append(torch.cat(parts).mean().item())
    factors = {
        f"{factor}x": {"windowed": mean(windowed[factor]), **difference(whole[factor], windowed[factor])}
        for factor in FACTORS
        if whole[factor]
    }
    known = [index for index in range(len(edges)) if counts[index]]
    return {
        "factors": factors,
        "positions": {
            "from": [edges[index] for index in known],
            "loss": [(sums[index] / counts[index]).item() for index in known],
            "tokens": [int(counts[index]) for index in known],
        },
        "missing": missing,
    }


INSTRUMENTS: dict[str, Callable[[Any, Sequences, Losses, int], dict[str, Any]]] = {
    "eviction": measure_eviction,
    "quantisation": measure_quantisation,
    "length": measure_length,
}


def position_limit(model: Any) -> int | None:
    """The number of positions of a model with an embedding of positions; None if they are computed (rotary)."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    table = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not model.get_input_embeddings())
    return limit if limit is not None and any(True for _ in table) else None


@contextmanager
def with_mechanism(model: Any) -> Iterator[None]:
    """Plain softmax attention of this package for a model without a mechanism; it is detached at the end."""
    if is_attached(model):
        yield
        return
    attach(model, "softmax")
    try:
        yield
    finally:
        detach(model)


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def difference(changed: Sequence[float], plain: Sequence[float]) -> dict[str, float | None]:
    """The loss, its difference to the plain loss, and the standard error of the difference over sequences."""
    deltas = [a - b for a, b in zip(changed, plain, strict=True)]
    centre = mean(deltas)
    stderr = None
    if len(deltas) > 1 and centre is not None:
        stderr = math.sqrt(math.fsum((each - centre) ** 2 for each in deltas) / (len(deltas) - 1) / len(deltas))
    return {"loss": mean(changed), "delta": centre, "stderr": stderr}


def format_instruments(found: dict[str, Any]) -> list[str]:
    """The instruments as lines for a terminal."""
    lines = []
    rows: list[tuple[str, dict[str, Any]]] = []
    if "first_key" in (eviction := found.get("eviction", {})):
        rows.append((f"first key evicted after {eviction['after']} tokens", eviction["first_key"]))
    variants = found.get("quantisation", {}).get("variants", {})
    rows += [(entry["what"], entry) for entry in variants.values()]
    rows += [
        (f"{name} of the training length", entry) for name, entry in found.get("length", {}).get("factors", {}).items()
    ]
    if rows:
        lines.append(f"  {'instrument':44} {'loss':>10} {'difference':>10} {'±':>10}")
    for name, entry in rows:
        numbers = " ".join(f"{_number(entry[key]):>10}" for key in ("loss", "delta", "stderr"))
        lines.append(f"  {name:44} {numbers}")
    lines += [f"  {sentence}" for table in found.values() for sentence in table.get("missing", [])]
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
