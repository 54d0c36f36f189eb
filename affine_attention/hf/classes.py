"""Creates the classes of attached models on demand: `AffineLlamaForCausalLM`, `AffineLlamaConfig`, ...

`AffineXyz` is the transformers class `Xyz` with a mechanism: it builds the mechanism from its configuration, saves and
loads it, and raises instead of running as plain softmax. A class is created on first access
(`from affine_attention.hf.classes import AffineLlamaForCausalLM`); checkpoint folders and pickle do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..nn import AttentionMechanism, Mechanism
from .callback import warn_if_never_committed
from .composite import decoder_config, other_towers, set_implementations
from .continuous_batching import open_manager
from .installation import initialise_missing, install
from .interface import IMPLEMENTATION, OPERATOR_IMPL, PAGED, SLOT, own_implementation
from .masks import SEQUENCE_RANKS
from .parallel import head_plan, keep_own_heads, whole_state_dict

MODEL_TYPE = "affine_attention"  # in config.json: no other library knows this type
MODULE_NAME = "modeling_affine_attention"  # the one-line module in a checkpoint folder
PREFIX = "Affine"
PART_PREFIX = "AffinePart"  # of the configuration of a text decoder inside a multimodal model
AUTO_CLASSES = [name for name in dir(transformers) if name.startswith("AutoModel")]


class _OwnNames:
    """A configuration in which every name of an attention chooses an implementation of the operator."""

    plain_class: type  # restored by `detach`
    _attn_implementation_internal: Any

    def __setattr__(self, name: str, value: Any) -> None:
        """Whatever way the name of an attention gets in, it chooses an implementation of the operator."""
        if name == "_attn_implementation_internal":
            value = own_implementation(value)
        super().__setattr__(name, value)

    def validate_output_attentions(self) -> None:
        """Accepts output_attentions, which transformers allows for eager attention only; we compute the weights."""

    @property
    def output_attentions(self) -> bool:
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value


class AffinePartMixin(_OwnNames):
    """The configuration of a text decoder inside a multimodal model that has a mechanism."""

    def to_dict(self) -> dict[str, Any]:
        settings: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        settings.pop(SEQUENCE_RANKS, None)
        # A plain class that loads the folder of the whole model fails here: it does not know this attention.
        return settings | {"attn_implementation": IMPLEMENTATION}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "a text decoder with a mechanism must be saved with the multimodal model that contains it, got "
            f"save_pretrained of its {self.plain_class.__name__} alone; call save_pretrained of the whole model"
        )


class AffineConfigMixin(_OwnNames):
    """A configuration that carries a mechanism, `affine_attention = {"mechanism": {...}, "start": ...}`.

    In memory its model_type is that of the base family, which transformers uses for weight conversion and generation.
    In config.json it is "affine_attention", so that no loader mistakes the folder for a plain model.
    """

    affine_attention: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        settings: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        settings.pop(SEQUENCE_RANKS, None)  # of this run, not of the model
        if "affine_attention" not in settings:
            return settings  # transformers builds a default instance to compare with
        architecture = (settings.get("architectures") or [""])[0]
        auto_map = {"AutoConfig": f"{MODULE_NAME}.{type(self).__name__}"}
        for auto_class in AUTO_CLASSES:
            if any(architecture == PREFIX + model.__name__ for model in _mapped(auto_class, self.plain_class)):
                auto_map[auto_class] = f"{MODULE_NAME}.{architecture}"
        return settings | {
            "model_type": MODEL_TYPE,
            "base_model_type": type(self).model_type,  # type: ignore[attr-defined]
            "auto_map": auto_map,
            # A plain class that loads this folder fails here: it does not know this attention.
            "attn_implementation": IMPLEMENTATION,
        }

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        own = dict(config_dict)
        own.pop("base_model_type", None)
        own["model_type"] = cls.model_type  # type: ignore[attr-defined]
        check_settings(own.get("affine_attention"))
        _tell_server(own.get("architectures") or ())
        found = super().from_dict(own, **kwargs)  # type: ignore[misc]
        mark_part(found[0] if isinstance(found, tuple) else found)
        return found

    @classmethod
    def is_custom_code(cls) -> bool:
        """Transformers looks at the module of a class and treats code that is not its own as older than it is."""
        return bool(cls.plain_class.is_custom_code())  # type: ignore[attr-defined]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        config_dict, rest = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        if config_dict.get("model_type") == MODEL_TYPE:
            config_dict = config_dict | {"model_type": cls.model_type}  # type: ignore[attr-defined]
        return config_dict, rest

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes config.json and, before the folder is uploaded, the one-line module that imports our classes."""
        names = sorted({type(self).__name__, *(n for n in self.architectures or () if n.startswith(PREFIX))})  # type: ignore[attr-defined]
        text = (
            f"from affine_attention.hf.classes import {', '.join(names)}  # noqa: F401  pip install affine-attention\n"
        )
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{MODULE_NAME}.py").write_text(text)
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    @property
    def _attn_implementation(self) -> Any:
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        """The text decoder gets an implementation of the operator, the other parts the name as it is."""
        set_implementations(self, decoder_config(self), value)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: transformers would copy this file, without its package, into every checkpoint folder."""


class AffineModelMixin:
    """A model with a mechanism in every attention module, built from `config.affine_attention`."""

    config: Any
    plain_class: type

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any):
        settings = check_settings(getattr(config, "affine_attention", None))
        mechanism = Mechanism.from_dict(settings["mechanism"])
        unmark_part(config)  # the auto classes that build the towers know plain classes alone
        text = decoder_config(config)
        if text._attn_implementation not in OPERATOR_IMPL:
            text._attn_implementation_internal = config._attn_implementation
        text.base_model_tp_plan = head_plan(text.base_model_tp_plan, SLOT, mechanism)
        super().__init__(config, *inputs, **kwargs)  # type: ignore[call-arg]
        mark_part(self.config)
        install(self, mechanism, settings["start"])  # type: ignore[arg-type]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        return own_implementation(attn_implementation)

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Chooses an implementation of the operator: "eager" the reference, "sdpa" composed, "flash_.." fused.

        The other towers of a multimodal model run the attention of that name.
        """
        if isinstance(attn_implementation, str) and attn_implementation not in OPERATOR_IMPL:
            for tower in other_towers(self, decoder_config(self.config)):  # type: ignore[arg-type]
                tower.get_correct_attn_implementation(attn_implementation)  # raises for a name that it cannot run
        self.config._attn_implementation = attn_implementation

    @classmethod
    def is_custom_code(cls) -> bool:
        """As the plain class: a load then converts weights and fills buffers as it does for that class."""
        return bool(cls.plain_class.is_custom_code())  # type: ignore[attr-defined]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Asks the plain class, because transformers decides this from the source file of a class."""
        return bool(cls.plain_class._can_set_experts_implementation())  # type: ignore[attr-defined]

    def initialize_weights(self) -> None:
        """What transformers calls after loading and in `init_weights`: gives a value to whatever has none yet."""
        layers = []
        for module in self.modules():  # type: ignore[attr-defined]
            layer = getattr(module, SLOT, None)
            if isinstance(layer, AttentionMechanism) and not getattr(layer, "_is_hf_initialized", False):
                layers.append((module, layer))
        super().initialize_weights()  # type: ignore[misc]
        scaled: set[int] = set()
        for module, layer in layers:
            initialise_missing(module, layer, self.config.affine_attention["start"], scaled)

    def _initialize_missing_keys(self, *args: Any, **kwargs: Any) -> None:
        """What transformers calls after loading."""
        super()._initialize_missing_keys(*args, **kwargs)  # type: ignore[misc]
        for module in self.modules():  # type: ignore[attr-defined]
            layer = getattr(module, SLOT, None)
            if isinstance(layer, AttentionMechanism):
                keep_own_heads(layer)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        Mechanism.from_dict(self.config.affine_attention["mechanism"]).check_can_generate()
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with the attention of the mechanism; `generate_batch` and its server call it."""
        Mechanism.from_dict(self.config.affine_attention["mechanism"]).check_can_generate()
        modules = [(name, m) for name, m in self.named_modules() if SLOT in m._modules]  # type: ignore[attr-defined]
        make = super().init_continuous_batching  # type: ignore[misc]
        return open_manager(self, make, PAGED, modules, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        self._notice_forgotten_commit()
        if kwargs.get("state_dict") is None and (state := whole_state_dict(self)) is not None:  # type: ignore[arg-type]
            kwargs["state_dict"] = state
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        if self.training and not mode:  # type: ignore[attr-defined]
            self._notice_forgotten_commit()
        return super().train(mode)  # type: ignore[misc]

    def _notice_forgotten_commit(self) -> None:
        """Once for each model: where training ends, or its result is written."""
        if not self.__dict__.get("_commit_was_noticed"):
            self._commit_was_noticed = warn_if_never_committed(self)  # type: ignore[arg-type]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: see `AffineConfigMixin.register_for_auto_class`."""


def mark_part(config: Any) -> None:
    """Gives the text decoder of a multimodal model a configuration that cannot name plain softmax attention."""
    text = decoder_config(config)
    if text is not config and not isinstance(text, AffinePartMixin):
        text.__class__ = affine_part_class(type(text))


def unmark_part(config: Any) -> None:
    """Gives the text decoder of a multimodal model its plain class of configuration."""
    text = decoder_config(config)
    if isinstance(text, AffinePartMixin):
        text.__class__ = text.plain_class


def check_settings(settings: Any) -> dict[str, Any]:
    """Validates `config.affine_attention` and returns it."""
    if not isinstance(settings, dict) or set(settings) != {"mechanism", "start"}:
        raise ValueError(
            'config.affine_attention must be {"mechanism": {..}, "start": "fresh" or "identity"}, got '
            f"{settings!r}; was this folder written by save_pretrained of an attached model?"
        )
    Mechanism.from_dict(settings["mechanism"])
    return settings


class AffineConfig(PreTrainedConfig):
    """The class that AutoConfig uses for "affine_attention": loads a config.json into the class of its family."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        base: Any = config_dict.get("base_model_type")
        if base not in CONFIG_MAPPING:
            raise ValueError(
                f"base_model_type must be a model type of transformers {transformers.__version__}, got {base!r}"
            )
        return affine_config_class(CONFIG_MAPPING[base]).from_dict(config_dict, **kwargs)


def affine_config_class(base: type[PreTrainedConfig]) -> Any:
    """Returns the `Affine...` configuration class of a family and registers its models with the auto classes."""
    if base not in _CREATED:
        doc = f"{base.__name__} with a mechanism."
        members = {"__module__": __name__, "__doc__": doc, "plain_class": base}
        _CREATED[base] = type(PREFIX + base.__name__, (AffineConfigMixin, base), members)
        for name in AUTO_CLASSES:
            for model in _mapped(name, base)[:1]:
                getattr(transformers, name).register(_CREATED[base], affine_model_class(model), exist_ok=True)
    return _CREATED[base]


def affine_part_class(base: type[PreTrainedConfig]) -> Any:
    """Returns the class of a configuration of that base inside a multimodal model with a mechanism."""
    if base not in _PARTS:
        doc = f"{base.__name__} of a text decoder with a mechanism."
        members = {"__module__": __name__, "__doc__": doc, "plain_class": base}
        _PARTS[base] = type(PART_PREFIX + base.__name__, (AffinePartMixin, base), members)
    return _PARTS[base]


def _mapped(auto_class: str, config_class: Any) -> list[type[PreTrainedModel]]:
    """The model classes of an auto class for a configuration class, without those that need a part of it (emu3)."""
    mapping = getattr(transformers, auto_class)._model_mapping
    if config_class not in mapping:
        return []
    models = mapping[config_class]
    models = models if isinstance(models, list | tuple) else [models]
    return [model for model in models if model.config_class is config_class]


def affine_model_class(base: type[PreTrainedModel]) -> Any:
    """Returns the `Affine...` class of a model class."""
    if base not in _CREATED:
        config_class = affine_config_class(base.config_class)  # type: ignore[arg-type]
        doc = f"{base.__name__} with a mechanism in every attention module."
        members = {"__module__": __name__, "__doc__": doc, "config_class": config_class, "plain_class": base}
        _CREATED.setdefault(base, type(PREFIX + base.__name__, (AffineModelMixin, base), members))
        # Some families name the weights of one class differently in their files (gpt_neox: embed_out, not lm_head).
        conversions = get_checkpoint_conversion_mapping(base.__name__)
        if conversions is not None:
            register_checkpoint_conversion_mapping(PREFIX + base.__name__, conversions, overwrite=True)
    return _CREATED[base]


def _tell_server(architectures: Sequence[str]) -> None:
    """`transformers serve` reads a configuration and then looks its architecture up in the namespace of transformers.

    It is not enough to import transformers here and add the class: a process may hold several of its lazy modules.
    """
    server: Any = sys.modules.get("transformers.cli.serving.model_manager")
    if server is None:
        return
    for name in architectures:
        if name.startswith(PREFIX):
            setattr(server.transformers, name, __getattr__(name))


_CREATED: dict[type, Any] = {}
_PARTS: dict[type, Any] = {}


def __getattr__(name: str) -> Any:
    """Creates `AffineXyz` from the transformers class Xyz."""
    if name.startswith(PART_PREFIX):
        return affine_part_class(getattr(transformers, name.removeprefix(PART_PREFIX)))
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return affine_model_class(base)
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return affine_config_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
