"""Where a model's logits come from: tied, scaled and capped heads are supported, anything else raises."""

from __future__ import annotations

import pytest
import torch
import transformers

from affine_attention.lab.distill.loss import DistillLoss
from tests.hf.models import SHAPE, make_model, plain_model

from .test_loss import assert_same, batch


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite", "gpt2", "gpt_neox", "mixtral"])
def test_the_loss_is_that_of_the_models_own_logits(family):
    assert_same(make_model(family), plain_model("llama", seed=3), (0.7, 0.3, 2.0), batch())


def test_a_tied_head_gets_both_gradients():
    student = make_model("llama", tie_word_embeddings=True)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert_same(student, plain_model("llama", seed=3), (1.0, 1.0, 1.0), batch())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("cohere", {"logit_scale": 0.3}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("nanochat", {"final_logit_softcapping": 2.0}),
    ],
)
def test_scaled_and_capped_families(family, changes):
    config = transformers.AutoConfig.for_model(family, **(SHAPE | changes))
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for x in model.parameters():
            torch.nn.init.normal_(x, std=0.3)
        models.append(model)
    assert_same(*models, (0.7, 0.3, 2.0), batch())
    assert all(getattr(config, name) == value for name, value in changes.items()), "the configuration came back"


def test_a_head_that_does_more_is_rejected():
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.clamp(max=0.1)
            return out

    odd = Odd(plain_model("llama").config)
    loss = DistillLoss(0.0, 1.0)
    with pytest.raises(ValueError) as error:
        loss(odd, None, batch())
    assert "Odd (model_type='llama')" in str(error.value)
    assert "forward" not in vars(odd.lm_head), "the head is back in its place"
    odd.set_output_embeddings(torch.nn.Sequential(odd.lm_head))
    with pytest.raises(ValueError) as error:
        loss(odd, None, batch())
    assert "its head is Sequential" in str(error.value)
