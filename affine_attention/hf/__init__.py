"""Transformers models with a mechanism: attach, train, save, load, generate.

Importing this package registers its checkpoint type, so `AutoModelForCausalLM.from_pretrained` can load it.
"""

from transformers import AutoConfig

from .attach import attach, detach, is_attached
from .callback import RunningAlphaCallback
from .classes import MODEL_TYPE, AffineConfig
from .interface import WeightsNotice, register
from .parallel import data_parallel_group
from .students import STUDENTS, student

register()
AutoConfig.register(MODEL_TYPE, AffineConfig, exist_ok=True)

__all__ = [
    "STUDENTS",
    "RunningAlphaCallback",
    "WeightsNotice",
    "attach",
    "data_parallel_group",
    "detach",
    "is_attached",
    "student",
]
