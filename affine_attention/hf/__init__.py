"""Transformers models with a mechanism: attach, train, save, load, generate.

Importing this package registers its checkpoint type, so `AutoModelForCausalLM.from_pretrained` can load it.
"""

from transformers import AutoConfig

from .accelerate import accelerate, decelerate, explain, is_accelerated
from .accelerate import register as register_operator
from .attach import BiasLengthNotice, attach, detach, is_attached
from .callback import CommitNotice, RunningAlphaCallback
from .classes import MODEL_TYPE, AffineConfig
from .continuous_batching import register as register_paged
from .interface import WeightsNotice, register
from .parallel import data_parallel_group
from .sequence import sequence_parallel, shard_batch
from .students import STUDENTS, student

register()
register_operator()
register_paged()
AutoConfig.register(MODEL_TYPE, AffineConfig, exist_ok=True)

__all__ = [
    "STUDENTS",
    "BiasLengthNotice",
    "CommitNotice",
    "RunningAlphaCallback",
    "WeightsNotice",
    "accelerate",
    "attach",
    "data_parallel_group",
    "decelerate",
    "detach",
    "explain",
    "is_accelerated",
    "is_attached",
    "sequence_parallel",
    "shard_batch",
    "student",
]
