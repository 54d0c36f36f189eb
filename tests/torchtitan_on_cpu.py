"""Runs torchtitan's trainer on CPU: `torchrun -m tests.torchtitan_on_cpu OPTIONS` prints the running averages.

torchtitan 0.3.0 trains on GPUs only, and with a newer torch than 2.13. Stand-ins replace what is missing here: a device
module, functions that torch 2.13 does not have, and sums that gloo does not have.
"""

from __future__ import annotations

import collections
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle


def cpu_module() -> SimpleNamespace:
    """torch.cpu with the functions of torch.cuda that the trainer calls."""
    module = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"})
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"):
        setattr(module, name, lambda *_: None)
    module.current_device, module.device_count = lambda: 0, lambda: 1
    module.get_device_name = lambda *_: "cpu"
    module.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30)
    module.memory_stats = lambda *_: collections.defaultdict(int)
    return module


def step_of_microbatches(
    schedule: Any, *, arg_mbs: Any = None, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any
) -> None:
    """The `step` of a pipeline schedule that takes microbatches, as torchtitan calls it."""
    schedule._stage.has_backward = True
    schedule._stage.clear_runtime_states()
    loss_of = schedule.__dict__.setdefault("plain_loss", schedule._loss_fn)

    def loss(*args: Any) -> Any:
        result = loss_of(*args, **loss_kwargs)
        return result[0] if isinstance(result, tuple) else result

    schedule._loss_fn = loss
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses)


def sum_without_division(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: cpu_module()
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    PipelineScheduleSingle.step = step_of_microbatches  # type: ignore[method-assign]

    import torchtitan.distributed.fsdp as titan_fsdp
    import torchtitan.train
    from torchtitan.trainer import Trainer

    titan_fsdp.disable_fsdp_gradient_division = sum_without_division
    train_step = Trainer.train_step

    def reported_step(trainer: Any, batches: Any) -> None:
        train_step(trainer, batches)
        averages = {
            name: tensor.tolist()
            for part in trainer.model_parts
            for name, tensor in part.state_dict().items()
            if name.endswith("running_alpha")
        }
        sys.stdout.write(json.dumps({"step": trainer.step, "averages": averages}) + "\n")  # ranks share the output
        sys.stdout.flush()

    Trainer.train_step = reported_step
    torchtitan.train.main()


if __name__ == "__main__":
    main()
