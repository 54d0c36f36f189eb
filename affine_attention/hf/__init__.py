"""Transformers models with a mechanism: attach, train, save, load, generate.

Importing this package makes its checkpoints known to `AutoModelForCausalLM.from_pretrained`.
"""

from transformers import AutoConfig

from .attach import attach, detach, is_attached
from .classes import MODEL_TYPE, AffineConfig
from .interface import WeightsNotice, register
from .parallel import data_parallel_group
from .sequence import sequence_parallel, shard_batch
from .students import STUDENTS, student
from .trainer import RunningAlphaCallback

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
    "sequence_parallel",
    "shard_batch",
    "student",
]
