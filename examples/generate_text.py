"""Generates the same tokens for single prompts, in a left-padded batch, with a static cache and without a cache.

python examples/generate_text.py
"""

from __future__ import annotations

import torch

from affine_attention import Mechanism, hf


def main() -> None:
    torch.manual_seed(0)
    model = hf.student("llama-1m", Mechanism.named("affine", bias_length=64), vocab_size=256, pad_token_id=0).eval()
    for parameter in model.parameters():  # larger random weights, since an untrained model repeats one token
        torch.nn.init.normal_(parameter, std=0.15)
    prompts = [torch.randint(1, 256, (1, length)) for length in (3, 9, 6)]
    greedy = {"max_new_tokens": 12, "do_sample": False}
    single = [model.generate(prompt, **greedy)[0, prompt.shape[1] :] for prompt in prompts]

    longest = max(prompt.shape[1] for prompt in prompts)
    batch = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=0) for p in prompts])
    mask = (batch != 0).long()
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        together = model.generate(batch, attention_mask=mask, **greedy, **options)[:, longest:]
        assert all(torch.equal(row, other) for row, other in zip(together, single, strict=True))
        print("left-padded batch,", options or "dynamic cache", "- the same tokens as single")
    print("tokens of the first prompt:", single[0].tolist())


if __name__ == "__main__":
    main()
