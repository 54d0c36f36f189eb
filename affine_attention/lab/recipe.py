"""Names a run: every setting from the data to the last step, checked, and to and from JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ..nn import Mechanism
from ..nn.mechanism import as_mechanism
from .names import check_name

BESIDE = "beside:"  # before a teacher's path that is relative to the run's folder
MOST_CHANGES = 200  # settings of a student's configuration
MOST_FILES = 100_000  # names of data
LARGEST_COUNT = 2**40  # steps, batches and lengths beyond it are typing errors


def _setting(default: Any, help: str) -> Any:
    """A field with the one text that the command line and the docs show for it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Recipe:
    """Every setting of a run. `with_settings` changes some, `to_dict` and `from_dict` go to JSON and back."""

    name: str = _setting("run", "what tables call the recipe")
    mechanism: Mechanism = field(
        default_factory=Mechanism, metadata={"help": "the attention mechanism: a preset's name or its settings"}
    )

    student: str = _setting("llama-1m", "a student of hf.STUDENTS, or the folder of a checkpoint to go on from")
    student_changes: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "settings of the student's configuration that differ"}
    )
    teacher: str | None = _setting(None, "folder or hub name of the teacher; none: plain cross-entropy")
    remember_teacher: bool = _setting(False, "run the teacher once over the data, for all students; needs disk")

    data: tuple[str, ...] = _setting((), "text, jsonl or parquet files, folders, globs, or hf:NAME[:CONFIG][@SPLIT]")
    heldout: float | tuple[str, ...] = _setting(0.01, "share of documents never trained on, or files held out")
    text_column: str = _setting("text", "column that holds the text in jsonl, parquet and datasets")
    streaming: bool = _setting(False, "read the data as a stream, without a copy of its tokens on disk")
    tokenizer: str | None = _setting(None, "name, folder or tokenizer.json; none: the teacher's, or a BPE of the data")
    vocabulary_size: int = _setting(2048, "size of the BPE when one is trained on the data")
    sequence_length: int = _setting(256, "tokens in a sequence")
    document_boundaries: bool = _setting(False, "attention stays within a document")
    special_tokens: bool = _setting(False, "the text <|endoftext|> and its like are tokens, not text")

    kd_weight: float = _setting(1.0, "weight of the distillation loss, when there is a teacher")
    ce_weight: float = _setting(0.0, "weight of the cross-entropy to the text, when there is a teacher")
    temperature: float = _setting(1.0, "temperature of both distributions in the distillation loss")
    divergence: Literal["forward_kl", "soft_cross_entropy"] = _setting("forward_kl", "what is minimised")
    truncate_vocabulary: bool = _setting(False, "cut a teacher's longer padded vocabulary to the student's")

    steps: int = _setting(200, "optimizer steps")
    global_batch: int = _setting(16, "sequences in one optimizer step, over all devices and micro-batches")
    device_batch: int | None = _setting(None, "sequences in one micro-batch of one device; none: all of its share")
    learning_rate: float = _setting(1e-3, "the rate of the stable phase")
    warmup_steps: int = _setting(100, "steps of linear warm-up")
    decay_steps: int = _setting(0, "steps of the decay at the end")
    decay_type: Literal["linear", "cosine", "1-sqrt"] = _setting("linear", "shape of the decay")
    min_lr_ratio: float = _setting(0.0, "the rate at both ends, as a part of the stable one")
    weight_decay: float = _setting(0.1, "AdamW's weight decay (norms and biases have none)")
    beta1: float = _setting(0.9, "AdamW's first momentum")
    beta2: float = _setting(0.95, "AdamW's second momentum")
    max_grad_norm: float = _setting(1.0, "gradients are clipped to this norm; 0: never")
    seed: int = _setting(0, "initial weights of the student, and dropout")
    data_seed: int = _setting(0, "order of the data")

    dtype: Literal["float32", "bfloat16"] = _setting("float32", "computation; the weights stay float32")
    gradient_checkpointing: bool = _setting(False, "recompute activations in backward: less memory, more time")
    compile: bool = _setting(False, "torch.compile, layer by layer")
    save_every: int = _setting(100, "steps between checkpoints; 0: only the last")
    keep_checkpoints: int = _setting(2, "how many of the newest stay")
    probe_every: int = _setting(10, "steps between looks at the attention logits and gates; 0: never")
    eval_every: int = _setting(0, "steps between losses on held-out text; 0: only at the end")

    def __post_init__(self) -> None:
        object.__setattr__(self, "mechanism", as_mechanism(self.mechanism))
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            if item.name != "mechanism":
                value = _convert(item.name, getattr(self, item.name), hints[item.name])
                object.__setattr__(self, item.name, value)
        self._check_names()
        self._check_ranges()

    def _check_names(self) -> None:
        """No name is empty (an unset variable of a shell) and none leads out of the folder of the runs."""
        check_name("name", self.name)
        for name in ("student", "teacher", "tokenizer", "text_column"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ValueError(f"{name} must be named, got an empty text; is a variable unset?")
        for name in ("data", "heldout"):
            value = getattr(self, name)
            if isinstance(value, tuple) and not all(entry.strip() for entry in value):
                raise ValueError(f"{name} must name files, got an empty text among them; is a variable unset?")
            if isinstance(value, tuple) and len(value) > MOST_FILES:
                raise ValueError(f"{name} must name at most {MOST_FILES:,} sources, got {len(value):,}; name folders")
        if len(self.student_changes) > MOST_CHANGES:
            raise ValueError(
                f"student_changes must be at most {MOST_CHANGES} settings, got {len(self.student_changes):,}"
            )

    def _check_ranges(self) -> None:
        for name in ("steps", "global_batch", "sequence_length", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {_shown(getattr(self, name))}")
            if getattr(self, name) > LARGEST_COUNT:
                raise ValueError(f"{name} must be at most {LARGEST_COUNT:,}, got {_shown(getattr(self, name))}")
        for name in ("warmup_steps", "decay_steps", "save_every", "probe_every", "eval_every", "seed", "data_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {_shown(getattr(self, name))}")
            if getattr(self, name) >= 2**63:
                raise ValueError(f"{name} must be below 2^63, got {_shown(getattr(self, name))}")
        for name in ("kd_weight", "ce_weight", "min_lr_ratio", "weight_decay", "max_grad_norm"):
            _check_interval(name, getattr(self, name), 0.0, math.inf)
        for name in ("learning_rate", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if isinstance(self.heldout, float):
            _check_interval("heldout", self.heldout, 0.0, 0.5)
        if self.device_batch is not None and self.device_batch < 1:
            raise ValueError(f"device_batch must be at least 1, got {self.device_batch}")
        if self.teacher is not None and self.kd_weight == 0 and self.ce_weight == 0:
            raise ValueError("kd_weight and ce_weight are both 0, so there is nothing to learn; raise one of them")
        if self.remember_teacher and self.streaming:
            raise ValueError(
                "remember_teacher=true needs data that is read whole, got streaming=true; set one of them to false"
            )
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps + decay_steps must fit into steps = {self.steps}, got {self.warmup_steps} + "
                f"{self.decay_steps}"
            )

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """A copy with some settings changed; `mechanism.momentum` and `student_changes.vocab_size` reach inside."""
        changed: dict[str, Any] = {}
        for key, value in settings.items():
            outer, _, inner = key.partition(".")
            _check_name(outer)
            if not inner:
                changed[outer] = value
            elif outer == "mechanism":
                mechanism = as_mechanism(changed.get(outer, self.mechanism))
                changed[outer] = Mechanism.from_dict(mechanism.to_dict() | {inner: value})
            elif outer == "student_changes":
                changed[outer] = {**changed.get(outer, self.student_changes), inner: value}
            else:
                raise ValueError(f"{outer} has no settings inside it, got {key!r}; write {outer}=VALUE")
        return dataclasses.replace(self, **changed)

    @property
    def tokens(self) -> int:
        """Tokens that the run sees."""
        return self.steps * self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    def micro_batches(self, ranks: int) -> tuple[int, int]:
        """(sequences per device, accumulation steps) on so many ranks; an error with the right numbers otherwise."""
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        if self.global_batch % ranks:
            fitting = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            raise ValueError(
                f"global_batch = {self.global_batch} cannot be shared evenly by {ranks} ranks; it can by "
                f"{_few(fitting)}, or set global_batch={-(-self.global_batch // ranks) * ranks}"
            )
        share = self.global_batch // ranks
        size = self.device_batch or share
        if share % size:
            fitting = [n for n in range(1, share + 1) if share % n == 0]
            raise ValueError(
                f"global_batch = device_batch x accumulation x ranks, but {self.global_batch} / ({size} x {ranks}) is "
                f"not whole; with {ranks} rank{'s' * (ranks > 1)}, device_batch can be {_few(fitting)}"
            )
        return size, share // size

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return values | {
            "mechanism": self.mechanism.to_dict(),
            "data": list(self.data),
            "heldout": self.heldout if isinstance(self.heldout, float) else list(self.heldout),
            "student_changes": dict(self.student_changes),
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Recipe:
        for key in settings:
            _check_name(key)
        values = dict(settings)
        if isinstance(values.get("mechanism"), Mapping):
            values["mechanism"] = Mechanism.from_dict(dict(values["mechanism"]))
        return cls(**values)

    def located(self, run: Path) -> Recipe:
        """The recipe with a teacher that is named relative to the run's folder (`beside:../teacher`) as a path."""
        if self.teacher is None or not self.teacher.startswith(BESIDE):
            return self
        return dataclasses.replace(self, teacher=os.path.normpath(run.absolute() / self.teacher[len(BESIDE) :]))

    def digest(self) -> str:
        """Equal for equal settings, however they were written. Defaults do not enter, so that a later version with
        more settings still knows its runs."""
        usual = Recipe().to_dict()
        changed = {key: value for key, value in self.to_dict().items() if value != usual[key]}
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Recipe) -> list[str]:
        """What other changes, one line a setting: `learning_rate: 0.001 -> 0.002`."""
        mine, theirs = self.to_dict(), other.to_dict()
        lines = []
        for key, value in mine.items():
            if key == "mechanism":
                inner = theirs[key]
                lines += [f"mechanism.{k}: {v!r} -> {inner[k]!r}" for k, v in value.items() if inner[k] != v]
            elif theirs[key] != value:
                lines.append(f"{key}: {value!r} -> {theirs[key]!r}")
        return lines


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` of a command line; the value is JSON where it reads as JSON, else text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"a setting is written key=value, got {text!r}")
    if value in ("None", "none"):
        return key, None
    if value in ("True", "False"):
        return key, value == "True"
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # a number of too many digits, brackets nested too deeply
        return key, value


def setting_help() -> dict[str, str]:
    """The one text of each setting, for help and docs."""
    return {item.name: item.metadata["help"] for item in dataclasses.fields(Recipe)}


def _check_name(name: str) -> None:
    known = [item.name for item in dataclasses.fields(Recipe)]
    if name not in known:
        near = get_close_matches(name[:100], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"a recipe has no setting {_shown(name)}{hint}; it has {', '.join(known)}")


def _check_interval(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number from {low:g} to {high:g}, got {value}")


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Checks a value against its field's type; lists become tuples and whole numbers floats where those are asked."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for kind in kinds:
        origin = typing.get_origin(kind)
        if kind is type(None) and value is None:
            return None
        if origin is Literal and value in typing.get_args(kind):
            return value
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) > 1e300:
                raise ValueError(f"{name} must be a number of ordinary size, got {_shown(value)}")
            return float(value)
        if kind is str and isinstance(value, str):
            return value
        if origin is dict and isinstance(value, Mapping):
            return dict(value)
        if origin is tuple and isinstance(value, str):
            return (value,)
        if origin is tuple and isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
            return tuple(value)
    rule = " or ".join(_in_words(kind) for kind in kinds)
    choices = [str(choice) for kind in kinds for choice in typing.get_args(kind)]
    near = get_close_matches(value[:100], choices, n=1) if isinstance(value, str) else []
    hint_text = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be {rule}, got {_shown(value)}{hint_text}")


def _in_words(kind: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if origin is tuple:
        return "a list of texts"
    return "a table of settings" if origin is dict else words[kind]


def _shown(value: Any) -> str:
    """A value in an error, cut where it is too long; an integer of thousands of digits has no text at all."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a number of about 2^{value.bit_length()}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text):,} characters)"


def _few(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 8 else [*numbers[:4], "...", *numbers[-3:]]
    return ", ".join(map(str, shown))
