"""Converts a pretrained model: its outputs stay bitwise equal, and every gate can be trained from there.

python examples/convert_pretrained.py [path or name of a model]      # default: a tiny random llama
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from affine_attention import commit_running_alpha, hf


def load() -> torch.nn.Module:
    if len(sys.argv) > 1:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1])
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    torch.manual_seed(0)
    model = load().eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 32))
    with torch.no_grad():
        before = model(tokens).logits

    # Zero gate weights give alpha = 1/2, so the output projection is doubled; running_alpha = 1/2 makes beta 0.
    hf.attach(model, "affine_gated", start="identity")
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)
    print("attached: logits are bitwise equal")

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        commit_running_alpha(model)
    gates = [layer.self_attn.affine.scale.proj.weight for layer in model.model.layers]
    print("after 3 steps W_a has moved by", [f"{gate.abs().max().item():.1e}" for gate in gates])

    hf.detach(model)
    print("detached:", type(model).__name__)


if __name__ == "__main__":
    main()
