"""PEFT on an attached model: adapters train, with or without the mechanism, and both survive saving and loading."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from affine_attention import commit_running_alpha

from .models import make_model, make_tokens, running_alphas

TOKENS = make_tokens(4)


def lora(family: str, modules_to_save=None) -> LoraConfig:
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    return LoraConfig(r=2, target_modules=targets, modules_to_save=modules_to_save)


def train(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        commit_running_alpha(model)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("with_mechanism", [False, True])
def test_lora_trains_saves_and_loads(family, with_mechanism, tmp_path):
    base = make_model(family, "affine_gated")
    twin = copy.deepcopy(base)
    before = base(TOKENS).logits
    model = get_peft_model(base, lora(family, ["affine"] if with_mechanism else None))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in names)
    assert any("affine" in name for name in names) == with_mechanism
    torch.testing.assert_close(model(TOKENS).logits, before)
    train(model)
    assert not torch.allclose(model(TOKENS).logits, before)
    model.save_pretrained(tmp_path)
    if not with_mechanism:
        # The mechanism is frozen with the base model, but its running average was updated: copy it to the other base.
        for mine, theirs in zip(twin.buffers(), base.buffers(), strict=True):
            mine.data.copy_(theirs.data)
    loaded = PeftModel.from_pretrained(twin, tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=0)
    out = model.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert out.shape == (4, 16)


def test_merged_adapters_leave_an_attached_model(tmp_path):
    model = train(get_peft_model(make_model(), lora("llama", ["affine"])))
    logits, averages = model(TOKENS).logits, running_alphas(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(TOKENS).logits, merged(TOKENS).logits)
    assert len(averages) == 2 * len(running_alphas(loaded))
