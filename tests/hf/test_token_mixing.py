"""What a decoder does with tokens outside of its attention."""

from __future__ import annotations

import pytest
import torch
import transformers

from affine_attention.hf.token_mixing import changing_rope, counts_positions, mixes_tokens

from .models import FAMILIES, SLIDING, plain_model

OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
       "word_embed_proj_dim": 32}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_plain_decoders_mix_tokens_in_attention_only(family):
    decoder = plain_model(family).base_model
    assert not counts_positions(decoder)
    assert mixes_tokens(decoder) is None
    assert changing_rope(decoder) is None


def test_windows_are_attention():
    assert mixes_tokens(plain_model("qwen2", **SLIDING["qwen2"]).base_model) is None


def test_a_family_that_counts_its_positions():
    assert counts_positions(transformers.OPTModel(transformers.OPTConfig(**OPT)).decoder)


def test_other_layers_and_convolutions_are_named():
    decoder = plain_model().base_model
    decoder.layers[1].short = torch.nn.Conv1d(2, 2, 3)
    assert mixes_tokens(decoder) == "layers.1.short mixes tokens outside of attention"
    decoder.config.layer_types = ["full_attention", "linear_attention"]
    assert "layers of type linear_attention" in mixes_tokens(decoder)


def test_frequencies_that_follow_the_longest_sequence():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "rope_theta" not in FAMILIES["llama"]
    name, kind = changing_rope(plain_model("llama", rope_parameters=rope).base_model)
    assert (name, kind) == ("rotary_emb", "dynamic")
