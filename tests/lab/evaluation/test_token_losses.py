"""The loss of every token equals that of the whole logits."""

from __future__ import annotations

import pytest
import torch

from affine_attention.lab.evaluation import token_losses as module
from affine_attention.lab.evaluation.token_losses import token_losses
from tests.hf.models import FAMILIES, make_model


@pytest.mark.parametrize("family", [*FAMILIES, "cohere"])
def test_losses_equal_those_of_the_logits(family, monkeypatch):
    monkeypatch.setitem(module.LOGITS_PER_CHUNK, "cpu", 300)  # four tokens at a time
    if family == "cohere":
        from transformers import CohereConfig, CohereForCausalLM

        torch.manual_seed(0)
        model = CohereForCausalLM(
            CohereConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=4, logit_scale=0.3)
        ).double()  # fmt: skip
    else:
        model = make_model(family, "affine", torch.float64)
    ids = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(0))
    model.train()
    mine = token_losses(model, {"input_ids": ids})
    assert model.training
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
    truth = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(mine.double(), truth.view(2, 10), rtol=1e-6, atol=1e-6)
