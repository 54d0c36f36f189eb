"""Keywords of models: those without effect pass, every other one is refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Attention
from transformers.models.llama.modeling_llama import LlamaAttention

from affine_attention.hf.keywords import CHANGES_ATTENTION, WITHOUT_EFFECT, passes, refuse_unknown

from .models import make_model, make_tokens


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("block_indices", torch.zeros(2, 3), "block_indices is a keyword .*, got a tensor [2, 3] in LlamaAttention"),
        ("indices", [1, 2], "indices is a keyword that the operator does not know, got [1, 2] in LlamaAttention"),
        ("colour", 0, "colour is a keyword that the operator does not know, got 0 in LlamaAttention; leave it out"),
    ],
)
def test_an_attached_model_refuses_what_it_would_drop(name, value, words):
    model = make_model()
    with pytest.raises(ValueError) as caught:
        model(make_tokens(), **{name: value})
    for part in words.split(".*"):
        assert part in str(caught.value)
    model(make_tokens(), **{name: None})
    model(make_tokens(), labels=make_tokens(), ignore_index=3)
    refuse_unknown("LlamaAttention", dict.fromkeys(WITHOUT_EFFECT, 1), "")


def test_keywords_are_read_from_the_code_of_a_forward():
    assert passes(GptOssAttention.forward) == ["s_aux"]
    assert passes(LlamaAttention.forward) == []
    assert passes(HYV4Attention.forward) == ["s_aux", "indices"]
    assert not set(CHANGES_ATTENTION) & WITHOUT_EFFECT
