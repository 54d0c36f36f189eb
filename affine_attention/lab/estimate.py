"""Estimates the cost of a run before it starts: parameters, tokens, floating-point operations and memory.

Conventions, so that the utilisation (MFU) is comparable with other reports:
- FLOPs of one token's forward: two per weight of a matrix product (the LM head counts, tied or not; the embedding is a
  look-up and does not count; of a mixture of experts only the active experts count), and 2 · heads · head dim · T per
  layer for causal attention: two products with T / 2 visible keys on average.
- Training takes three times the forward. The teacher's forward is counted separately. Recomputed activations do not
  count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.pytorch_utils import Conv1D

from ..hf import STUDENTS, attach, is_attached, student
from ..hf.loading import load_config
from ..nn import AttentionMechanism
from .distill.chunks import CHUNK_BYTES
from .models import without_plain_mechanism
from .recipe import Recipe

LARGEST_SIZE = 2**31  # for any size in a student's configuration
MOST_LAYERS = 4096
# Dense bf16 peaks of the vendors' data sheets in FLOP/s; names are matched in this order.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12,
}  # fmt: skip
# The published shapes of checkpoints that recipes name, for estimates without a download.
PUBLISHED: dict[str, PretrainedConfig] = {
    "HuggingFaceTB/SmolLM2-135M": LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "Qwen/Qwen1.5-1.8B": Qwen2Config(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
        intermediate_size=5504, vocab_size=151936, tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.2-3B": LlamaConfig(**STUDENTS["llama-3.2-3b"][1]),
    "meta-llama/Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, tie_word_embeddings=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model; tied weights count once."""

    total: int
    embedding: int  # including the LM head, if it is not tied
    mechanism: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


def count_parameters(model: Any) -> Parameters:
    ends = {id(part.weight): part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    added = {id(p): p for m in model.modules() if isinstance(m, AttentionMechanism) for p in m.parameters()}
    return Parameters(
        sum(p.numel() for p in model.parameters()),
        sum(weight.numel() for weight in ends.values()),
        sum(p.numel() for p in added.values()),
    )


def forward_flops_per_token(model: Any, length: int) -> float:
    """FLOPs of one token in a sequence of `length`, including the LM head; see the conventions of this file."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        share = config.num_experts_per_tok / experts
        weights += share * sum(p.numel() for n, p in model.named_parameters() if "experts" in n and p.dim() == 3)
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * _head_dim(config) * length
    return 2.0 * weights + attention


def training_flops_per_token(model: Any, length: int, teacher: Any = None) -> float:
    """FLOPs of the student's forward and backward, plus the teacher's forward."""
    own = 3 * forward_flops_per_token(model, length)
    return own + (forward_flops_per_token(teacher, length) if teacher is not None else 0.0)


def peak_flops(device: torch.device | str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s; None if it is not known (always for CPUs)."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def make_utilisation(
    model: Any, length: int, device: torch.device | str, ranks: int = 1, teacher: Any = None
) -> Callable[[float], float | None]:
    """A function from tokens per second of all ranks to MFU including the teacher's forward; None without a peak."""
    peak = peak_flops(device)
    if peak is None:
        return lambda tokens_per_second: None
    share = training_flops_per_token(model, length, teacher) / (peak * ranks)
    return lambda tokens_per_second: tokens_per_second * share


def memory_bytes(
    model: Any, recipe: Recipe, ranks: int = 1, teacher: Any = None, device_type: str = "cuda"
) -> dict[str, float]:
    """Peak memory of one device by component, for replicated training (DDP). Activations are accurate to about a third.

    With FSDP2 the first three components are divided by the number of ranks.
    """
    config = model.config.get_text_config()
    parameters = count_parameters(model).total
    half = recipe.dtype == "bfloat16"
    size = 2 if half else 4
    tokens = recipe.micro_batches(ranks)[0] * recipe.sequence_length // recipe.sequence_parallel
    layer = tokens * activation_bytes(config, half)
    layers = config.num_hidden_layers
    kept = tokens * 4 * config.hidden_size * layers + layer if recipe.gradient_checkpointing else layers * layer
    parts = {
        "weights": 4.0 * parameters,
        "gradients": 4.0 * parameters,
        "AdamW": 8.0 * parameters,
        "weights in bf16": 2.0 * parameters if half else 0.0,
        "activations": float(kept),
        "loss": _loss_bytes(config, tokens, size, teacher is not None, device_type),
    }
    if teacher is not None:
        theirs = teacher.config.get_text_config()
        transient = tokens * size * (3 * _feed_forward(theirs) + 4 * theirs.hidden_size)
        parts["teacher"] = float(size * count_parameters(teacher).total + transient)
    return parts


def activation_bytes(config: Any, half: bool) -> int:
    """Bytes per token that one layer of a llama-like decoder stores for its backward."""
    width, inner = config.hidden_size, _feed_forward(config)
    queries = config.num_attention_heads * _head_dim(config)
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * _head_dim(config)
    # Norms store their input and the normalised input, in fp32 under autocast; each matrix product stores its input.
    if half:
        return 16 * width + 2 * (5 * width + 3 * queries + 2 * keys + 4 * inner)
    return 4 * (6 * width + 3 * queries + 2 * keys + 4 * inner)


def _loss_bytes(config: Any, tokens: int, size: int, with_teacher: bool, device_type: str) -> float:
    logits = min(CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]), tokens * config.vocab_size * size)
    head = config.vocab_size * config.hidden_size
    teacher_share = 0.5 if device_type == "cpu" else 1.0  # relative to the student's logits, see chunks.py
    return float(logits * (1 + teacher_share * with_teacher) + 4 * head + 2 * size * tokens * config.hidden_size)


def _ranks_in_words(ranks: int, sequence_parallel: int) -> str:
    if sequence_parallel == 1:
        return f"{ranks} rank{'s' * (ranks > 1)}"
    groups = ranks // sequence_parallel
    return f"{groups} group{'s' * (groups > 1)} of {sequence_parallel} ranks (each holds a part of every sequence)"


def describe_run(recipe: Recipe, ranks: int = 1) -> str:
    """The resolved recipe and its cost as text; nothing is downloaded and no weights are allocated."""
    size, accumulation = recipe.micro_batches(ranks)
    model = meta_student(recipe)
    source = recipe.teacher_source
    teacher = meta_teacher(source) if source is not None else None
    counted = count_parameters(model)
    per_token = training_flops_per_token(model, recipe.sequence_length)
    total = per_token * recipe.tokens
    lines = [f"  {name} = {value!r}" for name, value in recipe.to_dict().items()]
    lines = [f"recipe {recipe.name}", *lines, "cost"]
    lines += [
        f"  parameters: {_short(counted.total)} ({_short(counted.non_embedding)} without embeddings), including "
        f"{counted.mechanism / 1e6:.3f}M of the mechanism",
        f"  tokens: {_short(recipe.tokens)} = {recipe.steps} steps x {recipe.global_batch} sequences x "
        f"{recipe.sequence_length}",
        f"  one step: {_ranks_in_words(ranks, recipe.sequence_parallel)} x {accumulation} "
        f"micro-batch{'es' * (accumulation > 1)} x {size} sequence{'s' * (size > 1)}",
        f"  student: {per_token / 1e9:.3g} GFLOP per token (forward and backward), {total:.3g} FLOP in total",
    ]
    if teacher is not None:
        theirs = forward_flops_per_token(teacher, recipe.sequence_length)
        lines.append(
            f"  teacher: {_short(count_parameters(teacher).total)} parameters, {theirs / 1e9:.3g} GFLOP per token, "
            f"{theirs * recipe.tokens:.3g} FLOP in total"
        )
        total += theirs * recipe.tokens
    elif source is not None:
        lines.append(f"  teacher: {source} is not on this machine, so its cost is not included")
    if recipe.dtype == "bfloat16":
        hours = total / (PEAK_FLOPS["H100"] * 0.4 * ranks) / 3600
        lines.append(f"  time: {hours:.3g} hours on {ranks} H100 or H200 at 40 % of peak (989 TFLOP/s)")
    memory = memory_bytes(model, recipe, ranks, teacher)
    whole = sum(memory.values())
    sharded = whole - (1 - 1 / ranks) * (memory["weights"] + memory["gradients"] + memory["AdamW"])
    parts = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in memory.items() if value)
    lines.append(f"  memory per device, approximately: {whole / 2**30:.2f} GiB ({parts})")
    if ranks > 1:
        lines.append(f"  with FSDP2, which shards weights, gradients and AdamW: {sharded / 2**30:.2f} GiB")
    return "\n".join(lines)


def meta_student(recipe: Recipe) -> Any:
    """The student on the meta device: shapes without weights."""
    if recipe.student in STUDENTS:
        return _meta_student_of_sizes(recipe)
    check_is_fixed(recipe)
    config = _checkpoint_config(recipe.student, "student")
    with torch.device("meta"):
        model = without_plain_mechanism(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        return model if is_attached(model) else attach(model, recipe.mechanism)


def check_is_fixed(recipe: Recipe) -> None:
    """Raises ValueError for changes of a student that starts from a checkpoint."""
    if recipe.student_changes:
        raise ValueError(
            f"student_changes must be empty for a student from a checkpoint, whose configuration is fixed, got "
            f"{recipe.student_changes!r}"
        )


def _checkpoint_config(source: str, what: str) -> Any:
    """The configuration of a checkpoint, from its folder, PUBLISHED or the hub's cache; OSError if it has none."""
    return copy.deepcopy(PUBLISHED[source]) if source in PUBLISHED else load_config(source, what)


def _meta_student_of_sizes(recipe: Recipe) -> Any:
    """Turns constructor errors into one sentence, and rejects absurd sizes before trying them."""
    for key, value in recipe.student_changes.items():
        most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE
        if isinstance(value, int) and abs(value) > most:
            raise ValueError(f"student_changes.{key} must be at most {most:,}, got {str(value)[:40]}")
    try:
        return student(recipe.student, recipe.mechanism, device="meta", **recipe.student_changes)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"student {recipe.student!r} cannot be built with student_changes {str(recipe.student_changes)[:300]}: "
            f"{reason}"
        ) from error


def meta_teacher(source: str) -> Any:
    """The teacher on the meta device, from its folder, the hub's cache or PUBLISHED; None if none of them has it."""
    try:
        config = _checkpoint_config(source, "teacher")
    except OSError:
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _feed_forward(config: Any) -> int:
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _short(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3f}{name}"
    return f"{number:.0f}"
