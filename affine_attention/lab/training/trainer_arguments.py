"""Translates a recipe into Trainer's TrainingArguments and the loss."""

from __future__ import annotations

import torch
from transformers import TrainingArguments

from ...messages import did_you_mean
from ..distill.loss import DistillLoss
from ..recipe import Recipe
from ..run import RunFolder


def make_loss(recipe: Recipe) -> DistillLoss:
    """The loss of a recipe; cross-entropy if there is no teacher."""
    if recipe.teacher is None:
        return DistillLoss(kd_weight=0.0, ce_weight=1.0)
    return DistillLoss(
        recipe.kd_weight, recipe.ce_weight, recipe.temperature, recipe.divergence, recipe.truncate_vocabulary
    )


def check_report_to(names: tuple[str, ...]) -> None:
    """Raises ValueError for an unknown integration of Trainer, ImportError for one whose package is not installed."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    available = get_available_reporting_integrations() if names else []
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise ValueError(
                f"report_to must be one of {known}, got {name!r}{did_you_mean(name, INTEGRATION_TO_CALLBACK)}"
            )
        if name not in available:
            raise ImportError(
                f"report_to={name!r} needs the package of that name, which is not installed: pip install {name}"
            )


def training_arguments(
    recipe: Recipe, run: RunFolder, ranks: int, *, device: torch.device, report_to: tuple[str, ...] = ()
) -> TrainingArguments:
    """The TrainingArguments of a recipe on `ranks` ranks."""
    size, accumulation = recipe.micro_batches(ranks)
    on_gpu = device.type == "cuda"
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=recipe.warmup_steps,
        lr_scheduler_kwargs={
            "num_decay_steps": recipe.decay_steps,
            "decay_type": recipe.decay_type,
            "min_lr_ratio": recipe.min_lr_ratio,
        },
        optim="adamw_torch_fused",
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        max_grad_norm=recipe.max_grad_norm,
        bf16=recipe.dtype == "bfloat16",
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recipe.gradient_checkpointing else None,
        seed=recipe.seed,
        use_cpu=device.type == "cpu",
        use_cache=True,  # in the saved configuration; the training forwards pass False
        # DistillTrainer logs, saves and evaluates by the recipe.
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,  # would synchronise with the device for every micro-batch
        report_to=list(report_to) or "none",
        run_name=run.path.resolve().name,  # a study's students are runs of one project, named like its folder
        project=run.path.resolve().parent.name or "affine",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        remove_unused_columns=False,
        train_sampling_strategy="sequential",  # the dataset is already in its final order
        dataloader_pin_memory=on_gpu,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # running averages are all-reduced when they are committed
    )
    # With several GPUs and without torchrun, Trainer would use nn.DataParallel.
    _ = arguments.device
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
