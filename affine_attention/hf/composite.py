"""Finds the configuration of a text decoder inside that of a multimodal model, and names the attention of each part.

A multimodal model of transformers has one configuration with a part for each of its towers, and every attention module
reads the name of its attention function from the part that it was built from. A mechanism is attached to the text
decoder: its part of the configuration, and that of the whole model, hold a name of ours. All other parts hold names of
transformers, so that vision towers and projectors keep their own attention.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .interface import OPERATOR_IMPL, own_implementation


def decoder_config(config: Any) -> Any:
    """The part of a configuration that describes the text decoder; the configuration itself where it has no such part.

    Raises ValueError where a configuration has several.
    """
    if getattr(config, "is_encoder_decoder", False):
        return config  # transformers would build a new object
    return config.get_text_config(decoder=True)


def parts(config: Any) -> dict[str, Any]:
    """The configurations that a configuration contains, by the name of the attribute."""
    found = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: part for name, part in found.items() if isinstance(part, PreTrainedConfig)}


def set_implementations(config: Any, text: Any, name: Any) -> None:
    """Sets the attention of a model and all its parts from a name, or a dict of names, as a user passes it.

    In `config` and in its part `text` the name chooses an implementation of the operator. Other parts take a name of
    transformers as it is, and ignore a name of ours.
    """
    chosen = name.get("", config._attn_implementation) if isinstance(name, dict) else name
    config._attn_implementation_internal = own_implementation(chosen)
    for key, part in parts(config).items():
        chosen = name.get(key, part._attn_implementation) if isinstance(name, dict) else name
        if part is text:
            part._attn_implementation_internal = own_implementation(chosen)
        elif _contains(part, text):
            set_implementations(part, text, chosen)
        elif not isinstance(chosen, str) or chosen not in OPERATOR_IMPL:
            part._attn_implementation = chosen


def other_towers(model: PreTrainedModel, text: Any) -> list[PreTrainedModel]:
    """The models inside a model that have a configuration other than the decoder's and the whole model's."""
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and not any(module.config is own for own in (text, model.config))
        and not _contains(module.config, text)
    ]


def own_configs(model: PreTrainedModel) -> dict[int, Any]:
    """Gives a model copies of its configurations and returns them by the id of the original.

    Another model may have been built from the same objects.
    """
    memo: dict[int, Any] = {}  # keeps the originals alive, so that no id is used twice
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))
    return memo


def uses(module: nn.Module, *configs: Any) -> bool:
    """True for a module that was built from one of the configurations."""
    return any(getattr(module, "config", None) is config for config in configs)


def _contains(config: Any, part: Any) -> bool:
    return any(other is part or _contains(other, part) for other in parts(config).values())
