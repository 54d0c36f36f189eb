"""Admits models that run on the operator to transformers' continuous batching, or refuses them before any work.

`generate_batch`, `continuous_batching_context_manager` and `transformers serve --continuous-batching` all call
`init_continuous_batching`, which creates a manager and switches the model to an attention that reads a paged cache. On
its own, transformers would switch to flash attention where it finds that package, and refuse every name that it does
not know elsewhere. `open_manager` switches to `PAGED` first, a name that transformers leaves alone, and puts the former
name back when the manager stops. So a mechanism can never turn into plain softmax attention there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ..nn.attention import subtract_next
from .families import find_decoders
from .interface import PAGED, SLOT
from .keywords import refuse_unknown
from .paged import BATCH_KEYWORDS, PagedBatch
from .token_mixing import changing_rope, counts_positions, mixes_tokens

PAGES_PER_REQUEST = (
    32  # of a request in a block table, where nothing tells how long requests are: transformers' default
)
Manager = Any  # transformers' ContinuousBatchingManager


def open_manager(
    model: Any,
    make: Callable[..., Manager],
    paged: str,
    modules: list[tuple[str, nn.Module]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Manager:
    """`init_continuous_batching` of a model that runs on the operator.

    Args:
        model: the model.
        make: transformers' own `init_continuous_batching`, bound to the model.
        paged: the name of the attention function for a paged cache.
        modules: the attention modules on the operator, by name.
        generation_config, continuous_batching_config, workload_hints: as in transformers.
    """
    reason = why_not_served(model, modules)
    if reason is not None:
        raise ValueError(
            f"model {type(model).__name__} (model_type={model.config.model_type!r}) cannot run in continuous batching: "
            f"{reason}; `generate` serves one batch at a time"
        )
    asked = _asked(continuous_batching_config, generation_config)
    graphs = _check_settings(asked)
    own = copy.deepcopy(asked)
    if own is not None:
        own.max_blocks_per_request = None  # transformers warns that it needs flash attention, and drops it
    config = model.config
    before = config._attn_implementation
    config._attn_implementation_internal = paged
    try:
        manager = make(
            generation_config=generation_config, continuous_batching_config=own, workload_hints=workload_hints
        )
    except BaseException:
        config._attn_implementation_internal = before
        raise
    if before != paged:  # else another manager of this model has switched already
        manager._original_attn_impl = before
    resolved = manager.continuous_batching_config
    _check_resolved(resolved, lambda: _put_back(manager, config, before))
    resolved.max_blocks_per_request = _pages_per_request(config, asked, resolved, workload_hints)
    if any(resolved.cuda_graph_booleans):
        # A batch with prefill reads the lengths of its requests on the host, which no graph can.
        resolved.use_cuda_graph = (False, graphs is not False)
    return manager


def why_not_served(model: Any, modules: list[tuple[str, Any]]) -> str | None:
    """Why a model cannot run in continuous batching, None where it can."""
    config = model.config
    named: list[Any] = [SimpleNamespace(name=name) for name, _ in modules]
    decoders = find_decoders(model, named)
    if any(decoder.config is not config for decoder in decoders):
        return "its text decoder has a configuration of its own"
    if getattr(model, "_tp_size", None):
        return f"its heads are split by tensor parallelism (tp_size={model._tp_size})"
    for decoder in decoders:
        if counts_positions(decoder):
            return "it computes positions itself, from the tokens or the mask of a call, and requests share a row"
        reason = mixes_tokens(decoder)
        if reason is not None:
            return reason
        rope = changing_rope(decoder)
        if rope is not None:
            return (
                f"{rope[0]} has rope_type={rope[1]!r}: its frequencies depend on the longest request of a batch, so "
                "requests would change each other"
            )
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{config.num_kv_shared_layers} layers use the keys of other layers, and a paged cache keeps its own"
    if getattr(config, "sliding_window", None) == 1:
        return "sliding_window must not be 1, which the paged cache takes for full attention"
    layers = [getattr(module, "layer_idx", None) for _, module in modules]
    expected = _key_width(config)
    if expected is None:
        return "its heads differ from layer to layer, and the paged cache has one size"
    for name, module in modules:
        if "cycle_offset" in type(module).forward.__code__.co_varnames:
            return f"{name} is called several times in a forward, and the paged cache has room for one call"
        width = getattr(getattr(module, "k_proj", None), "out_features", None)
        if width not in (None, expected):
            return f"{name}.k_proj has {width} output features, and the paged cache has room for {expected}"
        if getattr(module, "kv_dim", expected) != expected:  # gpt_bigcode
            return f"{name} has keys of {module.kv_dim} channels, and the paged cache has room for {expected}"
        layer = module._modules.get(SLOT)
        if layer is not None and layer.sequence is not None:
            return "it is sequence-parallel; call remove() of the handle that sequence_parallel returned"
        if layer is not None and layer.observer is not None:
            return f"{name} has an observer, which reads whole sequences; set it to None"
    if layers != list(range(config.num_hidden_layers)):
        return (
            f"{len(modules)} of its {config.num_hidden_layers} layers run on the operator, with the indices {layers}; "
            "the others may keep states that a paged cache does not hold"
        )
    return None


def _key_width(config: Any) -> int | None:
    """The channels of all keys of a token, as the paged cache reads them from a configuration; None if they differ."""
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except RuntimeError:  # what a configuration with different layers raises for its sizes (gemma4)
        return None
    return int(heads * head_dim)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    affine_hidden: Tensor | None = None,
    affine_call: Any = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of an attached model in continuous batching: (output [1, T, H, D], None)."""
    batch = check_batch(module, affine_call, attention_mask, others)
    layer: Any = module._modules[SLOT]
    assert layer.is_plain or affine_hidden is not None, "note_hidden runs before the layers of a mechanism"
    unread = {name: x for name, x in others.items() if name not in BATCH_KEYWORDS}
    refuse_unknown(type(module).__name__, unread | {"dropout": dropout or None}, "use generate")
    index: Any = module.layer_idx
    rows = layer.rows(affine_hidden, batch.divisor(layer.mechanism, index), None)._asdict()
    query, key, scaling = layer.scored(query, key, scaling)  # the paged cache holds the keys of the scores
    out = batch.attend(index, query, key, value, rows, scaling)
    groups = key.shape[1]
    difference = layer.difference(affine_hidden, groups)
    if difference is not None:
        out = subtract_next(out.transpose(1, 2), difference, groups).transpose(1, 2)
    return out, None


def check_batch(module: Any, batch: Any, mask: Tensor | None, others: dict[str, Any]) -> PagedBatch:
    """The batch of a layer; raises where the layer means other keys than the paged cache holds."""
    kind = type(module).__name__
    if not isinstance(batch, PagedBatch):
        raise ValueError(
            f"{kind} was called outside of its decoder while continuous batching runs; stop the manager of continuous "
            "batching first"
        )
    if mask is not None:
        raise ValueError(
            f"{kind} has a mask of its own {list(mask.shape)}, and continuous batching keeps requests apart by their "
            "lengths; use generate for this model"
        )
    window = batch.store(module.layer_idx).window
    for told in (others.get("sliding_window", window), getattr(module, "sliding_window", window)):
        if told != window:
            raise ValueError(
                f"sliding_window of layer {module.layer_idx} ({kind}) must be that of the paged cache, {window}, got "
                f"{told}; use generate for this model"
            )
    return batch


def register() -> None:
    """Makes the attention function known to transformers, without a mask: requests are kept apart by their lengths."""
    AttentionInterface.register(PAGED, paged_attention)


def _asked(continuous_batching_config: Any, generation_config: Any) -> Any:
    """The settings of the caller, which transformers also takes from the generation configuration."""
    if continuous_batching_config is not None:
        return continuous_batching_config
    return getattr(generation_config, "continuous_batching_config", None)


def _check_settings(asked: Any) -> Any:
    """Refuses settings that a model on the operator cannot run with; returns use_cuda_graph for decoding."""
    for name in ("varlen_compile_config", "decode_compile_config"):
        if getattr(asked, name, None) is not None:
            raise ValueError(f"{name} must be None for a model on the operator, got {getattr(asked, name)}")
    level = getattr(asked, "default_compile_level", 0)
    if level:
        raise ValueError(f"default_compile_level must be 0 for a model on the operator, got {level}")
    graphs = getattr(asked, "use_cuda_graph", None)
    if isinstance(graphs, tuple | list):
        if graphs[0]:
            raise ValueError(
                f"use_cuda_graph must be False for batches with prefill of a model on the operator, got {graphs}; use "
                "(False, True) or leave it out"
            )
        return graphs[1]
    return graphs


def _check_resolved(resolved: Any, undo: Callable[[], None]) -> None:
    """Refuses what transformers found elsewhere: a compile_config in the configuration of the model."""
    for name in ("varlen_compile_config", "decode_compile_config"):
        if getattr(resolved, name) is not None:
            undo()
            raise ValueError(
                f"compile_config of the model's configuration must be None in continuous batching on the operator, got "
                f"{getattr(resolved, name)}"
            )


def _put_back(manager: Manager, config: Any, before: str) -> None:
    manager._original_attn_impl = None
    config._attn_implementation_internal = before


def _pages_per_request(config: Any, asked: Any, resolved: Any, hints: Any) -> int:
    """The width of block tables; longer requests decode without one. 0: no block tables."""
    layer_types = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None) if layer_types is None else "sliding_attention" in layer_types
    if sliding:
        return 0  # transformers fills no block tables for a ring buffer
    told = getattr(asked, "max_blocks_per_request", None)
    if told is not None:
        return int(told)
    longest: int = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
    if longest:
        page_size: int = getattr(resolved, "page_size", None) or resolved.block_size
        return math.ceil(longest / page_size) + 1
    return PAGES_PER_REQUEST
