"""Model and configuration classes of attached models, made on demand: `AffineLlamaForCausalLM`, `AffineLlamaConfig`, ..

`Affine` + the name of a class of transformers is that class with a mechanism: it builds its layers from its
configuration, saves them, loads them, and refuses to run as plain softmax. A name is made when it is first asked for
(`from affine_attention.hf.classes import AffineLlamaForCausalLM`), which is also how a checkpoint folder and pickle
find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..nn import AttentionMechanism, Mechanism
from .interface import IMPLEMENTATION, SLOT
from .masks import SEQUENCE_RANKS
from .parallel import head_plan, keep_own_heads, whole_state_dict

MODEL_TYPE = "affine_attention"  # in config.json: nothing but this package takes it for its own
MODULE_NAME = "modeling_affine_attention"  # the one-line module in a checkpoint folder
PREFIX = "Affine"
AUTO_CLASSES = {
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModel": "Model",
}


class AffineConfigMixin:
    """A configuration that carries a mechanism, `affine_attention = {"mechanism": {...}, "start": ...}`.

    At work its model_type is the family's, so that whatever asks for it (weight conversion, generation) finds what it
    knows. In config.json it is "affine_attention", so that nothing loads the folder as a plain model.
    """

    affine_attention: dict[str, Any]
    plain_class: type  # what `detach` goes back to

    def to_dict(self) -> dict[str, Any]:
        settings = super().to_dict()  # type: ignore[misc]
        settings.pop(SEQUENCE_RANKS, None)  # of this run, not of the model
        if "affine_attention" not in settings:
            return settings  # the default instance that transformers compares with
        architecture = (settings.get("architectures") or [""])[0]
        auto_map = {"AutoConfig": f"{MODULE_NAME}.{type(self).__name__}"}
        for auto_class, ending in AUTO_CLASSES.items():
            if architecture.startswith(PREFIX) and architecture.endswith(ending):
                auto_map[auto_class] = f"{MODULE_NAME}.{architecture}"
        return settings | {
            "model_type": MODEL_TYPE,
            "base_model_type": type(self).model_type,  # type: ignore[attr-defined]
            "auto_map": auto_map,
            # A plain class that is made to read this folder stops at the name of an attention it does not have.
            "attn_implementation": IMPLEMENTATION,
        }

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        own = dict(config_dict)
        own.pop("base_model_type", None)
        own["model_type"] = cls.model_type  # type: ignore[attr-defined]
        check_settings(own.get("affine_attention"))
        return super().from_dict(own, **kwargs)  # type: ignore[misc]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any):
        config_dict, rest = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        if config_dict.get("model_type") == MODEL_TYPE:
            config_dict = config_dict | {"model_type": cls.model_type}  # type: ignore[attr-defined]
        return config_dict, rest

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes config.json, and beside it the line of code that finds our classes (before the folder is uploaded)."""
        names = sorted({type(self).__name__, *(n for n in self.architectures or () if n.startswith(PREFIX))})  # type: ignore[attr-defined]
        text = (
            f"from affine_attention.hf.classes import {', '.join(names)}  # noqa: F401  pip install affine-attention\n"
        )
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{MODULE_NAME}.py").write_text(text)
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def validate_output_attentions(self) -> None:
        """Transformers allows it to its own eager function only; here the weights are computed for it."""

    @property
    def output_attentions(self) -> bool:
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy this file, without its package, into every checkpoint folder."""


class AffineModelMixin:
    """A model with a mechanism in every attention module, built from `config.affine_attention`."""

    config: Any
    plain_class: type

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any):
        from .attach import install

        settings = check_settings(getattr(config, "affine_attention", None))
        if config._attn_implementation is None:
            config._attn_implementation = IMPLEMENTATION
        config.base_model_tp_plan = head_plan(config.base_model_tp_plan, SLOT)
        super().__init__(config, *inputs, **kwargs)  # type: ignore[call-arg]
        install(self, Mechanism.from_dict(settings["mechanism"]), settings["start"])  # type: ignore[arg-type]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation in (None, IMPLEMENTATION):
            return IMPLEMENTATION
        raise ValueError(
            f'attn_implementation must be left out or "{IMPLEMENTATION}" for a model with a mechanism, got '
            f'"{attn_implementation}", which would run plain softmax attention; call '
            "affine_attention.hf.detach(model) first"
        )

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        self._check_and_adjust_attn_implementation(attn_implementation)  # type: ignore[arg-type]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Transformers reads the source file of a class to know it: that of the plain class."""
        return cls.plain_class._can_set_experts_implementation()  # type: ignore[attr-defined]

    def _initialize_missing_keys(self, *args: Any, **kwargs: Any) -> None:
        """What transformers calls after loading: gives a value to whatever the checkpoint did not hold."""
        super()._initialize_missing_keys(*args, **kwargs)  # type: ignore[misc]
        start = self.config.affine_attention["start"]
        for module in self.modules():  # type: ignore[attr-defined]
            layer = getattr(module, SLOT, None)
            if isinstance(layer, AttentionMechanism):
                initialise_missing(module, layer, start)
                keep_own_heads(layer)

    def generate(self, *args: Any, **kwargs: Any):
        Mechanism.from_dict(self.config.affine_attention["mechanism"]).check_can_generate()
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and (state := whole_state_dict(self)) is not None:  # type: ignore[arg-type]
            kwargs["state_dict"] = state
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: see `AffineConfigMixin.register_for_auto_class`."""


def check_settings(settings: Any) -> dict[str, Any]:
    """`config.affine_attention` as it must be."""
    if not isinstance(settings, dict) or set(settings) != {"mechanism", "start"}:
        raise ValueError(
            'config.affine_attention must be {"mechanism": {..}, "start": "fresh" or "identity"}, got '
            f"{settings!r}; was this folder written by save_pretrained of an attached model?"
        )
    Mechanism.from_dict(settings["mechanism"])
    return settings


@torch.no_grad()
def initialise_missing(module: nn.Module, layer: AttentionMechanism, start: str) -> None:
    """Fills what loading has left empty in one layer; what was loaded carries transformers' own mark and stays."""
    from .attach import IDENTITY_ALPHA, scale_out_proj

    scale = layer.scale
    parameters = list(layer.parameters())
    loaded = [getattr(p, "_is_hf_initialized", False) for p in parameters]
    if scale is not None and scale.mechanism.bias:
        has_average = getattr(scale.running_alpha, "_is_hf_initialized", False)
        if not has_average and getattr(scale.proj.weight, "_is_hf_initialized", False):
            raise ValueError(
                f"the checkpoint has the weights of {type(module).__name__}.{SLOT} but not its scale.running_alpha: it "
                "has lost its running average; add the tensor, or set it to a start value on purpose"
            )
        begin = IDENTITY_ALPHA if start == "identity" else scale.mechanism.running_alpha_start
        initialization.constant_(scale.running_alpha, begin)
        # Never in a checkpoint, and loading leaves it without the gradient that it exists for.
        scale.collected = torch.zeros_like(scale.collected, device=scale.running_alpha.device, requires_grad=True)
    for proj in (None if scale is None else scale.proj, layer.gate_proj):
        if proj is not None:
            std = 0.0 if start == "identity" else layer.mechanism.init_std
            initialization.normal_(proj.weight, mean=0.0, std=std)
    if layer.sink is not None:
        learned = layer.mechanism.sink == "learned"
        initialization.constant_(layer.sink, layer.mechanism.sink_start if learned else 0.0)
    if start == "identity" and parameters and not any(loaded):
        scale_out_proj(module, layer.mechanism)  # the checkpoint was that of a plain model


class AffineConfig(PreTrainedConfig):
    """What AutoConfig finds under "affine_attention": reads a config.json into the class of its family."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        base: Any = config_dict.get("base_model_type")
        if base not in CONFIG_MAPPING:
            raise ValueError(
                f"base_model_type must be a model type of transformers {transformers.__version__}, got {base!r}"
            )
        return affine_config_class(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs)


def affine_config_class(base: type[PreTrainedConfig]) -> Any:
    """The configuration class of a family with a mechanism; its models become known to the auto classes."""
    if base not in _MADE:
        doc = f"{base.__name__} with a mechanism."
        members = {"__module__": __name__, "__doc__": doc, "plain_class": base}
        _MADE[base] = type(PREFIX + base.__name__, (AffineConfigMixin, base), members)
        for name in AUTO_CLASSES:
            auto_class = getattr(transformers, name)
            if base in auto_class._model_mapping:
                models = auto_class._model_mapping[base]
                model = models[0] if isinstance(models, list | tuple) else models
                auto_class.register(_MADE[base], affine_model_class(model), exist_ok=True)
    return _MADE[base]


def affine_model_class(base: type[PreTrainedModel]) -> Any:
    """The class of a model with a mechanism."""
    if base not in _MADE:
        config_class = affine_config_class(base.config_class)  # type: ignore[arg-type]
        doc = f"{base.__name__} with a mechanism in every attention module."
        members = {"__module__": __name__, "__doc__": doc, "config_class": config_class, "plain_class": base}
        _MADE.setdefault(base, type(PREFIX + base.__name__, (AffineModelMixin, base), members))
    return _MADE[base]


_MADE: dict[type, Any] = {}


def __getattr__(name: str) -> Any:
    """Makes `AffineXyz` from the class Xyz of transformers."""
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return affine_model_class(base)
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return affine_config_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
