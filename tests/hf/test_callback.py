"""transformers' Trainer with the callback equals a plain training loop, also after resuming."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments

from affine_attention import commit_running_alpha
from affine_attention.hf import CommitNotice, RunningAlphaCallback, attach

from .models import make_tokens, plain_model, running_alphas
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


class Skipping:
    """What accelerate's optimizer says after a step that a gradient scaler has skipped."""

    step_was_skipped = True


def test_a_skipped_step_does_not_count():
    model = make_student()
    before = running_alphas(model)
    callback = RunningAlphaCallback()
    model(make_tokens(), labels=make_tokens()).loss.backward()
    callback.on_optimizer_step(None, None, None, model=model, optimizer=Skipping())
    assert torch.equal(running_alphas(model), before)
    commit_running_alpha(model)  # nothing is left of the skipped step
    assert torch.equal(running_alphas(model), before)
    model(make_tokens(), labels=make_tokens()).loss.backward()
    callback.on_optimizer_step(None, None, None, model=model, optimizer=None)
    assert not torch.equal(running_alphas(model), before)


def test_the_callback_commits_within_its_group(monkeypatch):
    seen = []
    monkeypatch.setattr("affine_attention.hf.callback.commit_running_alpha", lambda model, group: seen.append(group))
    monkeypatch.setattr("affine_attention.hf.callback.data_parallel_group", lambda model: "ranks with other data")
    for callback in (RunningAlphaCallback(), RunningAlphaCallback(group="mine")):
        callback.on_train_begin(None, None, None, model=make_student())
        callback.on_optimizer_step(None, None, None, model=make_student())
    assert seen == ["ranks with other data", "mine"]


def trained(commit: bool, start: str = "fresh"):
    model = attach(plain_model(), "affine", start=start).train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(3):
        model(make_tokens(), labels=make_tokens()).loss.backward()
        optimizer.step()
        if commit:
            commit_running_alpha(model)
    return model


def test_a_forgotten_commit_is_noticed_once(tmp_path):
    model = trained(commit=False)
    with pytest.warns(CommitNotice, match=r"still 0.0 in every head.*call commit_running_alpha\(model\) after every"):
        model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CommitNotice)
        model.save_pretrained(tmp_path)
        model.train().eval()
        trained(commit=True).eval()
    with pytest.warns(CommitNotice, match="still 0.5 in every head"):
        trained(commit=False, start="identity").save_pretrained(tmp_path)
