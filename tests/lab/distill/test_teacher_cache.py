"""Cached teacher states equal those of a running teacher, and are computed once for all students."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from affine_attention.lab.data import collate, prepare
from affine_attention.lab.distill.lm_head import TEACHER_HIDDEN, run_to_head
from affine_attention.lab.distill.loss import DistillLoss
from affine_attention.lab.distill.teacher_cache import FILE, cache_teacher_states
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.train import load_corpus, train
from tests.hf.models import make_model
from tests.lab.training.runs import differences, tiny_recipe, write_text


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    write_text(folder / "text.txt")
    train(recipe(folder, "softmax"), folder / "teacher", device="cpu", cache=folder / "cache")
    return folder


def recipe(place, mechanism="affine", **changes):
    return tiny_recipe(place / "text.txt", mechanism, **changes)


def student_of(place, name, cache="cache", **changes) -> Path:
    chosen = recipe(place, teacher=str(place / "teacher"), tokenizer=str(place / "teacher/model"), **changes)
    return train(chosen, place / name, device="cpu", cache=place / cache)


def losses(run):
    return [(line["loss"], line["kd_loss"], line["ce_loss"], line["grad_norm"]) for line in RunFolder(run).log()]


def test_a_student_learns_the_same(place):
    """Not bitwise equal: the pass over the text batches sequences differently, so BLAS rounds differently."""
    running = losses(student_of(place, "running"))
    cached = losses(student_of(place, "once", remember_teacher=True))
    assert torch.tensor(cached) == pytest.approx(torch.tensor(running), rel=2e-5)
    assert RunFolder(place / "once").log()[-1]["eval_kd_loss"] == pytest.approx(
        RunFolder(place / "running").log()[-1]["eval_kd_loss"], rel=2e-5
    )


def test_the_teacher_runs_once_for_all_students(place, monkeypatch):
    from affine_attention.lab.distill import teacher_cache

    passes = []
    write = teacher_cache._write_states
    monkeypatch.setattr(teacher_cache, "_write_states", lambda *given: passes.append(write(*given)))
    student_of(place, "first", cache="cache2", remember_teacher=True)
    student_of(place, "second", cache="cache2", remember_teacher=True, mechanism="softmax")
    student_of(place, "third", cache="cache2", remember_teacher=True, data_seed=1, seed=1)
    assert len(passes) == 1


def test_a_resumed_run_is_the_uninterrupted_one(place):
    whole = student_of(place, "whole", remember_teacher=True, steps=6)
    broken = place / "broken"
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "model")
    shutil.rmtree(broken / "checkpoints/step-00000006")
    student_of(place, "broken", remember_teacher=True, steps=6)
    assert differences(broken, whole) == []


def test_each_sequence_comes_with_its_own_states(place):
    teacher = make_model("llama", "softmax").requires_grad_(False).eval()
    corpus = load_corpus(recipe(place), place / "cache")
    sequences = corpus.train_dataset(11, seed=3)
    sequences.ids = sequences.ids % teacher.config.vocab_size
    cached = cache_teacher_states(teacher, sequences, "text", dtype=torch.float32, batch=4, cache=place / "states")
    assert len(cached) == 11
    for item in (0, 5, 10):
        example = cached[item]
        assert torch.equal(example["input_ids"], sequences[item]["input_ids"])
        alone = run_to_head(teacher, collate([sequences[item]]), set()).hidden_BTM[0]
        torch.testing.assert_close(example[TEACHER_HIDDEN], alone, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_stored_exactly(place):
    teacher = make_model("llama", "softmax").requires_grad_(False).eval().bfloat16()
    sequences = load_corpus(recipe(place), place / "cache").train_dataset(8, seed=0)
    sequences.ids = sequences.ids % teacher.config.vocab_size
    cached = cache_teacher_states(teacher, sequences, "text", dtype=torch.bfloat16, batch=8, cache=place / "half")
    example = cached[3]
    assert example[TEACHER_HIDDEN].dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        alone = run_to_head(teacher, collate([sequences[3]]), set()).hidden_BTM[0]
    torch.testing.assert_close(example[TEACHER_HIDDEN], alone, rtol=2e-2, atol=2e-2)
    student = make_model("llama", "affine")
    inputs = collate([sequences[item] for item in range(4)])
    with torch.autocast("cpu", torch.bfloat16):
        running = DistillLoss()(student, teacher, inputs)
        once = DistillLoss()(student, teacher, collate([cached[item] for item in range(4)]))
    torch.testing.assert_close(once.kd_sum, running.kd_sum, rtol=2e-2, atol=2e-2)


def test_another_teacher_or_text_is_another_file(place):
    teacher = make_model("llama", "softmax").requires_grad_(False).eval()
    sequences = load_corpus(recipe(place), place / "cache").train_dataset(8, seed=0)
    sequences.ids = sequences.ids % teacher.config.vocab_size
    folder = place / "several"

    def files():
        cache_teacher_states(teacher, sequences, text, dtype=torch.float32, batch=8, cache=folder)
        return len(list(folder.glob(f"*/{FILE}")))

    text = "one"
    assert files() == 1
    assert files() == 1
    text = "two"
    assert files() == 2
    teacher.get_output_embeddings().weight[0, 0] += 1
    assert files() == 3


def test_missing_disk_space_is_reported_before_the_pass(place, monkeypatch):
    from affine_attention.lab.distill import teacher_cache

    usage = shutil.disk_usage(place)
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"remember_teacher=true needs 0\.0 GiB for .* sequences"):
        student_of(place, "no-room", cache="cache3", remember_teacher=True)


def test_a_stream_cannot_be_cached(place):
    with pytest.raises(ValueError, match=re.escape("remember_teacher=true cannot be combined with streaming=true")):
        recipe(place, teacher="any", remember_teacher=True, streaming=True, tokenizer="any")


def test_a_packing_without_boundaries_is_cached_too(place):
    corpus = prepare(
        place / "text.txt", sequence_length=32, tokenizer=str(place / "teacher/model"), cache=place / "cache"
    )
    teacher = make_model("llama", "softmax").requires_grad_(False).eval()
    sequences = corpus.train_dataset(4)
    sequences.ids = sequences.ids % teacher.config.vocab_size
    example = cache_teacher_states(teacher, sequences, "plain", dtype=torch.float32, batch=3, cache=place / "plain")[2]
    assert example.keys() == {"input_ids", "labels", TEACHER_HIDDEN}
