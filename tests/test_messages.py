"""Values in error messages are short, and misspelled names get a suggestion."""

from __future__ import annotations

import torch

from affine_attention.messages import LONGEST, did_you_mean, shown


def test_a_close_name_is_suggested():
    assert did_you_mean("afine", ("softmax", "affine")) == "; did you mean 'affine'?"
    assert did_you_mean("afine", ["affine"], " (did you mean {!r}?)") == " (did you mean 'affine'?)"
    for value in ("quite another", 3, None, "x" * 10**6):
        assert did_you_mean(value, ("softmax", "affine")) == ""


def test_values_are_cut():
    assert shown("affine") == "'affine'"
    assert len(shown("x" * 1000)) == LONGEST
    assert len(shown("x" * 1000, 200)) == 200
    assert shown(1 << 9000) == "an integer of 9001 bits"
    assert shown([1 << 90000]) == "a list"
    assert shown(torch.zeros(2, 3)) == "a tensor of shape [2, 3]"
