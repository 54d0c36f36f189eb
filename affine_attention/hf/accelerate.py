"""Runs models of transformers that have sinks or gates of their own through the operator, with their own parameters.

GPT-OSS and its like add a learned sink to the softmax, Qwen3-Next and its like multiply the output of attention by a
gate. Such a model needs no mechanism of ours: its attention is a call of the operator. So `accelerate` changes no
weight and no class. It puts the name of an attention function into the configuration of the decoder and a hook before
it, and `decelerate` takes both away.

The sink is part of the operator's softmax. The gate is multiplied by the model's own code, after the operator.
"""

from __future__ import annotations

import copy
import inspect
import types
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ..ops import attention, attention_weights
from ..ops.validation import MAX_HEAD_DIM
from .classes import AffineModelMixin
from .continuous_batching import check_batch, open_manager
from .families import find_decoders, uses_interface
from .keywords import refuse_unknown
from .masks import Visible, compact_mask, packed_segments, read_mask, values_are_unknown
from .paged import BATCH_KEYWORDS, PagedBatch
from .parallel import check_no_hidden_sharding

OPERATOR = "affine_operator"  # the name in config._attn_implementation
PAGED_OPERATOR = f"{OPERATOR}_paged|flash"  # while continuous batching runs; see PAGED in interface.py
# Attention classes whose own eager code was compared with the operator, and how each multiplies its output by a gate.
# A class is listed, not guessed: eager code may read anything from its module that no argument shows.
SERVED = {
    "GptOssAttention": None,
    "GraniteSWAAttention": None,
    "GraniteMoeSWAAttention": None,
    "MiMoV2FlashAttention": None,
    "Qwen3NextAttention": "elementwise",
    "Qwen3_5Attention": "elementwise",
    "Qwen3_5MoeAttention": "elementwise",
    "HrmTextAttention": "elementwise",
    "AfmoeAttention": "elementwise",
    "Step3p7Attention": "per head",
    "LagunaAttention": "per head",  # or elementwise, by its configuration
}
SERVED_FAMILIES = (
    "gpt_oss, granite_swa, granitemoe_swa, mimo_v2_flash (sinks), qwen3_next, qwen3_5, qwen3_5_moe, hrm_text, afmoe, "
    "step3p7, laguna (gates)"
)
ModelT = TypeVar("ModelT", bound=PreTrainedModel)


@dataclass(frozen=True)
class Layer:
    """What `accelerate` found in one attention module."""

    name: str
    kind: str  # the class of the module
    heads: int
    key_value_heads: int
    head_dim: int
    value_dim: int
    sink: bool
    gate: str | None  # "elementwise" or "per head"; multiplied by the model itself
    window: int | None

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f" on {self.key_value_heads}" if self.key_value_heads != self.heads else "")
        dims = f"head dim {self.head_dim}" + (f", values {self.value_dim}" if self.value_dim != self.head_dim else "")
        parts = [heads, dims, "sink" if self.sink else "no sink", f"{self.gate} gate" if self.gate else "no gate"]
        parts.append("all keys" if self.window is None else f"window {self.window}")
        return f"{self.name} ({self.kind}): {', '.join(parts)}"


@dataclass(frozen=True)
class Explanation:
    """What `explain` found in a model. `str(explanation)` has one line per layer."""

    model: str
    accelerated: bool
    layers: tuple[Layer, ...]

    def __str__(self) -> str:
        state = "runs on the operator" if self.accelerated else "can run on the operator: hf.accelerate(model)"
        return "\n".join([f"{self.model} {state}", *(f"  {layer}" for layer in self.layers)])


def accelerate(model: ModelT) -> ModelT:
    """Runs the attention of a model with sinks or gates of its own on the operator, in place, and returns the model.

    >>> model = AutoModelForCausalLM.from_pretrained("openai/gpt-oss-20b")
    >>> accelerate(model)

    Weights, classes and checkpoints stay as they are: `save_pretrained` writes what it would write otherwise. Logits
    and gradients are those of the model's own eager attention within rounding, in training and generation, with every
    cache, padding and packed documents. Sinks get their gradients.

    Args:
        model: a model of one of the families in `SERVED_FAMILIES`. In a multimodal model its text decoder is served;
            the other towers keep their attention.
    """
    sites = _find(model)
    if is_accelerated(model):
        raise ValueError(
            f"model is accelerated already ({type(model).__name__}); call affine_attention.hf.decelerate(model) first"
        )
    configs = _own_configs(model, {id(module.config) for _, module in sites})
    before = {}
    for path, config in configs.items():
        before[path] = config._attn_implementation
        config._attn_implementation_internal = OPERATOR  # the property would set it in the configs of other towers too
    named: list[Any] = [_Named(name) for name, _ in sites]
    for decoder in find_decoders(model, named):
        decoder.register_forward_pre_hook(note_packing, with_kwargs=True)
    model._implementations_before = before  # type: ignore[assignment]
    # On its own, transformers would switch to flash attention where it finds that package, and refuse elsewhere.
    model.init_continuous_batching = types.MethodType(_init_continuous_batching, model)  # type: ignore[assignment]
    return model


def decelerate(model: ModelT) -> ModelT:
    """Gives a model back the attention implementation that it had before `accelerate`, in place."""
    if not is_accelerated(model):
        raise ValueError(f"model must be accelerated, got a plain {type(model).__name__}; hf.accelerate(model) does it")
    before: Any = model.__dict__.pop("_implementations_before")
    model.__dict__.pop("init_continuous_batching", None)
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is note_packing:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    for path, implementation in before.items():
        config = _owners(model)[path]
        if config._attn_implementation == OPERATOR:  # else the user has chosen another since
            config._attn_implementation_internal = implementation
    return model


def is_accelerated(model: nn.Module) -> bool:
    """Whether `accelerate` was called for this model."""
    return "_implementations_before" in model.__dict__


def explain(model: PreTrainedModel) -> Explanation:
    """What `accelerate` finds in a model, layer by layer. Nothing is changed; a refusal is raised as there."""
    layers = tuple(_layer(name, module) for name, module in _find(model))
    return Explanation(type(model).__name__, is_accelerated(model), layers)


def operator_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function registered with transformers: (output [B, T, H, D], weights [B, H, T, S] or None)."""
    _check_call(module, dropout, is_causal, s_aux, others)
    if isinstance(s_aux, DTensor):
        s_aux = s_aux.to_local()  # tensor parallelism: the sinks of this rank's heads
    arguments, num_keys = _read(others, attention_mask, query, key)
    unused = key.shape[2] - num_keys  # slots of a preallocated cache
    if unused > 0:
        key, value = key[:, :, :num_keys], value[:, :, :num_keys]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    weights = None
    if others.get("output_attentions"):
        weights = attention_weights(query, key, sink=s_aux, softmax_scale=scale, **arguments).to(query.dtype)
        weights = pad(weights, (0, unused)) if unused > 0 else weights  # eager attention returns their zeros
    value_dim = value.shape[3]
    if value_dim != query.shape[3]:
        query, key, value = _same_width(query, key, value)
    out = attention(query, key, value, sink=s_aux, softmax_scale=scale, **arguments)
    if out.shape[3] != value_dim:
        out = out[..., :value_dim]
    # Models may reshape with view, as transformers' own functions allow.
    return out.transpose(1, 2).contiguous(), weights


def paged_operator_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    affine_batch: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function in continuous batching (paged.py): (output [1, T, H, D], None)."""
    batch = check_batch(module, affine_batch, attention_mask, others)
    unread = {name: x for name, x in others.items() if name not in BATCH_KEYWORDS}
    _check_call(module, dropout, is_causal, s_aux, unread)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    value_dim = value.shape[3]
    if value_dim < query.shape[3]:
        query, key, value = _same_width(query, key, value)
    index: Any = module.layer_idx
    out = batch.attend(index, query, key, value, {"sink": s_aux}, scale)
    return out[..., :value_dim].contiguous(), None


def note_packing(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a decoder: tells its layers whether position_ids or cu_seq_lens pack documents.

    Only the caller's position_ids can pack documents. A decoder that is traced cannot tell them from those that it
    makes itself, so the question is asked here, and plain causal training needs no segments, compiled or not.
    """
    config: Any = module.config
    if config._attn_implementation == PAGED_OPERATOR:
        kwargs |= {"affine_batch": PagedBatch(config, kwargs), "affine_segments": None}
    if config._attn_implementation != OPERATOR:
        return args, kwargs
    check_no_hidden_sharding()
    given = kwargs
    if args:
        code = inspect.unwrap(type(module).forward).__code__
        given = kwargs | dict(zip(code.co_varnames[1 : code.co_argcount], args, strict=False))
    segments = None
    if given.get("attention_mask") is None and given.get("past_key_values") is None:
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        segments = _segments(given.get("position_ids"), given.get("cu_seq_lens_q"), inputs)
    kwargs["affine_segments"] = segments
    # A graph that reads a dictionary of the forward would be compiled again for each new one.
    kwargs["affine_readings"] = None if torch.compiler.is_compiling() else {}
    return args, kwargs


def register() -> None:
    """Makes the function known to transformers; both registers are needed, or padding would be ignored."""
    AttentionInterface.register(OPERATOR, operator_attention)
    AttentionInterface.register(PAGED_OPERATOR, paged_operator_attention)  # without masks: requests differ by length
    AttentionMaskInterface.register(OPERATOR, compact_mask)


def _init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`init_continuous_batching` of an accelerated model: an attribute of the model, its class stays as it is."""
    make = types.MethodType(type(model).init_continuous_batching, model)
    return open_manager(model, make, PAGED_OPERATOR, _find(model), *args, **kwargs)


@dataclass(frozen=True)
class _Named:
    name: str


def _find(model: Any) -> list[tuple[str, Any]]:
    """The attention modules that the operator can serve, by name; raises with the reason where there are none."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel of transformers, got {type(model).__name__}; accelerate it before it is "
            "wrapped by PEFT, DDP or torch.compile, or pass the model inside"
        )
    name = f"model {type(model).__name__} (model_type={model.config.model_type!r})"
    if isinstance(model, AffineModelMixin):
        raise ValueError(f"{name} has a mechanism, which runs on the operator already; hf.detach(model) takes it away")
    modules = [(path, module) for path, module in model.named_modules() if uses_interface(module)]
    sites = [(path, module) for path, module in modules if type(module).__name__ in SERVED]
    if not sites:
        found = ", ".join(sorted({type(module).__name__ for _, module in modules})) or "none with the interface"
        raise ValueError(
            f"{name} has no attention with sinks or gates that the operator serves: its attention is {found}; served "
            f'are {SERVED_FAMILIES}; use attn_implementation="sdpa", or hf.attach(model, mechanism) for a mechanism'
        )
    configs = {id(module.config) for _, module in sites}
    for path, module in modules:
        if id(getattr(module, "config", None)) in configs and type(module).__name__ not in SERVED:
            raise ValueError(f"{name} cannot be accelerated: {path} ({type(module).__name__}) is not served")
    for path, module in sites:
        if not getattr(module, "is_causal", True) or not getattr(module.config, "is_causal", True):
            raise ValueError(f"{name} cannot be accelerated: {path} is not causal (is_causal=False)")
        if max(_dims(module)) > MAX_HEAD_DIM:
            raise ValueError(
                f"{name} cannot be accelerated: {path} has head dims {_dims(module)}, at most {MAX_HEAD_DIM} are served"
            )
    return sites


def _layer(name: str, module: Any) -> Layer:
    kind = type(module).__name__
    head_dim, value_dim = _dims(module)
    gate = SERVED[kind]
    if gate == "per head" and not getattr(module, "gate_per_head", True):
        gate = "elementwise"
    key_value_heads = _width(module.k_proj) // head_dim
    heads = key_value_heads * module.num_key_value_groups
    sink = getattr(module, "sinks", None) is not None
    window = getattr(module, "sliding_window", None)
    return Layer(name, kind, heads, key_value_heads, head_dim, value_dim, sink, gate, window)


def _dims(module: Any) -> tuple[int, int]:
    """Head dims of queries and keys, and of values."""
    return int(module.head_dim), int(getattr(module, "v_head_dim", None) or module.head_dim)


def _width(proj: Any) -> int:
    return int(proj.out_features)


def _own_configs(model: PreTrainedModel, wanted: set[int]) -> dict[str, Any]:
    """Gives a model configurations of its own and returns the wanted ones by the path of a module that holds each.

    Another model may have been built from the same object.
    """
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if config is None:
            continue
        if id(config) not in memo:
            copy.deepcopy(config, memo)
        own = memo[id(config)]
        if id(config) in wanted and not any(own is other for other in found.values()):
            found[path] = own
        module.config = own
    return found


def _owners(model: nn.Module) -> dict[str, Any]:
    return {path: module.config for path, module in model.named_modules() if hasattr(module, "config")}


def _check_call(module: nn.Module, dropout: float, is_causal: Any, s_aux: Any, others: dict[str, Any]) -> None:
    """Refuses what the operator would not compute as the model means it."""
    kind = type(module).__name__
    if kind not in SERVED:
        raise ValueError(
            f'attn_implementation="{OPERATOR}" serves {SERVED_FAMILIES}, got {kind}; use attn_implementation="sdpa"'
        )
    if "affine_segments" not in others:
        # Without the hook a compiled model could not tell packed documents from plain rows.
        raise ValueError(
            f'attn_implementation="{OPERATOR}" needs more than its name, got {kind} in a model that is not '
            "accelerated, or outside of its decoder; call hf.accelerate(model), and compile its layers or the model"
        )
    if dropout:
        raise ValueError(
            f"dropout on attention weights is not served by the operator, got {dropout} in {kind}; set "
            "attention_dropout of the configuration to 0 before the model is built, or call hf.decelerate(model)"
        )
    if is_causal is False:
        raise ValueError(f"is_causal must be left out or True, got False; {kind} is served as a causal decoder")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise ValueError(
            f"s_aux must be the sinks of {kind}, got None: its attention would run without them; call it as its own "
            "forward does, or call hf.decelerate(model)"
        )
    refuse_unknown(kind, others, "call hf.decelerate(model) to run the model's own attention")


def _read(others: dict[str, Any], mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[dict[str, Any], int]:
    """The mask of a layer as arguments of the operator, read once for all layers that share it, and the real keys."""
    segments, readings = others.get("affine_segments"), others.get("affine_readings")
    if readings is None:
        visible = read_mask(mask, query, key, True, segments)
        return visible.arguments, visible.num_keys
    name = (id(mask), query.shape[0], query.shape[2], key.shape[2], query.get_device())
    found: tuple[Visible, Tensor | None] | None = readings.get(name)
    if found is None:
        # Keeps the mask alive, because Python would otherwise reuse its id.
        found = readings[name] = read_mask(mask, query, key, True, segments), mask
    return found[0].arguments, found[0].num_keys


def _segments(position_ids: Tensor | None, cu_seq_lens: Tensor | None, inputs: Tensor | None) -> Tensor | None:
    """Document numbers [B, T] of packed rows, None where the caller packs nothing."""
    if inputs is None:
        return None
    batch, length = inputs.shape[:2]
    if cu_seq_lens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q must come with one packed row, got a batch of {batch}; flatten the batch")
        places = torch.arange(length, device=inputs.device, dtype=cu_seq_lens.dtype)
        return torch.bucketize(places, cu_seq_lens[1:].contiguous().to(inputs.device), right=True)[None]
    if position_ids is not None and position_ids.dim() == 3:
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None  # text, time, height, width
    if position_ids is None or position_ids.dim() != 2:
        return None
    segments = packed_segments(position_ids, batch)
    return segments if values_are_unknown() or bool(segments[:, -1].any()) else None


def _same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero channels where queries and keys, or values, have fewer than the other: they change no score and no output.

    MiMo-V2-Flash has 192 channels in its keys and 128 in its values.
    """
    width = max(query.shape[3], value.shape[3])
    return tuple(nn.functional.pad(x, (0, width - x.shape[3])) for x in (query, key, value))  # type: ignore[return-value]
