"""Times the attention of one GPT-OSS layer, sinks and window, on its eager code, on FlexAttention and on the operator.

    python -m benchmarks.accelerate [--length 4096] [--batch 1] [--window 128] [--rounds 9] [--write]

Projections, rotary positions, attention and output projection of one sliding layer, forward + backward, bf16 on a GPU.
All three take the same weights and the mask that transformers makes for each. Bars: 3 times the speed of eager, and at
most the time of FlexAttention.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import GptOssConfig
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

import affine_attention.hf  # noqa: F401  registers the attention function
from affine_attention.hf.accelerate import OPERATOR
from benchmarks.measure import median_seconds
from benchmarks.results_file import table, write

NAMES = {"eager": "eager", "FlexAttention": "flex_attention", "operator": OPERATOR}


def training_pass(layer: Any, hidden: torch.Tensor) -> Callable[[], object]:
    config = layer.config
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotary = GptOssRotaryEmbedding(config).to(hidden.device)(hidden, positions)
    mask = create_sliding_window_causal_mask(
        config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=None
    )

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        out, _ = layer(hidden, position_embeddings=rotary, attention_mask=mask, affine_segments=None)
        out.sum().backward()

    return run


def measure(batch: int, length: int, window: int, rounds: int, device: str, shape: dict[str, int]) -> dict[str, float]:
    """Seconds of forward + backward by name."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = GptOssConfig(sliding_window=window, layer_types=["sliding_attention"], num_hidden_layers=1, **shape)
    hidden = torch.randn(batch, length, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    layer = GptOssAttention(config, 0).to(device, dtype)
    torch.nn.init.normal_(layer.sinks)
    passes = {}
    for name, implementation in NAMES.items():
        if name == "FlexAttention" and device != "cuda":
            continue  # it has no backward on the CPU
        each = copy.deepcopy(layer)
        each.config._attn_implementation = implementation
        passes[name] = training_pass(each, hidden)
    return median_seconds(passes, rounds, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--key-value-heads", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    given = parser.parse_args()
    shape = {"num_attention_heads": given.heads, "num_key_value_heads": given.key_value_heads, "head_dim": 64,
             "hidden_size": given.hidden}  # fmt: skip
    seconds = measure(given.batch, given.length, given.window, given.rounds, given.device, shape)
    ours = seconds["operator"]
    rows = [[name, f"{each * 1e3:.2f}", f"{each / ours:.2f}"] for name, each in seconds.items()]
    lines = [
        f"One GPT-OSS attention layer: batch {given.batch}, {given.length} tokens, window {given.window}, "
        f"{given.heads} heads on {given.key_value_heads}, head dim 64; median of {given.rounds} rounds in turn.",
        "",
        *table(["attention", "forward + backward, ms", "over the operator"], rows),
    ]
    if given.write:
        write("accelerate", given.device, "A GPT-OSS layer on the operator", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
