"""Attaches Affine-Scaled Attention to a transformers model, trains it for a few steps, saves it and loads it again.

python examples/attach_train.py        # a tiny llama on the CPU, a few seconds
"""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from affine_attention import Mechanism, commit_running_alpha, hf


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config)

    # bias_length is N of Eq. 8: set it to the training length.
    hf.attach(model, Mechanism.named("affine", bias_length=64))
    print(type(model).__name__, sum(p.numel() for p in model.parameters()), "parameters")

    tokens = torch.randint(0, 128, (8, 64))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(5):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        commit_running_alpha(model)  # the only extra line in a plain training loop
        print(f"step {step}  loss {loss.item():.3f}")
    average = model.model.layers[0].self_attn.affine.scale.running_alpha
    print("running alpha of layer 0:", [round(x, 3) for x in average.tolist()])

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    print("loaded", type(loaded).__name__, "with bitwise equal logits")


if __name__ == "__main__":
    main()
