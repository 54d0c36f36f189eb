"""Turns a recipe into the student that it trains, and says which attention will run in it."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import explain
from ...hf import STUDENTS, attach, is_attached, student
from ...hf.loading import load_model
from ...nn import AttentionMechanism
from ..estimate import meta_student
from ..inspection.capture import mechanism_layers
from ..recipe import Recipe


def build_student(recipe: Recipe) -> Any:
    """The student on the CPU, in float32: random weights of the recipe's seed, or those of a folder.

    Under one seed the weights that two mechanisms share are the same bit for bit, so that runs differ by the mechanism
    alone: the plain model draws its weights first, W_a and W_g after it, and always on the CPU.
    """
    if recipe.student in STUDENTS:
        check_size(recipe)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            return student(recipe.student, recipe.mechanism, device="cpu", **recipe.student_changes)
    if not Path(recipe.student).is_dir():
        near = get_close_matches(recipe.student, STUDENTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"student must be one of {', '.join(STUDENTS)}, or a folder with a model, got {recipe.student!r}{hint}"
        )
    return _student_of_folder(recipe)


def check_size(recipe: Recipe) -> None:
    """Refuses sizes that cannot be built, or whose weights do not fit into memory, before they are built."""
    needed = 4 * sum(parameter.numel() for parameter in meta_student(recipe).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"student {recipe.student!r} with student_changes {str(recipe.student_changes)[:300]} has weights of "
            f"{needed / 2**30:.1f} GiB, and this machine has {memory / 2**30:.1f} GiB of memory; make it smaller"
        )


def _student_of_folder(recipe: Recipe) -> Any:
    """A model to go on from. One without a mechanism gets the recipe's, and keeps its outputs where it can."""
    if recipe.student_changes:
        raise ValueError(
            f"student_changes must be empty for a student of a folder, whose configuration is fixed, got "
            f"{recipe.student_changes!r}"
        )
    model = load_model(recipe.student, "student", dtype=torch.float32)
    if is_attached(model):
        own = mechanism_layers(model)[0].mechanism
        if own != recipe.mechanism:
            raise ValueError(
                f"the student of {recipe.student} has the mechanism {own.to_dict()}, the recipe asks for "
                f"{recipe.mechanism.to_dict()}; name its own, or detach it first (affine_attention.hf.detach)"
            )
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return attach(model, recipe.mechanism, "identity" if recipe.mechanism.sink is None else "fresh")


def check_fit(recipe: Recipe, student: Any, corpus_vocabulary: int) -> None:
    """Errors that would otherwise appear in the middle of a run, or never."""
    config = student.config.get_text_config()
    if corpus_vocabulary > config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {corpus_vocabulary - 1}, the student {recipe.student!r} a vocabulary of "
            f"{config.vocab_size}; set student_changes.vocab_size={corpus_vocabulary} or more, or take a smaller "
            "tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.sequence_length > positions:
        raise ValueError(
            f"sequence_length = {recipe.sequence_length} is more than the {positions} positions of the student "
            f"{recipe.student!r} (max_position_embeddings); set student_changes.max_position_embeddings too"
        )


def check_teacher(recipe: Recipe, student: Any, teacher: Any) -> None:
    """The two must speak of the same tokens."""
    ours, theirs = student.config.get_text_config().vocab_size, teacher.config.get_text_config().vocab_size
    if ours != theirs and not recipe.truncate_vocabulary:
        raise ValueError(
            f"the student's vocabulary of {ours} is not the teacher's of {theirs}; set "
            f"student_changes.vocab_size={theirs}, or truncate_vocabulary=true if the difference is padding"
        )
    positions = getattr(teacher.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and recipe.sequence_length > positions:
        raise ValueError(
            f"sequence_length = {recipe.sequence_length} is more than the {positions} positions of the teacher "
            f"{recipe.teacher!r} (max_position_embeddings)"
        )


def explain_attention(recipe: Recipe, student: nn.Module, batch: int, device: torch.device) -> dict[str, str]:
    """Which implementation the student's layers take for a micro-batch, and why: asked with the real shapes."""
    layer = next(module for module in student.modules() if isinstance(module, AttentionMechanism))
    config: Any = student.config.get_text_config()  # type: ignore[operator, union-attr]
    heads, width, length = layer.num_heads, layer.head_dim, recipe.sequence_length
    groups = getattr(config, "num_key_value_heads", None) or heads
    dtype = getattr(torch, recipe.dtype)

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device, requires_grad=True)

    mechanism = layer.mechanism
    rows = (batch, heads, length)
    choice = explain(
        empty(batch, length, heads, width).transpose(1, 2),
        empty(batch, length, groups, width).transpose(1, 2),
        empty(batch, length, groups, width).transpose(1, 2),
        alpha=empty(*rows, kind=torch.float32) if mechanism.has_alpha else None,
        beta=empty(*rows, kind=torch.float32) if mechanism.bias else None,
        sink=empty(heads, kind=torch.float32) if mechanism.sink is not None else None,
        gate=empty(batch, length, heads, width).transpose(1, 2) if mechanism.gate else None,
        is_causal=True,
        segment_ids=torch.zeros(batch, length, dtype=torch.int64, device=device)
        if recipe.document_boundaries
        else None,
        nonnegative_alpha=True,
    )
    return {"implementation": choice.impl, "why": str(choice)}
