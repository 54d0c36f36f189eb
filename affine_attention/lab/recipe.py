"""Recipe: every setting of a run, validated, with conversion to and from JSON."""

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
from pathlib import Path
from typing import Any, Literal

from ..messages import did_you_mean, shown
from ..nn import Mechanism
from ..nn.mechanism import as_mechanism
from .names import check_name

BESIDE = "beside:"  # prefix of a student or teacher path that is relative to the run folder
ORIGINAL = "original"  # as a teacher: the checkpoint that the student starts from
MOST_CHANGES = 200  # settings of a student's configuration
MOST_FILES = 100_000  # sources of data
LARGEST_COUNT = 2**40  # larger steps, batches and lengths are assumed to be typing errors


def _setting(default: Any, help: str) -> Any:
    """A field with its help text for the command line and the docs."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Recipe:
    """Every setting of a run. `with_settings` changes some; `to_dict` and `from_dict` convert to and from JSON."""

    name: str = _setting("run", "name of the recipe in tables")
    mechanism: Mechanism = field(
        default_factory=Mechanism, metadata={"help": "the attention mechanism: a preset's name or its settings"}
    )

    student: str = _setting("llama-1m", "a student of hf.STUDENTS, or a checkpoint to start from: a folder or hub name")
    student_changes: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "changed settings of the student's configuration"}
    )
    teacher: str | None = _setting(
        None, "folder or hub name; original: the checkpoint that the student starts from; none: plain cross-entropy"
    )
    remember_teacher: bool = _setting(False, "cache the teacher's hidden states on disk, once for all students")

    data: tuple[str, ...] = _setting((), "text, jsonl or parquet files, folders, globs, or hf:NAME[:CONFIG][@SPLIT]")
    heldout: float | tuple[str, ...] = _setting(0.01, "share of documents never trained on, or files held out")
    text_column: str = _setting("text", "text column of jsonl, parquet and datasets")
    streaming: bool = _setting(False, "stream the data instead of tokenizing it to disk first")
    tokenizer: str | None = _setting(
        None, "name, folder or tokenizer.json; none: that of the student's checkpoint, the teacher's, or a new BPE"
    )
    vocabulary_size: int = _setting(2048, "size of the BPE that is trained on the data")
    sequence_length: int = _setting(256, "tokens per sequence")
    document_boundaries: bool = _setting(False, "restrict attention to within a document")
    special_tokens: bool = _setting(False, "parse <|endoftext|> and similar text as special tokens")

    kd_weight: float = _setting(1.0, "weight of the distillation loss, with a teacher")
    ce_weight: float = _setting(0.0, "weight of the cross-entropy loss, with a teacher")
    temperature: float = _setting(1.0, "temperature of both distributions in the distillation loss")
    divergence: Literal["forward_kl", "soft_cross_entropy"] = _setting("forward_kl", "the distillation loss")
    truncate_vocabulary: bool = _setting(False, "truncate a padded vocabulary to the size of the smaller one")

    sink_pressure: Literal["first_key", "window"] | None = _setting(
        None, "evict keys from the student in some steps: the first key, or all keys outside of a window; none: never"
    )
    pressure_share: float = _setting(0.5, "share of the steps with evicted keys, with sink_pressure")
    pressure_after: int = _setting(
        16, "tokens that see the first key before it is evicted, with sink_pressure=first_key"
    )
    pressure_window: int = _setting(128, "visible keys in these steps, with sink_pressure=window")

    steps: int = _setting(200, "optimizer steps")
    global_batch: int = _setting(16, "sequences per optimizer step, over all devices and micro-batches")
    device_batch: int | None = _setting(None, "sequences per micro-batch and device; none: no accumulation")
    learning_rate: float = _setting(1e-3, "learning rate of the stable phase")
    warmup_steps: int = _setting(100, "steps of linear warm-up")
    decay_steps: int = _setting(0, "steps of the final decay")
    decay_type: Literal["linear", "cosine", "1-sqrt"] = _setting("linear", "shape of the decay")
    min_lr_ratio: float = _setting(0.0, "learning rate at both ends, relative to learning_rate")
    weight_decay: float = _setting(0.1, "AdamW's weight decay (not applied to norms and biases)")
    beta1: float = _setting(0.9, "AdamW's first momentum")
    beta2: float = _setting(0.95, "AdamW's second momentum")
    max_grad_norm: float = _setting(1.0, "gradient clipping norm; 0: no clipping")
    seed: int = _setting(0, "initial weights of the student, and dropout")
    data_seed: int = _setting(0, "order of the data")

    dtype: Literal["float32", "bfloat16"] = _setting("float32", "dtype of the computation; the weights are float32")
    gradient_checkpointing: bool = _setting(False, "recompute activations in backward: less memory, more time")
    compile: bool = _setting(False, "torch.compile, layer by layer")
    sequence_parallel: int = _setting(1, "ranks that share each sequence (Ulysses), for long sequences")
    save_every: int = _setting(100, "steps between checkpoints; 0: only the last")
    keep_checkpoints: int = _setting(2, "number of checkpoints to keep")
    probe_every: int = _setting(10, "steps between probes of attention logits, alphas and gates; 0: never")
    eval_every: int = _setting(0, "steps between evaluations on held-out text; 0: only at the end")

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
        """Rejects empty names (an unset shell variable) and names that lead out of the runs folder."""
        check_name("name", self.name)
        for name in ("student", "teacher", "tokenizer", "text_column"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ValueError(f"{name} must not be an empty string; is a variable unset?")
        for name in ("data", "heldout"):
            value = getattr(self, name)
            if isinstance(value, tuple) and not all(entry.strip() for entry in value):
                raise ValueError(f"{name} must not contain an empty string; is a variable unset?")
            if isinstance(value, tuple) and len(value) > MOST_FILES:
                raise ValueError(f"{name} must name at most {MOST_FILES:,} sources, got {len(value):,}; name folders")
        if len(self.student_changes) > MOST_CHANGES:
            raise ValueError(
                f"student_changes must have at most {MOST_CHANGES} settings, got {len(self.student_changes):,}"
            )

    def _check_ranges(self) -> None:
        for name in ("steps", "global_batch", "sequence_length", "keep_checkpoints", "sequence_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {shown(getattr(self, name))}")
            if getattr(self, name) > LARGEST_COUNT:
                raise ValueError(f"{name} must be at most {LARGEST_COUNT:,}, got {shown(getattr(self, name))}")
        for name in ("warmup_steps", "decay_steps", "save_every", "probe_every", "eval_every", "seed", "data_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {shown(getattr(self, name))}")
            if getattr(self, name) >= 2**63:
                raise ValueError(f"{name} must be below 2^63, got {shown(getattr(self, name))}")
        for name in ("kd_weight", "ce_weight", "min_lr_ratio", "weight_decay", "max_grad_norm"):
            _check_interval(name, getattr(self, name), 0.0, math.inf)
        _check_interval("pressure_share", self.pressure_share, 0.0, 1.0)
        for name, kind in (("pressure_after", "first_key"), ("pressure_window", "window")):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {shown(getattr(self, name))}")
            if self.sink_pressure == kind and getattr(self, name) >= self.sequence_length:
                raise ValueError(
                    f"{name} must be below sequence_length = {self.sequence_length}, or no key is hidden, got "
                    f"{shown(getattr(self, name))}"
                )
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
            raise ValueError("kd_weight and ce_weight are both 0, so nothing would be learned; set one of them above 0")
        if self.remember_teacher and self.streaming:
            raise ValueError("remember_teacher=true cannot be combined with streaming=true; set one of them to false")
        if self.sequence_parallel > 1:
            self._check_sequence_parallel()
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps + decay_steps must fit into steps = {self.steps}, got {self.warmup_steps} + "
                f"{self.decay_steps}"
            )

    def _check_sequence_parallel(self) -> None:
        size = self.sequence_parallel
        if self.sequence_length % size:
            raise ValueError(
                f"sequence_length must be a multiple of sequence_parallel = {size}, got {self.sequence_length}; each "
                f"rank holds an equal part: set sequence_length={-(-self.sequence_length // size) * size}"
            )
        for name, off in (("compile", False), ("streaming", False), ("sink_pressure", None)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} cannot be combined with sequence_parallel={size}: it works on "
                    f"whole sequences; set {name}={str(off).lower()}, or sequence_parallel=1"
                )

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """A copy with changed settings; `mechanism.KEY` and `student_changes.KEY` change nested settings."""
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
                raise ValueError(f"{outer} has no nested settings, got {key!r}; write {outer}=VALUE")
        return dataclasses.replace(self, **changed)

    @property
    def tokens(self) -> int:
        """Training tokens of the run."""
        return self.steps * self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    def micro_batches(self, ranks: int) -> tuple[int, int]:
        """(sequences per micro-batch, accumulation steps); the error lists values that divide evenly."""
        if ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {ranks}")
        if ranks % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel = {self.sequence_parallel} needs a multiple of {self.sequence_parallel} ranks, got "
                f"{ranks}; start them with torchrun --nproc-per-node {self.sequence_parallel}"
            )
        ranks //= self.sequence_parallel  # the ranks of a sequence group work on the same batch
        if self.global_batch % ranks:
            fitting = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            raise ValueError(
                f"global_batch = {self.global_batch} is not divisible by {ranks} ranks; use {_few(fitting)} ranks, or "
                f"set global_batch={-(-self.global_batch // ranks) * ranks}"
            )
        share = self.global_batch // ranks
        size = self.device_batch or share
        if share % size:
            fitting = [n for n in range(1, share + 1) if share % n == 0]
            raise ValueError(
                f"global_batch = device_batch x accumulation x ranks, but {self.global_batch} / ({size} x {ranks}) is "
                f"not an integer; with {ranks} rank{'s' * (ranks > 1)}, device_batch can be {_few(fitting)}"
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

    @property
    def teacher_source(self) -> str | None:
        """The folder or hub name of the teacher: for `original`, that of the student's checkpoint."""
        return self.student if self.teacher == ORIGINAL else self.teacher

    def located(self, run: Path) -> Recipe:
        """The recipe with the real places of student and teacher.

        Paths that are relative to the run folder (`beside:../teacher`) become absolute, and the teacher `original`
        becomes the checkpoint of the student.
        """

        def place(source: str) -> str:
            if not source.startswith(BESIDE):
                return source
            return os.path.normpath(run.absolute() / source[len(BESIDE) :])

        teacher = self.teacher_source
        return dataclasses.replace(
            self, student=place(self.student), teacher=None if teacher is None else place(teacher)
        )

    def digest(self) -> str:
        """A hash of the settings that differ from the defaults, so that runs stay valid when settings are added."""
        usual = Recipe().to_dict()
        changed = {key: value for key, value in self.to_dict().items() if value != usual[key]}
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Recipe) -> list[str]:
        """The settings that differ in `other`, one line each: `learning_rate: 0.001 -> 0.002`."""
        mine, theirs = self.to_dict(), other.to_dict()
        lines = []
        for key, value in mine.items():
            if key == "mechanism":
                inner = theirs[key]
                keys = dict.fromkeys((*value, *inner))  # a setting at its default may be left out
                pairs = [(k, value.get(k), inner.get(k)) for k in keys]
                lines += [f"mechanism.{k}: {before!r} -> {after!r}" for k, before, after in pairs if before != after]
            elif theirs[key] != value:
                lines.append(f"{key}: {value!r} -> {theirs[key]!r}")
        return lines


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses `key=value`; the value is parsed as JSON if possible, else it is text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"a setting is written key=value, got {text!r}")
    if value in ("None", "none"):
        return key, None
    if value in ("True", "False"):
        return key, value == "True"
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # also numbers with too many digits and too deep nesting
        return key, value


def setting_help() -> dict[str, str]:
    """The help text of each setting."""
    return {item.name: item.metadata["help"] for item in dataclasses.fields(Recipe)}


def _check_name(name: str) -> None:
    known = [item.name for item in dataclasses.fields(Recipe)]
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"a recipe has no setting {shown(name)}{hint}; it has {', '.join(known)}")


def _check_interval(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number from {low:g} to {high:g}, got {value}")


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Checks a value against its field's type; converts lists to tuples and integers to floats as the type requires."""
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
                raise ValueError(f"{name} must be at most 1e300 in size, got {shown(value)}")
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
    raise ValueError(f"{name} must be {rule}, got {shown(value)}{did_you_mean(value, choices)}")


def _in_words(kind: Any) -> str:
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "none"}
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if origin is tuple:
        return "a list of strings"
    return "a table of settings" if origin is dict else words[kind]


def _few(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 8 else [*numbers[:4], "...", *numbers[-3:]]
    return ", ".join(map(str, shown))
