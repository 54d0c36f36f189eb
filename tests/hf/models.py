"""Tiny models of every family, and an oracle: the same model with a naive dense attention."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from affine_attention import AttentionMechanism, Mechanism
from affine_attention.hf import attach
from affine_attention.hf.interface import IMPLEMENTATION
from affine_attention.nn import PRESETS
from tests.nn.models import ALPHA_FORMULAS

VOCABULARY = 64
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 8,
         "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
GPT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "qwen2": NO_HEAD_DIM,
    "qwen3": SHAPE,
    "mistral": SHAPE | {"sliding_window": None},
    "gemma": SHAPE,
    "olmo2": NO_HEAD_DIM,
    "smollm3": NO_HEAD_DIM,
    "granite": NO_HEAD_DIM | {"attention_multiplier": 0.3},
    "mixtral": SHAPE | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": SHAPE | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16},
    "phi3": NO_HEAD_DIM,
    "gpt_neox": {name: value for name, value in NO_HEAD_DIM.items() if name != "num_key_value_heads"},
    "gpt2": GPT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                   "embd_pdrop": 0.0},
}  # fmt: skip
# Every family with the mechanisms of the paper and its controls; the others differ in their coefficients alone.
EVERY_CASE = [(family, name) for index, name in enumerate(PRESETS) for family in (FAMILIES if index < 8 else ["llama"])]
WINDOW = 5
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},  # one full, one sliding
    "phi3": {"sliding_window": WINDOW},
}


def plain_model(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any):
    """A tiny random model of a family, with weights large enough for mechanisms and masks to matter."""
    if family not in FAMILIES:
        from .tiny import tiny_model  # imports this module

        return tiny_model(family, dtype, seed)
    config = transformers.AutoConfig.for_model(family, **(FAMILIES[family] | changes))
    torch.manual_seed(seed)
    # The grouped matmul of the experts does not support fp64.
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in FAMILIES[family] else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **experts).to(dtype)
    spread(model, 0.3)
    return model.eval()


def make_model(
    family: str = "llama",
    mechanism: Mechanism | str = "affine",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    start: str = "fresh",
    **changes: Any,
):
    """`plain_model` with a mechanism whose parameters are far from their initial values."""
    model = attach(plain_model(family, dtype, seed, **changes), mechanism, start)
    if start == "fresh":
        torch.manual_seed(seed + 1)
        for layer in mechanisms(model):
            spread(layer, 1.0)
            if layer.scale is not None and layer.mechanism.has_running_alpha:
                layer.scale.running_alpha.uniform_(0.1, 0.9)
    return model


def spread(module: torch.nn.Module, std: float) -> None:
    for name, parameter in module.named_parameters():
        if "norm" not in name and "ln_" not in name:
            torch.nn.init.normal_(parameter, std=std)


def mechanisms(model: torch.nn.Module) -> list[AttentionMechanism]:
    return [module for module in model.modules() if isinstance(module, AttentionMechanism)]


def running_alphas(model: torch.nn.Module) -> Tensor:
    return torch.cat([b.detach().clone() for name, b in model.named_buffers() if name.endswith("running_alpha")])


def make_tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def oracle() -> Iterator[None]:
    """Within the context, attached models run `naive_attention` with transformers' dense masks."""
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    kept = functions[IMPLEMENTATION], masks[IMPLEMENTATION]
    functions[IMPLEMENTATION], masks[IMPLEMENTATION] = naive_attention, dense_mask
    try:
        yield
    finally:
        functions[IMPLEMENTATION], masks[IMPLEMENTATION] = kept


def dense_mask(*args: Any, **kwargs: Any) -> Tensor:
    return sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))


def other_weights(name, query, key, seen, scaling):
    """The weight functions of arXiv 2411.07176, 2409.04431, 2501.13428 and 2005.09561, row by row over visible keys."""
    dim, rows = query.shape[-1], torch.zeros_like(seen, dtype=query.dtype)
    if name == "softplus":
        query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
        scaling = math.log(dim)
    scores = query @ key.mT * scaling
    for place in seen.any(-1).nonzero():
        at = tuple(place.tolist())
        s = scores[at][seen[at]]
        n = len(s)
        if name == "signed":
            w = s.sign() * torch.softmax(s.abs(), 0)
        elif name == "sigmoid":
            w = torch.sigmoid(s - math.log(n))
        elif name == "normalized":
            centred = s - s.mean()
            w = centred / (centred.square().mean().clamp(min=1e-300).sqrt() + 0.001) if n > 1 else 0 * s
        else:
            a = torch.log1p(torch.exp(s * math.log(n)))
            r = torch.relu(n * a / a.sum() - (1 if n > 3 else 0)) ** 15
            w = r / r.sum() if r.any() else r
        rows = rows.index_put((*(torch.tensor(i) for i in at), seen[at].nonzero().flatten()), w)
    return rows


def naive_attention(module, query, key, value, attention_mask, scaling=None, affine_hidden=None, **_):
    """The equation of ops/README.md, with explicit weights."""
    layer, settings = module.affine, module.affine.mechanism
    heads, repeats = query.shape[1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attention_mask is None:  # an encoder without padding: transformers makes no mask
        attention_mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
    seen = attention_mask.expand(query.shape[0], heads, -1, -1)
    scores = (query @ key.mT * scaling).masked_fill(~seen, -torch.inf)
    sink = torch.full((heads,), -torch.inf, dtype=query.dtype) if layer.sink is None else layer.sink
    sink = sink[:, None, None]
    if settings.sink == "token":
        sink = (affine_hidden @ layer.sink_proj.weight.T).transpose(1, 2)[..., None] + settings.sink_start
    top = scores.amax(-1, keepdim=True).maximum(sink).clamp(min=-1e30)
    powers = torch.exp(scores - top)
    weights = powers / (powers.sum(-1, keepdim=True) + torch.exp(sink - top)).clamp(min=1e-300)
    if settings.weights != "softmax":
        weights = other_weights(settings.weights, query, key, seen, scaling)
    if layer.scale is not None:
        scale = layer.scale
        x = torch.zeros(*affine_hidden.shape[:2], heads, dtype=query.dtype) if scale.head_alpha is None else (
            scale.head_alpha.expand(*affine_hidden.shape[:2], -1))  # fmt: skip
        if scale.proj is not None:
            x = affine_hidden @ scale.proj.weight.T
        alpha = ALPHA_FORMULAS[settings.activation](x, settings.initial_alpha).transpose(1, 2)[..., None]
        weights = alpha * weights
        if settings.bias:
            visible = seen.sum(-1, keepdim=True)
            length = settings.bias_length
            divisor = visible.clamp(min=length if isinstance(length, int) else 1)
            if settings.bias == "centred":
                beta = -scale.head_beta[:, None, None] * alpha / divisor
            elif settings.bias == "per_head":
                beta = scale.head_beta[:, None, None].expand_as(alpha)
            elif settings.bias == "free":
                beta = (affine_hidden @ scale.beta_proj.weight.T).transpose(1, 2)[..., None] / divisor
            else:
                beta = (scale.running_alpha[:, None, None] - alpha) / divisor
            weights = weights + beta.masked_fill(~seen, 0)
    if settings.differential:
        first, second = weights[:, 0::2], weights[:, 1::2]
        share = torch.sigmoid(affine_hidden @ layer.difference_proj.weight.T).transpose(1, 2)[..., None]
        pairs = (first - share[:, 0::2] * second, second - share[:, 1::2] * first)
        weights = torch.stack(pairs, 2).flatten(1, 2)
    out = weights @ value
    if settings.exclusion:  # NeoMMEExclusiveSelfAttention of transformers; arXiv 2603.09078 for a share of 1
        own = torch.nn.functional.normalize(value[:, :, value.shape[2] - out.shape[2] :], dim=-1)
        own = own.masked_fill(~seen.diagonal(value.shape[2] - out.shape[2], -2, -1)[..., None], 0)
        share = 1.0 if settings.exclusion == "full" else torch.tanh(layer.head_exclusion)[:, None, None]
        out = out - share * (out * own).sum(-1, keepdim=True) * own
    if settings.head_norm:
        weight = layer.norm_weight.view(heads, 1, -1)
        out = torch.nn.functional.rms_norm(out, out.shape[-1:], eps=1e-6) * weight
    if layer.gate_proj is not None:
        gate = torch.sigmoid(affine_hidden @ layer.gate_proj.weight.T)
        out = out * gate.unflatten(-1, (heads, -1)).transpose(1, 2)
    return out.transpose(1, 2).contiguous(), weights
