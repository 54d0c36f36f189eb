"""Writes the trained model into the run folder, atomically: a run is finished if and only if model/ exists."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from torch import nn

from ...files import sync, sync_folder
from ..run import RunFolder
from .checkpoints import temporary_name
from .state import whole_on_cpu

if TYPE_CHECKING:
    from .distill_trainer import DistillTrainer


def save_model(trainer: DistillTrainer, run: RunFolder, tokenizer: Any) -> None:
    """Writes model/ under a temporary name and renames it. Every rank must call this; rank 0 writes."""
    from safetensors import SafetensorError

    model = trainer.model
    state = {name: whole_on_cpu(tensor) for name, tensor in model.state_dict().items()} if _is_sharded(model) else None
    if trainer.is_world_process_zero():
        temporary = run.path / temporary_name("model")
        try:
            temporary.mkdir()
            model.save_pretrained(temporary, state_dict=state)
            tokenizer.save_pretrained(temporary)
            sync_folder(temporary)
            if run.model.is_dir():  # not for a pipe, which would block
                shutil.rmtree(run.model)
            os.rename(temporary, run.model)
            sync(run.path)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(run.path).free
            raise OSError(
                f"the model could not be written to {run.model}: {error} ({free:,} bytes free on its disk); the last "
                "checkpoint is complete, so training again only writes the model"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        run.add_event("finish", step=trainer.state.global_step, seconds=round(trainer.watch.seconds, 3))
    trainer.accelerator.wait_for_everyone()


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
