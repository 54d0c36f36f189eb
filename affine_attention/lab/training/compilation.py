"""Compiles the layers of a model in place with torch.compile, without touching other compiled code of the process."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

# The normed input has four consumers (the projections of q, k, v and alpha), one more than plain attention, so its
# gradient is a sum of more than four tensors. By default inductor materialises such a sum in fp32 before the backward
# of the norm reads it again.
OPTIONS = {"realize_reads_threshold": 8}


def compile_layers(*models: nn.Module | None) -> None:
    """Compiles each layer separately, in place: masks are computed outside, and state dict keys do not change.

    All layers of a model share one graph. dynamo caches graphs per code object and falls back to eager code after a few
    of them, without an error, so a process that trains many students would stop compiling. Each model therefore gets
    its own copy of the layers' `forward`: its cache starts empty, and it is freed with the model.
    """
    for model in models:
        if model is None:
            continue
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        copies: dict[type, types.FunctionType] = {}
        for module in model.modules():
            kind = type(module)
            if kind.__name__ in kinds:
                if "forward" not in vars(module):  # else another library has replaced it
                    copies.setdefault(kind, _copied(kind.forward))
                    module.forward = types.MethodType(copies[kind], module)
                module.compile(options=OPTIONS)


def _copied(function: Any) -> types.FunctionType:
    """The same function with a new code object."""
    code, name = function.__code__.replace(), function.__name__
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy
