"""Dropout on attention weights is switched off in the configuration and in the modules."""

from __future__ import annotations

import pytest
import torch

from affine_attention.hf import attach
from affine_attention.hf.dropout import remove_attention_dropout

from .models import plain_model

NAMES = {"llama": "attention_dropout", "gpt2": "attn_pdrop", "gpt_neox": "attention_dropout"}


@pytest.mark.parametrize("family", NAMES)
def test_a_model_with_dropout_can_be_trained_afterwards(family):
    name = NAMES[family]
    model = plain_model(family, **{name: 0.25})
    before = model(torch.arange(8)[None]).logits
    assert remove_attention_dropout(model) == {name: 0.25}
    assert getattr(model.config, name) == 0
    assert torch.equal(model(torch.arange(8)[None]).logits, before)
    attach(model, "affine", start="identity").train()
    model(torch.arange(8)[None]).logits.sum().backward()  # raises for a dropout that is left
    assert remove_attention_dropout(model) == {}
