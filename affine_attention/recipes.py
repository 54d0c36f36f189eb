"""Recipes as functions of the mechanism: the paper's three, smaller ones, and conversions of pretrained models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .lab.recipe import BESIDE, ORIGINAL, Recipe
from .messages import did_you_mean
from .nn import Mechanism
from .nn.mechanism import as_mechanism

EMBEDDED_TEXT = "embedded:gutenberg"  # children's prose, included in the package
STUDY_TEACHER = f"{BESIDE}../teacher/model"  # the model that a study trains first, relative to the folder of a run


def paper_0_5b(mechanism: Mechanism | str = "affine") -> Recipe:
    """The paper's 0.5B student."""
    return _paper(
        mechanism,
        name="paper_0_5b",
        student="qwen1.5-0.5b",  # "the same architecture as Qwen1.5-0.5B" (B.1)
        teacher="Qwen/Qwen1.5-1.8B",  # "The 0.5B student is distilled from Qwen1.5-1.8B" (5.1)
        device_batch=16,
    )


def paper_1b(mechanism: Mechanism | str = "affine") -> Recipe:
    """The paper's 1B student."""
    return _paper(
        mechanism,
        name="paper_1b",
        student="llama-3.2-1b",  # "the same architecture as ... LLaMA3.2-1B" (B.1)
        teacher="meta-llama/Llama-3.2-3B",  # "the 1B and 3B students are distilled from LLaMA3.2-3B and ..." (5.1)
        device_batch=8,
    )


def paper_3b(mechanism: Mechanism | str = "affine") -> Recipe:
    """The paper's 3B student."""
    return _paper(
        mechanism,
        name="paper_3b",
        student="llama-3.2-3b",  # "the same architecture as ... LLaMA3.2-3B" (B.1)
        # "... and LLaMA3.3-8B, respectively" (5.1). No such model exists; Llama 3.1 8B has the same vocabulary.
        teacher="meta-llama/Llama-3.1-8B",
        device_batch=4,
        gradient_checkpointing=True,
    )


def small_gpu(mechanism: Mechanism | str = "affine") -> Recipe:
    """30M parameters, minutes on one GPU; set your own data and teacher."""
    return _build(
        mechanism,
        name="small_gpu",
        student="llama-30m",
        student_changes={"vocab_size": 8192},
        data=(EMBEDDED_TEXT,),
        vocabulary_size=8192,
        sequence_length=1024,
        global_batch=64,
        steps=600,
        warmup_steps=60,  # a tenth of the run; the paper's 100 steps would be a sixth
        decay_steps=120,
        learning_rate=1e-3,  # the best of 1e-3, 2e-3 and 4e-3 for softmax and for affine (docs/study.md)
        weight_decay=0.1,
        dtype="bfloat16",
        save_every=200,
        probe_every=20,
    )


def tiny_cpu(mechanism: Mechanism | str = "affine") -> Recipe:
    """One million parameters, one or two minutes on two cores, with the embedded text."""
    return _build(
        mechanism,
        name="tiny_cpu",
        student="llama-1m",
        data=(EMBEDDED_TEXT,),
        heldout=0.05,  # the text is small: 1 % of the documents would be a page
        vocabulary_size=2048,
        sequence_length=128,
        global_batch=16,
        steps=300,
        warmup_steps=30,
        decay_steps=60,
        learning_rate=2e-3,  # small models need a higher rate; the paper's students are 500 times larger
        weight_decay=0.1,
        save_every=100,
        probe_every=10,
    )


def convert_gpu(mechanism: Mechanism | str = "affine") -> Recipe:
    """A pretrained model goes on training with a mechanism, distilled from its original; set student and data."""
    return _convert(
        mechanism,
        name="convert_gpu",
        student="HuggingFaceTB/SmolLM2-135M",
        sequence_length=1024,
        global_batch=64,
        device_batch=16,
        steps=580,  # 38M tokens
        warmup_steps=58,
        decay_steps=116,
        learning_rate=3e-4,  # below the rate of a start from random weights, which would undo the pretraining
        dtype="bfloat16",
        save_every=200,
        probe_every=20,
        pressure_window=128,
    )


def convert_cpu(mechanism: Mechanism | str = "affine") -> Recipe:
    """The same in a minute on two cores: `affine study` trains a tiny softmax model first and converts it."""
    return _convert(
        mechanism,
        name="convert_cpu",
        student=STUDY_TEACHER,
        heldout=0.05,
        sequence_length=128,
        global_batch=16,
        steps=100,
        warmup_steps=10,
        decay_steps=20,
        learning_rate=1e-3,
        save_every=50,
        probe_every=10,
        pressure_window=32,
    )


def tiny_teacher() -> Recipe:
    """The default teacher of `tiny_cpu`: softmax, twice as wide, trained with plain cross-entropy."""
    return dataclasses.replace(
        tiny_cpu("softmax"),
        name="tiny_teacher",
        student_changes={
            "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2,
            "head_dim": 32,
        },
        steps=400,
        warmup_steps=40,
        decay_steps=80,
        probe_every=0,
    )  # fmt: skip


def small_teacher() -> Recipe:
    """The default teacher of `small_gpu`."""
    return dataclasses.replace(
        small_gpu("softmax"), name="small_teacher", student="llama-100m", device_batch=32, probe_every=0
    )


# The models that a study trains first: the teacher if none is given, and the checkpoint that `convert_cpu` converts.
TEACHERS: dict[str, Callable[[], Recipe]] = {
    "tiny_cpu": tiny_teacher,
    "small_gpu": small_teacher,
    "convert_cpu": tiny_teacher,
}

RECIPES: dict[str, Callable[[Mechanism | str], Recipe]] = {
    function.__name__: function
    for function in (tiny_cpu, small_gpu, convert_cpu, convert_gpu, paper_0_5b, paper_1b, paper_3b)
}


def recipe(name: str, mechanism: Mechanism | str = "affine", settings: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by name, with changed settings.

    By default N of Eq. 8 is the training length: changing `sequence_length` also changes `mechanism.bias_length`.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}{did_you_mean(name, RECIPES)}")
    changed = RECIPES[name](mechanism).with_settings(settings or {})
    explicit = isinstance(mechanism, Mechanism) or {"mechanism.bias_length", "mechanism"} & set(settings or {})
    return changed if explicit else with_training_length(changed)


def with_training_length(recipe: Recipe) -> Recipe:
    """The recipe with N of Eq. 8 set to its sequence length; a preset whose N is a word ("visible") keeps it."""
    if isinstance(recipe.mechanism.bias_length, str):
        return recipe
    mechanism = dataclasses.replace(recipe.mechanism, bias_length=recipe.sequence_length)
    return dataclasses.replace(recipe, mechanism=mechanism)


def _paper(mechanism: Mechanism | str, **settings: Any) -> Recipe:
    """The settings that the paper's recipes share. Momentum 0.9 (5.1) is the default of the mechanism."""
    return _build(
        mechanism,
        data=("hf:HuggingFaceFW/fineweb-edu:sample-100BT@train",),  # "the 20B-token FineWebEdu dataset" (5.1)
        streaming=True,
        heldout=0.0001,  # not in the paper; a few thousand documents for the held-out loss and the logits of Fig. 2
        sequence_length=2048,  # "We fix the sequence length to 2048" (5.1)
        global_batch=1024,  # "use a global batch size of 1024" (5.1)
        steps=9000,  # "1 epoch of total 9000 steps" (B.1)
        learning_rate=1e-3,  # "select 1e-3 for all experiments" (5.1)
        weight_decay=0.1,  # "weight decay of 0.1" (B.1)
        warmup_steps=100,  # "the warmup-stable-decay learning rate scheduler with 100 warmup steps" (B.1)
        decay_steps=900,  # not in the paper; a tenth of the run is usual
        kd_weight=1.0,  # "knowledge distillation(KD) loss" (B.2); no other term is named
        ce_weight=0.0,
        dtype="bfloat16",  # not in the paper
        save_every=500,
        probe_every=50,
        **settings,
    )


def _convert(mechanism: Mechanism | str, **settings: Any) -> Recipe:
    """The settings that recipes share which start from a checkpoint: `attach` keeps its outputs where it can."""
    return _build(mechanism, teacher=ORIGINAL, data=(EMBEDDED_TEXT,), weight_decay=0.1, **settings)


def _build(mechanism: Mechanism | str, **settings: Any) -> Recipe:
    named = isinstance(mechanism, str)
    built = Recipe(mechanism=as_mechanism(mechanism), **settings)
    return with_training_length(built) if named else built
