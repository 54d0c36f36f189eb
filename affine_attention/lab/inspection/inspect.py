"""Measures the attention of a model on a few sequences (Figures 2 to 6 and 9): inspection.json and maps.safetensors.

Sequences and layers are processed one at a time, and only a tally per layer is kept. metrics.py defines the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...files import replacing, write_json
from ...hf import attach, is_attached
from ..machine import describe_machine
from ..models import find_model, load
from ..run import SCHEMA, RunFolder
from . import metrics
from .activations import ActivationTally, find_layers, summarise_activations, watch_layers
from .capture import AttentionCall, mechanism_layers, watch
from .sequences import Sequences, find_sequences
from .sinks import summarise_sinks, summarise_values
from .tally import ENTROPY_EDGES, SHARE_EDGES, LayerTally

EVEN = 1e-6  # if total weights of all heads differ by less than this, they are not scaled to [0, 1]


def inspect(
    model: str | Path | nn.Module,
    *,
    text: Any = None,
    tokenizer: Any = None,
    sequences: int = 10,
    length: int = 1024,
    map_length: int = 64,
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    output: str | Path | None = None,
) -> dict[str, Any]:
    """Measures every attention layer and head of a model on text, and returns the content of inspection.json.

    >>> inspect("runs/affine")["entropy"]["softmax"]  # doctest: +SKIP

    The model runs its usual attention implementation. `missing` lists what could not be measured as requested.

    Args:
        model: a run folder, a checkpoint folder, or a model with mechanisms; a checkpoint without one is softmax.
        text: a file, documents, or sequences of ids (sequences.py); None: the held-out text of the run.
        tokenizer: None uses the one in the folder. A model object needs one for text.
        sequences, length: number of sequences and tokens per sequence; the paper uses ten sequences of 1k tokens.
        map_length: tokens of the attention maps, from the first sequence; 0: no maps.
        layers: layers whose maps are stored; None: all.
        device: for a folder; None uses a GPU if there is one. A model object stays on its device.
        dtype: of the weights, for a folder; None: as saved.
        output: folder for inspection.json and inspection/maps.safetensors; None: the run folder, if it is a run.
    """
    if isinstance(map_length, bool) or not isinstance(map_length, int) or map_length < 0:
        raise ValueError(f"map_length must be an integer of at least 0, got {map_length!r}")
    recipe, missing = None, []
    if isinstance(model, nn.Module):
        if device is not None or dtype is not None:
            raise ValueError("device and dtype are for folders: move the model, then inspect it")
        network: Any = model
    else:
        folder, run = find_model(model)
        if run is not None and run.exists:
            recipe, output = run.recipe(), run.path if output is None else output
        network, tokenizer = load(folder, tokenizer, device=device, dtype=dtype)
        network = (network if is_attached(network) else attach(network, "softmax")).to(network.device).eval()
    mechanisms = mechanism_layers(network)
    if not mechanisms:
        raise ValueError(
            f"model must have a mechanism, got {type(network).__name__} without one; "
            'affine_attention.hf.attach(model, "softmax") adds one without changing its outputs'
        )
    kept = _map_layers(layers, len(mechanisms))
    limit = getattr(getattr(network, "config", None), "max_position_embeddings", None)
    if limit is not None and length > limit:
        missing.append(f"length {length} exceeds the {limit} positions of the model; {limit} was used instead")
        length = limit
    found = find_sequences(text, tokenizer, sequences, length, recipe)
    _check_ids(found, network)
    tallies, maps, activations = measure(network, found.inputs, map_length, kept)
    map_tokens = _map_tokens(found, tokenizer, maps, map_length)
    result = {
        "schema": SCHEMA,
        "made": describe_machine(_device_of(network)),
        "mechanism": mechanisms[0].mechanism.to_dict(),
        "sequences": len(found.inputs),
        "length": length,
        "tokens": sum(each["input_ids"].shape[1] for each in found.inputs),
        "layers": len(mechanisms),
        "heads": mechanisms[0].num_heads,
        "text": {"source": found.source, "fingerprint": found.fingerprint()},
        "missing": missing + found.missing + _beyond_one(mechanisms[0].mechanism) + _not_finite(tallies),
        **summarise(tallies),
        "activations": summarise_activations(activations),
        "running_alpha": _running_alpha(mechanisms),
        "maps": {"tokens": map_tokens, "length": len(map_tokens), "layers": sorted(maps)} if maps else None,
    }
    if output is not None:
        write(result, maps, Path(output))
    return result


def measure(
    model: nn.Module, inputs: Sequence[dict[str, Tensor]], map_length: int = 0, map_layers: Sequence[int] = ()
) -> tuple[list[LayerTally], dict[int, Tensor], list[ActivationTally]]:
    """Runs the model on each input.

    Returns the tally of each layer, the attention maps of `map_layers` for the first input, and the tally of each
    layer's output.
    """
    tallies = [LayerTally(layer.num_heads) for layer in mechanism_layers(model)]
    maps: dict[int, Tensor] = {}
    activations = [ActivationTally() for _ in find_layers(model)]

    def observer(call: AttentionCall) -> None:
        tallies[call.layer].add(call)
        if call.layer in map_layers and call.layer not in maps and map_length > 0:
            maps[call.layer] = metrics.weight_map(
                call.query, call.key, map_length, alpha=call.alpha, beta=call.beta, sink=call.sink,
                visibility=call.visibility, softmax_scale=call.softmax_scale, difference=call.difference,
                weights=call.weights,
            ).cpu()  # fmt: skip

    # Only the decoder if the model has one: the logits would be by far the largest tensor.
    decoder: Any = model.base_model if isinstance(model, PreTrainedModel) else model
    options = {"use_cache": False} if isinstance(model, PreTrainedModel) else {}
    training, device = model.training, _device_of(model)
    model.eval()
    try:
        watched = watch_layers(model, lambda layer, hidden: activations[layer].add(hidden))
        with torch.no_grad(), watch(model, observer), watched:
            for each in inputs:
                positions = {name: x.to(device) for name, x in each.items() if name != "input_ids"}
                decoder(each["input_ids"].to(device), **positions, **options)
    finally:
        model.train(training)
    return tallies, maps, activations


def summarise(tallies: Sequence[LayerTally]) -> dict[str, Any]:
    """The tallies of all layers as lists [layer][head], as stored in inspection.json."""

    def means(name: str) -> list[Any]:
        return [tally.moments[name].means() for tally in tallies]

    def deviations(name: str) -> list[Any]:
        return [tally.moments[name].deviations() for tally in tallies]

    over_heads = [tally.over_heads_numbers() for tally in tallies]
    total = means("row_sum")
    return {
        "row_sum": {
            "mean": total,
            "std": deviations("row_sum"),
            "histogram": {"edges": SHARE_EDGES.tolist(), "counts": [t.row_sum.counts.tolist() for t in tallies]},
            "over_heads": {name: [each[name] for each in over_heads] for name in ("mean", "std", "median")}
            | {"counts": [t.over_heads_histogram.counts[0].tolist() for t in tallies]},
        },
        "first_token": {
            "mean": means("first_token"),
            "std": deviations("first_token"),
            "softmax": metrics.finite_or_none([t.share_of_softmax().tolist() for t in tallies]),
            "uniform": means("first_uniform"),
        },
        "sink_rate": summarise_sinks([tally.sinks for tally in tallies]),
        "value_norm": summarise_values([tally.values for tally in tallies]),
        "total_weight": {
            "mean": total,
            "std": deviations("row_sum"),
            "absolute": means("absolute_sum"),
            "normalized": _min_max(total),
        },
        "entropy": {
            "softmax": means("entropy_softmax"),
            "weights": means("entropy_weights"),
            "negative_mass": means("negative_mass"),
            "histogram": {"edges": ENTROPY_EDGES.tolist()}
            | {
                name: [t.entropy[f"entropy_{name}"].counts.tolist() for t in tallies] for name in ("softmax", "weights")
            },
        },
        "alpha": _alpha(tallies),
        "mean_logit": [tally.mean_logit() for tally in tallies],
        "gate": _gate(tallies),
    }


def write(result: dict[str, Any], maps: dict[int, Tensor], folder: Path) -> None:
    """Writes inspection.json and inspection/maps.safetensors, each atomically."""
    from safetensors.torch import save

    run = RunFolder(folder)
    tensors = {f"layer.{layer}": weights.to(torch.float16).contiguous() for layer, weights in maps.items()}
    with replacing(run.maps_file) as file:
        file.write(save(tensors))  # save_file would create a file that only its owner can read
    write_json(run.inspection_file, result)


def format_inspection(name: str | Path, found: dict[str, Any]) -> str:
    """The mean over heads of every layer, as lines for a terminal."""
    lines = [f"{name}: {found['mechanism']['name']}, {found['sequences']} sequences of {found['length']} tokens"]
    columns = {
        "row sum": found["row_sum"]["mean"],
        "first token": found["first_token"]["mean"],
        "entropy of p": found["entropy"]["softmax"],
        "entropy of |w|": found["entropy"]["weights"],
        "negative": found["entropy"]["negative_mass"],
        "mean logit": found["mean_logit"],
    }
    lines.append("  layer" + "".join(f"{title:>16}" for title in columns))
    for layer in range(found["layers"]):
        cells = (_mean_text(values[layer]) for values in columns.values())
        lines.append(f"  {layer:>5}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join([*lines, *_sinks_text(found), *(f"  {sentence}" for sentence in found["missing"])])


def _sinks_text(found: dict[str, Any]) -> list[str]:
    """Sinks, activations and the spread of alpha, one line each."""
    rate, lines = found["sink_rate"]["rate"], []
    if rate["weights"] is not None and rate["softmax"] is not None:
        lines.append(
            f"  sink rate {rate['weights']:.1%} (of the softmax part {rate['softmax']:.1%}); uniform attention puts "
            f"{_mean_text([*chain(*found['first_token']['uniform'])])} on the first token"
        )
    activations = found["activations"]
    if activations is not None and None not in activations["largest"]:
        layer = max(range(len(activations["largest"])), key=activations["largest"].__getitem__)
        place = f"position {activations['position'][layer]}, channel {activations['channel'][layer]}"
        lines.append(
            f"  largest activation {activations['largest'][layer]:,.4g} after layer {layer}, {place}; the median there "
            f"is {activations['median'][layer]:.3g}"
        )
    if found["value_norm"] is not None:
        first, others = (_mean_text([*chain(*found["value_norm"][key])]) for key in ("first", "others"))
        lines.append(f"  norm of values: first token {first}, others {others}")
    if found["alpha"] is not None:
        within, between = (_mean_text(found["alpha"][f"{key}_heads"]) for key in ("within", "between"))
        lines.append(f"  spread of alpha: {within} within a head, {between} between heads")
    return lines


def _mean_text(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.4f}" if known else "-"


def _min_max(values_LH: list[list[float | None]]) -> list[list[float | None]] | None:
    known = [each for row in values_LH for each in row if each is not None]
    if not known or max(known) - min(known) < EVEN:
        return None
    low, high = min(known), max(known)
    return [[None if each is None else (each - low) / (high - low) for each in row] for row in values_LH]


def _alpha(tallies: Sequence[LayerTally]) -> dict[str, Any] | None:
    if not any(tally.alpha.count.any() for tally in tallies):
        return None
    spread = [t.alpha_spread() for t in tallies]
    return {
        "mean": [t.alpha.means() for t in tallies],
        "std": [t.alpha.deviations() for t in tallies],
        "within_heads": [each[0] for each in spread],
        "between_heads": [each[1] for each in spread],
        "histogram": {"edges": SHARE_EDGES.tolist(), "counts": [t.alpha_histogram.counts.tolist() for t in tallies]},
        "saturated_low": [t.low.means() for t in tallies],
        "saturated_high": [t.high.means() for t in tallies],
    }


def _gate(tallies: Sequence[LayerTally]) -> dict[str, Any] | None:
    if not any(tally.gate_count for tally in tallies):
        return None
    return {
        "mean": [t.gate / t.gate_count if t.gate_count else None for t in tallies],
        "saturated": [t.gate_saturated / t.gate_count if t.gate_count else None for t in tallies],
    }


def _running_alpha(mechanisms: list[Any]) -> list[list[float]] | None:
    if not mechanisms[0].mechanism.has_running_alpha:
        return None
    return [each.scale.running_alpha.tolist() for each in mechanisms]


def _beyond_one(mechanism: Any) -> list[str]:
    """For rules of alpha that are not bounded by 0 and 1."""
    rule = mechanism.alpha_rule
    if rule is None or rule.limits == (0.0, 1.0) or rule.scores == "constant":
        return []
    return [
        f"alpha of {mechanism.name} has other bounds than 0 and 1: histograms count values beyond them in the end "
        "bins, and the saturated shares count them too"
    ]


def _not_finite(tallies: Sequence[LayerTally]) -> list[str]:
    return [
        f"layer {layer}: {tally.not_finite} row sums are not finite, so the layer has no means"
        for layer, tally in enumerate(tallies)
        if tally.not_finite
    ]


def _map_tokens(found: Sequences, tokenizer: Any, maps: dict[int, Tensor], map_length: int) -> list[str]:
    """The text of each token of the maps, not escaped: whatever displays it must escape it."""
    if not maps:
        return []
    length = next(iter(maps.values())).shape[-1]
    if length < map_length:
        found.missing.append(f"the maps have {length} of {map_length} tokens: the first sequence is shorter")
    if tokenizer is None:
        found.missing.append("there is no tokenizer, so the maps show token ids")
    ids = found.inputs[0]["input_ids"][0, :length].tolist()
    return [str(each) if tokenizer is None else tokenizer.decode([each]) for each in ids]


def _map_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
            raise ValueError(f"layers must be numbers from 0 to {count - 1} (or negative, from the end), got {layer!r}")
    return sorted({layer % count for layer in layers})


def _check_ids(found: Sequences, model: Any) -> None:
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    size = getattr(embedding, "num_embeddings", None)
    for each in found.inputs:
        largest, smallest = int(each["input_ids"].max()), int(each["input_ids"].min())
        if smallest < 0 or (size is not None and largest >= size):
            raise ValueError(
                f"token ids must be within the vocabulary of the model, 0 to {'..' if size is None else size - 1}, got "
                f"{smallest} to {largest}; is this the model's tokenizer?"
            )


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
