"""Builds the student of a recipe, and reports which attention implementation it will use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import explain
from ...hf import STUDENTS, attach, is_attached, student
from ...hf.dropout import remove_attention_dropout
from ...hf.loading import load_model
from ...messages import did_you_mean
from ...nn import AttentionMechanism
from ..estimate import check_is_fixed, meta_student, meta_teacher
from ..fingerprint import fingerprint_model, fingerprint_source
from ..inspection.capture import mechanism_layers
from ..models import without_plain_mechanism
from ..recipe import ORIGINAL, Recipe
from .pressure import check_pressure


def build_student(recipe: Recipe) -> Any:
    """The student on the CPU in float32, with random weights of the recipe's seed or with the weights of a folder.

    With the same seed, the weights that two mechanisms share are bitwise equal, so that runs differ only in the
    mechanism: the model without the mechanism draws its weights first, then W_a and W_g, always on the CPU.
    """
    if recipe.student in STUDENTS:
        check_size(recipe)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            return student(recipe.student, recipe.mechanism, device="cpu", **recipe.student_changes)
    check_checkpoint(recipe)
    return _student_of_checkpoint(recipe)


def check_checkpoint(recipe: Recipe) -> None:
    """Raises ValueError if the student is neither a known student nor a folder nor a name on the hub."""
    source = recipe.student
    if source in STUDENTS or Path(source).is_dir():
        return
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise ValueError(
            f"student must be one of {', '.join(STUDENTS)}, or a folder with a model, or OWNER/NAME on the hub, got "
            f"{source!r}{did_you_mean(source, STUDENTS)}"
        )


def check_sources(recipe: Recipe) -> None:
    """Checks student and teacher by their configurations, before any data is read or any weight is loaded.

    A checkpoint on the hub that is not in the local cache is checked after it was loaded.
    """
    check_checkpoint(recipe)
    if recipe.student in STUDENTS and recipe.teacher_source == recipe.student:
        raise ValueError(
            f"teacher={ORIGINAL!r} is the checkpoint that the student starts from, but the student "
            f"{recipe.student!r} starts with random weights; set student to a checkpoint, or teacher to another one"
        )
    try:
        student = meta_student(recipe)
        teacher = None if recipe.teacher is None else meta_teacher(recipe.teacher)
    except OSError:
        return
    check_pressure(recipe, student)
    if teacher is not None:
        check_teacher(recipe, student, teacher)


def fingerprint_start(recipe: Recipe, student: Any) -> str | None:
    """Hash of the checkpoint that the student starts from; None for random weights, which follow from the seed."""
    if recipe.student in STUDENTS:
        return None
    return fingerprint_source(recipe.student) or fingerprint_model(student)


def check_size(recipe: Recipe) -> None:
    """Raises ValueError if the student cannot be built or its weights do not fit into memory."""
    needed = 4 * sum(parameter.numel() for parameter in meta_student(recipe).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"student {recipe.student!r} with student_changes {str(recipe.student_changes)[:300]} has weights of "
            f"{needed / 2**30:.1f} GiB, but this machine has {memory / 2**30:.1f} GiB of memory; use a smaller student"
        )


def _student_of_checkpoint(recipe: Recipe) -> Any:
    """A student from a checkpoint. Without a mechanism it gets the recipe's, which keeps its outputs if possible.

    Dropout on attention weights is switched off for every mechanism, softmax included: no mechanism has it.
    """
    check_is_fixed(recipe)
    model = without_plain_mechanism(load_model(recipe.student, "student", dtype=torch.float32))
    if is_attached(model):
        own = mechanism_layers(model)[0].mechanism
        if own != recipe.mechanism:
            raise ValueError(
                f"the student in {recipe.student} has the mechanism {own.to_dict()}, but the recipe has "
                f"{recipe.mechanism.to_dict()}; use its own, or detach it first (affine_attention.hf.detach)"
            )
        return model
    remove_attention_dropout(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return attach(model, recipe.mechanism, "fresh" if recipe.mechanism.identity_scale is None else "identity")


def check_fit(recipe: Recipe, student: Any, corpus_vocabulary: int) -> None:
    """Checks vocabulary and positions: some mismatches would otherwise fail late or stay unnoticed."""
    config = student.config.get_text_config()
    if corpus_vocabulary > config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {corpus_vocabulary - 1}, but the student {recipe.student!r} has a vocabulary "
            f"of {config.vocab_size}; {_change(recipe, 'vocab_size', f'{corpus_vocabulary} or more')}use a smaller "
            "tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.sequence_length > positions:
        raise ValueError(
            f"sequence_length = {recipe.sequence_length} exceeds the {positions} positions of the student "
            f"{recipe.student!r} (max_position_embeddings); {_change(recipe, 'max_position_embeddings')}use shorter "
            "sequences"
        )


def _change(recipe: Recipe, key: str, value: str = "") -> str:
    """`set student_changes.KEY=VALUE, or `: a way out that a student from a checkpoint does not have."""
    if recipe.student not in STUDENTS:
        return ""
    return f"set student_changes.{key}{f'={value}' if value else ''}, or "


def check_teacher(recipe: Recipe, student: Any, teacher: Any) -> None:
    """Checks that the vocabulary sizes match and that the sequence length fits the teacher."""
    ours, theirs = student.config.get_text_config().vocab_size, teacher.config.get_text_config().vocab_size
    if ours != theirs and not recipe.truncate_vocabulary:
        raise ValueError(
            f"the student's vocabulary size {ours} differs from the teacher's {theirs}; "
            f"{_change(recipe, 'vocab_size', str(theirs)) or 'use a teacher with the same vocabulary, or '}set "
            "truncate_vocabulary=true if the extra tokens are padding"
        )
    positions = getattr(teacher.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and recipe.sequence_length > positions:
        raise ValueError(
            f"sequence_length = {recipe.sequence_length} exceeds the {positions} positions of the teacher "
            f"{recipe.teacher!r} (max_position_embeddings)"
        )


def explain_attention(recipe: Recipe, student: nn.Module, batch: int, device: torch.device) -> dict[str, Any]:
    """The attention implementation for a micro-batch of the student, and the reason (`explain` with real shapes).

    With sink pressure, `pressure` has the same for the steps with evicted keys.
    """
    length = recipe.sequence_length
    segments = torch.zeros(batch, length, dtype=torch.int64, device=device) if recipe.document_boundaries else None
    visible: dict[str, Any] = {"is_causal": True, "segment_ids": segments}
    found: dict[str, Any] = _explain(recipe, student, batch, device, visible)
    if recipe.sink_pressure == "window":
        found["pressure"] = _explain(recipe, student, batch, device, visible | {"window": recipe.pressure_window})
    elif recipe.sink_pressure == "first_key":
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).expand(batch, -1, -1, -1)
        found["pressure"] = _explain(recipe, student, batch, device, {"mask": mask})
    return found


def _explain(
    recipe: Recipe, student: nn.Module, batch: int, device: torch.device, visible: dict[str, Any]
) -> dict[str, str]:
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
        sink=None
        if mechanism.sink is None
        else empty(*(rows if mechanism.sink == "token" else (heads,)), kind=torch.float32),
        gate=empty(batch, length, heads, width).transpose(1, 2) if mechanism.gate else None,
        exclusion=None if mechanism.exclusion is None else 1.0,
        norm_weight=empty(heads, width) if mechanism.head_norm else None,
        weights=mechanism.weights,
        nonnegative_alpha=mechanism.nonnegative_alpha,
        **visible,
    )
    why = str(choice)
    if mechanism.has_alpha and not mechanism.has_kernels and device.type == "cuda":
        why += "; alpha and beta are PyTorch formulas, since the kernels have those of the paper and a sigmoid only"
    return {"implementation": choice.impl, "why": why}
