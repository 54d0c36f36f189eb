"""QLoRA: a mechanism on a model with frozen quantised projections, its gates in bf16, LoRA on top."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from affine_attention import commit_running_alpha, hf

from .models import make_tokens, plain_model


def quantised(folder, kind: str):
    """A tiny llama in bf16 whose linear layers are quantised by a library that runs on the CPU."""
    # Wide enough for the blocks of 64 weights of nf4.
    plain_model("llama", torch.bfloat16, hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(folder)
    if kind == "torchao int8":
        pytest.importorskip("torchao", reason="needs torchao")
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )
    # In evaluation mode bitsandbytes repacks its weights for the CPU at the first forward, for inference only.
    return model.train()


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_gates_and_adapters_learn_on_frozen_quantised_projections(kind, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = quantised(tmp_path, kind)
    before = model.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        plain = model(make_tokens(2, 16)).logits
    hf.attach(model, "softmax")
    with torch.no_grad():
        torch.testing.assert_close(model(make_tokens(2, 16)).logits, plain, rtol=2e-2, atol=2e-2)
    hf.detach(model)
    hf.attach(model, "affine_gated")
    scale = model.model.layers[0].self_attn.affine
    assert {x.dtype for x in scale.parameters()} == {torch.bfloat16}
    assert scale.scale.running_alpha.dtype == torch.float32
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if ".affine." in name:
            parameter.requires_grad_(True)
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert {"lora_A", "lora_B"} <= {part for name in trained for part in name.split(".")}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    tokens, losses = make_tokens(2, 16), []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        missing = [name for name, x in trained.items() if x.grad is None]
        assert not missing
        optimizer.step()
        commit_running_alpha(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    layer = model.get_base_model().model.layers[0].self_attn
    assert layer.o_proj.weight is before, "the projections are frozen"
    assert layer.affine.scale.running_alpha.gt(0).all()


@pytest.mark.parametrize("kind", ["torchao int8", "bitsandbytes nf4"])
def test_an_identity_start_and_a_quantised_load_of_a_mechanism_are_refused(kind, tmp_path):
    model = quantised(tmp_path, kind)
    with pytest.raises(ValueError, match='start="identity" does not work for LlamaAttention: it scales output'):
        hf.attach(model, "affine", start="identity")
    assert not hf.is_attached(model), "nothing was changed"
    config = model.config.quantization_config
    attached = hf.attach(plain_model("llama", torch.bfloat16), "affine")
    attached.save_pretrained(tmp_path / "attached")
    with pytest.raises(ValueError, match="load the plain model with the quantization_config and attach"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "attached", quantization_config=config, device_map={"": "cpu"})
