"""transformers' Trainer with the callback equals a plain training loop, also after resuming."""

from __future__ import annotations

import copy

import torch
from transformers import Trainer, TrainingArguments

from affine_attention import commit_running_alpha
from affine_attention.hf import RunningAlphaCallback

from .models import make_tokens, running_alphas
from .test_training import make_student


def run_trainer(model, folder, steps, rows, resume=None, save=False):
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=steps,
        learning_rate=1e-2, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, use_cpu=True, report_to=[],
        save_strategy="steps" if save else "no", save_steps=1, disable_tqdm=True, logging_strategy="no",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[RunningAlphaCallback()])
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def test_it_commits_once_per_optimizer_step(tmp_path):
    model = make_student()
    plain = copy.deepcopy(model)
    rows = make_tokens(8)
    run_trainer(model, tmp_path, 2, rows)
    optimizer = torch.optim.SGD(plain.parameters(), 1e-2)
    for batch in rows.chunk(2):
        optimizer.zero_grad()
        (sum(plain(part, labels=part).loss for part in batch.chunk(2)) / 2).backward()
        optimizer.step()
        commit_running_alpha(plain)
    torch.testing.assert_close(running_alphas(model), running_alphas(plain), rtol=1e-5, atol=1e-6)
    for (name, x), y in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=name)


def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path):
    rows = make_tokens(8)
    whole = run_trainer(make_student(), tmp_path / "whole", 2, rows, save=True)
    resumed = run_trainer(make_student(), tmp_path / "again", 2, rows, resume=str(tmp_path / "whole" / "checkpoint-1"))
    for name, x in whole.state_dict().items():
        assert torch.equal(x, resumed.state_dict()[name]), name
