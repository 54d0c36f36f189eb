"""Finds the attention modules of a transformers model, or raises an error that says why the model is not supported."""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..ops.validation import MAX_HEAD_DIM
from .composite import decoder_config, parts, uses
from .keywords import CHANGES_ATTENTION, passes

# (query projection, output projection), by attribute name, in search order.
PROJECTIONS = (
    ("q_proj", "o_proj"),  # llama, qwen2, qwen3, mistral, gemma, olmo2, smollm3, granite, mixtral, qwen3_moe, ..
    ("qkv_proj", "o_proj"),  # phi3
    ("query_key_value", "dense"),  # gpt_neox
    ("c_attn", "c_proj"),  # gpt2
    ("q_proj", "dense"),  # phi
    ("q_proj", "out_proj"),  # opt
)
ALIBI_FAMILIES = ("bloom", "mpt")
CROSS_ATTENTION = ("encoder_attn", "cross_attn")  # BART and its like, mllama: not called in a decoder that stands alone
# Parts of a configuration that describe towers which only feed a text decoder, where the rest describes the decoder.
OTHER_TOWERS = ("vision_config", "audio_config", "vq_config", "codec_config", "protein_encoder_config")
INNER_NORMS = ("attn_sub_norm", "inner_attn_ln")  # between the heads' outputs and the output projection
OFTEN_NONE = ("s_aux", "softcap")  # the configuration or the module says whether there is one


@dataclass(frozen=True)
class Site:
    """One attention module and the sizes that its mechanism needs."""

    name: str
    module: nn.Module
    out_proj: nn.Module
    embed_dim: int
    num_heads: int
    head_dim: int


def find_sites(model: PreTrainedModel) -> list[Site]:
    """Returns the self-attention modules of a model in order; raises with the reason if the model is not supported."""
    text = _text_config(model)
    _refuse_model(model, text)
    multimodal = text is not model.config or any(name in OTHER_TOWERS for name in parts(model.config))
    inside = {id(module) for module in _decoder(model, text).modules()}
    sites = []
    for name, module in model.named_modules():
        if not uses_interface(module):
            continue
        if multimodal and not uses(module, text):
            _check_tower(name, module, model)
        elif id(module) not in inside:
            raise _refusal(
                model, f"{name} is built from the configuration of the text decoder, but is not a part of that decoder"
            )
        elif not name.endswith(CROSS_ATTENTION):
            sites.append(_site(name, module, model, text))
        elif multimodal:
            raise _refusal(model, f"{name} is cross-attention, from text to another input")
    if multimodal:
        _check_causal(sites, model, text)
    if not sites:
        raise _refusal(
            model,
            "no attention module was found that uses transformers' attention interface (ALL_ATTENTION_FUNCTIONS)",
        )
    return sites


def find_decoders(model: PreTrainedModel, sites: list[Site]) -> list[PreTrainedModel]:
    """Returns the innermost models that contain the sites: their forward builds the masks."""
    decoders: list[PreTrainedModel] = []
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or module in decoders:
            continue
        prefix = f"{name}." if name else ""
        inner = [n for n, m in module.named_modules() if isinstance(m, PreTrainedModel) and m is not module]
        held = [s for s in sites if s.name.startswith(prefix)]
        if any(not any(s.name.startswith(f"{prefix}{n}.") for n in inner) for s in held):
            decoders.append(module)
    return decoders


def uses_interface(module: nn.Module) -> bool:
    """True for a module whose forward looks up its attention function by name, so that its code need not be copied."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def drops_keywords(module: nn.Module) -> bool:
    """True for a layer that takes keywords and passes none of them on to its attention (stablelm, nemotron)."""
    code = inspect.unwrap(type(module).forward).__code__
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    return not any(step.argval == name and step.opname.startswith("LOAD") for step in dis.get_instructions(code))


def _text_config(model: PreTrainedModel) -> Any:
    try:
        return decoder_config(model.config)
    except ValueError:
        raise _refusal(
            model, "its configuration has several text decoders", "attach to the part that is to have a mechanism"
        ) from None


def _decoder(model: PreTrainedModel, text: Any) -> PreTrainedModel:
    """The text decoder of a multimodal model: the only attention that gets a mechanism; any other model as a whole."""
    if text is model.config:
        return model
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel) or found.config is not text:
        raise _refusal(model, f"no decoder was found that is built from its {type(text).__name__}")
    return found


def _check_tower(name: str, module: nn.Module, model: PreTrainedModel) -> None:
    """Raises for attention outside of the text decoder that would read the name of our attention function."""
    config = getattr(module, "config", model.config)
    if config is model.config:
        raise _refusal(
            model, f"{name} ({type(module).__name__}) reads its attention from the configuration of the whole model"
        )
    if not any(config is part for part in _all_parts(model.config)):
        raise _refusal(
            model,
            f"{name} is built from a configuration of a part of the model ({type(config).__name__})",
        )


def _check_causal(sites: list[Site], model: PreTrainedModel, text: Any) -> None:
    """Raises for a text tower that sees in both directions; a causal mask that always arrives may say so instead."""
    for site in sites:
        if not getattr(site.module, "is_causal", True) and not getattr(text, "use_bidirectional_attention", False):
            raise _refusal(
                model,
                f"its text tower is not a causal decoder ({site.name}.is_causal is False)",
                "attach to the tower alone",
            )


def _all_parts(config: Any) -> list[Any]:
    return [found for part in parts(config).values() for found in (part, *_all_parts(part))]


def _site(name: str, module: nn.Module, model: PreTrainedModel, config: Any) -> Site:
    if not uses(module, config) and hasattr(module, "config"):
        raise _refusal(
            model,
            f"{name} is built from a configuration of a part of the model ({type(module.config).__name__})",
        )
    if any(hasattr(module, part) for part in ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "kv_lora_rank")):
        raise _refusal(model, f"{name} is multi-head latent attention (MLA): its keys and values are compressed")
    if getattr(module, "sinks", None) is not None:
        raise _refusal(model, f"{name} already has attention sinks")
    if hasattr(module, "lambda_q1"):
        raise _refusal(model, f"{name} is differential attention: the difference of two softmax maps")
    if getattr(module, "is_cross_attention", False):
        raise _refusal(model, f"{name} is cross-attention")
    for keyword in passes(inspect.unwrap(type(module).forward)):
        if keyword not in OFTEN_NONE:
            raise _refusal(model, f"{name} passes {keyword} to its attention: {CHANGES_ATTENTION[keyword]}")
    if hasattr(module, "prepare_dynamic_mask"):
        raise _refusal(model, f"{name} computes a mask from its values")
    if not getattr(module, "is_causal", True) and getattr(config, "is_decoder", False):
        raise _refusal(model, f"{name} is not marked as causal (is_causal=False) in a decoder")
    for first, last in PROJECTIONS:
        query_proj, out_proj = getattr(module, first, None), getattr(module, last, None)
        if isinstance(query_proj, nn.Module) and isinstance(out_proj, nn.Module):
            break
    else:
        known = ", ".join(f"{first} and {last}" for first, last in PROJECTIONS)
        raise _refusal(model, f"{name} ({type(module).__name__}) has none of the known projections: {known}")
    for label, proj in ((first, query_proj), (last, out_proj)):
        if not isinstance(proj, nn.Linear | Conv1D) and type(proj).__module__.startswith("transformers.models."):
            raise _refusal(
                model,
                f"{name}.{label} is a {type(proj).__name__}, which is more than one linear map of the hidden state: "
                "its size and input say nothing about the gates of a head",
            )
        # A Linear that transformers has quantised (bitsandbytes) holds bytes, and still maps in_ to out_features.
        has_sizes = isinstance(proj, nn.Linear) and is_quantised(model)
        if not isinstance(proj, nn.Linear | Conv1D) or not (proj.weight.dtype.is_floating_point or has_sizes):
            raise _refusal(
                model,
                f"{name}.{label} is a {type(proj).__name__}: mechanisms need unquantised projections without adapters",
                "attach to the plain model first, then add adapters",
            )
    num_heads: Any = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    if num_heads is None:
        raise _refusal(model, f"its configuration {type(config).__name__} has no num_attention_heads")
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    head_dim = int(head_dim or config.hidden_size // num_heads)
    if head_dim > MAX_HEAD_DIM:
        limit = f"and the operator serves at most {MAX_HEAD_DIM}"
        raise _refusal(model, f"{name} has heads of {head_dim} channels, {limit}")
    embed_dim, query_width, inner = _in(query_proj), _out(query_proj), _in(out_proj)
    expected = f"not heads x head dim = {num_heads} x {head_dim}"
    if inner != num_heads * head_dim:
        raise _refusal(model, f"{name}.{last} has {inner} input features, {expected}")
    if first == "q_proj" and query_width != inner:
        raise _refusal(model, f"{name}.q_proj has {query_width} output features, {expected}; does it contain a gate?")
    return Site(name, module, out_proj, embed_dim, num_heads, head_dim)


def is_quantised(model: PreTrainedModel) -> bool:
    """True if transformers has quantised the weights of a model, or does so while it loads them."""
    configured = getattr(model.config, "quantization_config", None) is not None
    return configured or getattr(model, "hf_quantizer", None) is not None


def _refuse_model(model: PreTrainedModel, config: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise _refusal(model, "it is an encoder-decoder, or a part of one")
    if is_quantised(model) and any(parameter.is_meta for parameter in model.parameters()):
        raise _refusal(
            model,
            "its weights are quantised while they are loaded, and those of the mechanism with them",
            "load the plain model with the quantization_config and attach the mechanism to it",
        )
    if config.model_type in ALIBI_FAMILIES or getattr(config, "alibi", False):
        raise _refusal(model, "it adds ALiBi biases to the scores, which no mechanism supports")
    for name in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, name, None):
            raise _refusal(model, f"it soft-caps the scores ({name}={getattr(config, name)})")
    if not getattr(config, "is_causal", True):
        raise _refusal(model, "it is not causal (config.is_causal=False)")


def _refusal(model: PreTrainedModel, reason: str, way_out: str | None = None) -> ValueError:
    text = f"model {type(model).__name__} (model_type={model.config.model_type!r}) is not supported: {reason}"
    return ValueError(text + (f"; {way_out}" if way_out else ""))


def _in(proj: Any) -> int:
    return proj.in_features if isinstance(proj, nn.Linear) else proj.weight.shape[0]


def _out(proj: Any) -> int:
    return proj.out_features if isinstance(proj, nn.Linear) else proj.weight.shape[1]
