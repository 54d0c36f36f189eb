"""Turns a student, a teacher and a batch into distillation loss sums that add up over micro-batches and ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import IGNORED, LossParts, chunked_loss
from .lm_head import STUDENT_MASK, TEACHER_HIDDEN, HeadInput, head_of, run_to_head
from .terms import Terms

__all__ = ["DistillLoss", "LossParts"]


class DistillLoss:
    """Distillation from a teacher's full distribution, cross-entropy to the text, or both.

    >>> loss = DistillLoss(kd_weight=0.9, ce_weight=0.1, temperature=2.0)
    >>> parts = loss(student, teacher, {"input_ids": ids, "labels": ids})      # doctest: +SKIP
    >>> (parts.total_sum / tokens_of_all_micro_batches_and_ranks).backward()   # doctest: +SKIP

    Position t predicts token t + 1. `labels` follow transformers: not shifted, and -100 marks an ignored token. The
    parts are sums over the other tokens, so that micro-batches and ranks add up to the whole batch.

    Args:
        kd_weight: weight of the distillation term; 0 does not run the teacher.
        ce_weight: weight of the cross-entropy to the labels. Its sum is always reported.
        temperature: divides both models' logits in the distillation term, whose value and gradient are multiplied by
            its square.
        divergence: "forward_kl" is KL(teacher || student); "soft_cross_entropy" adds the teacher's entropy to it, which
            has no gradient.
        truncate_vocabulary: if the two vocabulary sizes differ, use only the tokens of the smaller one; otherwise
            different sizes are an error. Correct if the extra tokens are padding.
        chunk_bytes: approximate size of the student's logits of one chunk; 256 MiB on the CPU, 512 MiB on a GPU. The
            teacher's logits need half of that on the CPU, the same on a GPU.
    """

    def __init__(
        self,
        kd_weight: float = 1.0,
        ce_weight: float = 0.0,
        temperature: float = 1.0,
        divergence: str = "forward_kl",
        truncate_vocabulary: bool = False,
        chunk_bytes: int | None = None,
    ):
        self.terms = Terms(kd_weight, ce_weight, temperature, divergence)
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, or None for the device's default, got {chunk_bytes}")
        self.truncate_vocabulary = truncate_vocabulary
        self.chunk_bytes = chunk_bytes
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._warned = False

    def __repr__(self) -> str:
        return f"DistillLoss({self.terms}, truncate_vocabulary={self.truncate_vocabulary})"

    def __call__(self, student: Any, teacher: Any, inputs: Mapping[str, Any]) -> LossParts:
        """The loss of one micro-batch. `teacher` may be None if `kd_weight` is 0; both models get the same `inputs`.

        If `inputs` hold cached hidden states of the teacher (teacher_cache.py), only its head runs. A mask of the
        student alone (training/pressure.py) does not reach the teacher.
        """
        if inputs.get("labels") is None:
            raise ValueError(f'inputs must have "labels", got {", ".join(map(repr, inputs))}')
        if self.terms.kd_weight and teacher is None:
            raise ValueError(
                f"kd_weight={self.terms.kd_weight} needs a teacher; pass one, or use kd_weight=0 and ce_weight=1 "
                "for plain cross-entropy"
            )
        shifted = inputs.get("shift_labels")  # of a part of a sequence, whose last label is in the next part
        labels_N = next_tokens(inputs["labels"]) if shifted is None else shifted.flatten()
        theirs = None
        if self.terms.kd_weight:
            # Before the student, so that the teacher's temporaries are freed before the student stores activations.
            with torch.no_grad():
                theirs = self._teacher_head_input(teacher, inputs)
        if STUDENT_MASK in inputs:
            inputs = {**inputs, "attention_mask": inputs[STUDENT_MASK]}
        ours = run_to_head(student, inputs, self._checked)
        if theirs is None:
            return chunked_loss(
                ours.hidden_BTM.flatten(0, 1), ours.head, labels_N, terms=self.terms,
                compute_dtype=ours.compute_dtype, chunk_bytes=self.chunk_bytes,
            )  # fmt: skip
        head, teacher_head = ours.head, theirs.head
        if head.vocabulary != teacher_head.vocabulary and self.truncate_vocabulary:
            smaller = min(head.vocabulary, teacher_head.vocabulary)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the vocabularies of the student ({head.vocabulary}) and the teacher ({teacher_head.vocabulary}) "
                    f"are truncated to the first {smaller} tokens in the loss",
                    stacklevel=2,
                )
            head, teacher_head = head.cut(smaller), teacher_head.cut(smaller)
        return chunked_loss(
            ours.hidden_BTM.flatten(0, 1), head, labels_N, theirs.hidden_BTM.flatten(0, 1), teacher_head, self.terms,
            compute_dtype=ours.compute_dtype, teacher_dtype=theirs.compute_dtype, chunk_bytes=self.chunk_bytes,
        )  # fmt: skip

    @torch.no_grad()
    def teacher_states(self, teacher: Any, inputs: Mapping[str, Any]) -> Tensor:
        """The teacher's last hidden states [B, T, M], to be passed as cached ones."""
        return run_to_head(teacher, inputs, self._checked).hidden_BTM

    def _teacher_head_input(self, teacher: Any, inputs: Mapping[str, Any]) -> HeadInput:
        hidden_BTM = inputs.get(TEACHER_HIDDEN)
        if hidden_BTM is None:
            return run_to_head(teacher, inputs, self._checked)
        return HeadInput(hidden_BTM, head_of(teacher), hidden_BTM.dtype)


def next_tokens(labels_BT: Tensor) -> Tensor:
    """[B, T] labels -> [B · T]: the next token of each position; the last position of a sequence is ignored."""
    if labels_BT.dim() != 2:
        raise ValueError(f"labels must be [B, T], got {list(labels_BT.shape)}")
    shifted = torch.full_like(labels_BT, IGNORED)
    shifted[:, :-1] = labels_BT[:, 1:]
    return shifted.flatten()
