"""Tiny vision-language models, one for each way in which images reach a text decoder, and batches with an image."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

from affine_attention import Mechanism
from affine_attention.hf import attach

from .models import GPT, SHAPE, mechanisms, spread

IMAGE, START, END, VIDEO = 60, 61, 62, 63  # special tokens of the vocabulary of 64
TEXT = SHAPE | {"num_hidden_layers": 2}
GEMMA = TEXT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
         "patch_size": 4}  # fmt: skip
QWEN_TEXT = {name: value for name, value in TEXT.items() if name != "head_dim"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
QWEN = {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": VIDEO}
PATCHES = {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}
SQUARE = {"pixel_values": (1, 3, 8, 8)}  # one image of 2 x 2 patches: four tokens
FLAT = {"pixel_values": (16, 12)}  # 4 x 4 patches of 3 x 2 x 2 values, merged to four tokens
GRID = {"image_grid_thw": [[1, 4, 4]]}
TYPES = ("token_type_ids",)

# family: (configuration, shapes of images, other inputs, names of inputs that mark image tokens)
MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "llava": (
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER | {"model_type": "clip_vision_model"},
         "vision_feature_layer": -1},
        SQUARE, {}, (),
    ),
    "llava_next": (
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER | {"model_type": "clip_vision_model"},
         "vision_feature_layer": -1, "image_grid_pinpoints": [[8, 8]], "vision_feature_select_strategy": "default"},
        {"pixel_values": (1, 2, 3, 8, 8)}, {"image_sizes": [[8, 8]]}, (),
    ),
    "mistral3": (
        {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None}, "spatial_merge_size": 1,
         "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8}, "vision_feature_layer": -1},
        SQUARE, {"image_sizes": [[8, 8]]}, (),
    ),
    "idefics3": (
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "scale_factor": 1},
        {"pixel_values": (1, 1, 3, 8, 8)}, {}, (),
    ),
    "smolvlm": (
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER, "scale_factor": 1},
        {"pixel_values": (1, 1, 3, 8, 8)}, {}, (),
    ),
    "internvl": (
        {"text_config": QWEN_TEXT | {"model_type": "qwen2", "rope_parameters": None},
         "vision_config": TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}, "downsample_ratio": 0.5},
        {"pixel_values": (1, 3, 16, 16)}, {}, (),
    ),
    "paligemma": (
        {"text_config": TEXT | {"model_type": "gemma"}, "vision_config": TOWER | {"model_type": "siglip_vision_model"},
         "projection_dim": 32},
        SQUARE, {}, TYPES,
    ),
    "gemma3": (
        {"text_config": GEMMA, "vision_config": TOWER, "mm_tokens_per_image": 4, "boi_token_index": START,
         "eoi_token_index": END},
        SQUARE, {}, TYPES,
    ),
    "qwen2_vl": (
        QWEN | {"text_config": QWEN_TEXT, "vision_config": PATCHES | {"depth": 1, "embed_dim": 16, "num_heads": 2,
                "hidden_size": 32, "mlp_ratio": 1}},
        FLAT, GRID, ("mm_token_type_ids",),
    ),
    "qwen2_5_vl": (
        QWEN | {"text_config": QWEN_TEXT, "vision_config": PATCHES | {"depth": 1, "hidden_size": 16, "num_heads": 2,
                "out_hidden_size": 32, "intermediate_size": 16, "window_size": 4, "fullatt_block_indexes": [0]}},
        FLAT, GRID, ("mm_token_type_ids",),
    ),
    "qwen3_vl": (
        QWEN | {"text_config": QWEN_TEXT | {"head_dim": 8}, "vision_config": PATCHES | {"depth": 1, "hidden_size": 16,
                "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0]}},
        FLAT, GRID, ("mm_token_type_ids",),
    ),
}  # fmt: skip
IMAGE_TOKENS = 4
LLAVA_NEXT_TOKENS = 10  # the whole image, and its one tile with a newline token after each row


def plain_multimodal(family: str, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A tiny random model with a vision tower, in evaluation mode."""
    settings = MULTIMODAL[family][0]
    config = transformers.AutoConfig.for_model(
        family, image_token_id=IMAGE, image_token_index=IMAGE, **GPT | {"vocab_size": 64} | settings
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").to(dtype)
    spread(model, 0.3)
    return model.eval()


def multimodal_model(
    family: str, mechanism: Mechanism | str = "affine_gated", dtype: torch.dtype = torch.float32, seed: int = 0
):
    """`plain_multimodal` with a mechanism whose parameters are far from their initial values."""
    model = attach(plain_multimodal(family, dtype, seed), mechanism)
    torch.manual_seed(seed + 1)
    for layer in mechanisms(model):
        spread(layer, 1.0)
        if layer.scale is not None and layer.mechanism.bias:
            layer.scale.running_alpha.uniform_(0.1, 0.9)
    return model


def image_batch(family: str, dtype: torch.dtype = torch.float32, length: int = 12, pad: int = 0) -> dict[str, Any]:
    """One row of text with one image in it, and `pad` padding tokens before it."""
    _, images, others, _ = MULTIMODAL[family]
    generator = torch.Generator().manual_seed(3)
    count = LLAVA_NEXT_TOKENS if family == "llava_next" else IMAGE_TOKENS
    text = torch.randint(1, IMAGE, (length,), generator=generator).tolist()
    row = text[:3] + [START] + [IMAGE] * count + [END] + text[3:]
    ids = torch.tensor([[0] * pad + row])
    batch: dict[str, Any] = {"input_ids": ids}
    if pad:
        batch["attention_mask"] = torch.tensor([[0] * pad + [1] * len(row)])
    for name, shape in images.items():
        batch[name] = torch.randn(shape, generator=generator).to(dtype)
    for name, value in others.items():
        batch[name] = torch.tensor(value)
    return batch | token_types(family, ids, ids.shape[1])


def token_types(family: str, ids: torch.Tensor, prompt: int) -> dict[str, torch.Tensor]:
    """The inputs that mark tokens: image tokens are 1; in paligemma everything after the prompt is."""
    marks = (ids == IMAGE).long()
    if family == "paligemma":
        marks = (torch.arange(ids.shape[1])[None] >= prompt).long()
    return dict.fromkeys(MULTIMODAL[family][3], marks)
