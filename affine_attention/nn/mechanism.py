"""Defines mechanisms: which of alpha, beta, sink and gate they have, and the settings saved in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from ..ops.validation import check_flag, shown
from .arguments import check_sizes

ACTIVATIONS = ("linear_clipping", "sigmoid")
SINKS = ("zero", "learned")
BIAS_LENGTH_WORDS = ("visible", "keys")
PAPER_TRAINING_LENGTH = 2048
MAX_BIAS_LENGTH = 2**31 - 1
LARGEST = 3.4e38  # largest initial value of a parameter, finite in fp32


@dataclass(frozen=True)
class Mechanism:
    """The settings of one attention mechanism.

    >>> Mechanism.named("affine").bias_length
    2048
    >>> Mechanism.named("affine", activation="sigmoid", bias_length=4096).activation
    'sigmoid'

    Attributes:
        name: its name in tables and checkpoints.
        activation: phi of alpha = phi(W_a x): "linear_clipping" (the paper), "sigmoid", or None for no alpha.
        bias: True for beta = (running_alpha - alpha) / N (Eq. 8).
        sink: "learned" (one logit per head), "zero" (off by one), or None.
        gate: True for an output gate sigmoid(W_g x) per head and channel.
        bias_length: N of Eq. 8. An integer L means max(L, visible keys), which is the paper's N if L is the training
            length; "visible" means the visible keys of the query; "keys" means the keys of the call (for comparison
            only, since it cannot generate).
        momentum: rho of the running average (Eq. 9).
        running_alpha_start: initial value of the running average (the paper: 0).
        init_std: standard deviation of the initial W_a and W_g.
        sink_start: initial value of the learned sink.
    """

    name: str = "softmax"
    activation: Literal["linear_clipping", "sigmoid"] | None = None
    bias: bool = False
    sink: Literal["zero", "learned"] | None = None
    gate: bool = False
    bias_length: int | Literal["visible", "keys"] = PAPER_TRAINING_LENGTH
    momentum: float = 0.9
    running_alpha_start: float = 0.0
    init_std: float = 0.02
    sink_start: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string, got {shown(self.name)}")
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("sink", self.sink, SINKS)
        for flag in ("bias", "gate"):
            check_flag(flag, getattr(self, flag))
        if self.bias and self.activation is None:
            raise ValueError(
                "bias=True needs an alpha, since beta = (running_alpha - alpha) / N, got activation=None; "
                'set activation="linear_clipping" or bias=False'
            )
        _check_bias_length(self.bias_length)
        _check_number("momentum", self.momentum, 0.0, 1.0)
        _check_number("running_alpha_start", self.running_alpha_start, 0.0, 1.0)
        _check_number("init_std", self.init_std, 0.0, LARGEST)
        _check_number("sink_start", self.sink_start, -LARGEST, LARGEST)

    @property
    def has_alpha(self) -> bool:
        return self.activation is not None

    @property
    def can_generate(self) -> bool:
        return not (self.bias and self.bias_length == "keys")

    def check_can_generate(self) -> None:
        """Raises for a mechanism whose earlier outputs would change with every new key."""
        if not self.can_generate:
            raise ValueError(
                'bias_length="keys" cannot generate, since every new key would change earlier outputs; train with an '
                'integer bias_length or "visible"'
            )

    @classmethod
    def named(cls, name: str, **settings: Any) -> Mechanism:
        """Returns a preset, with settings replaced by keyword arguments."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"mechanism must be one of {', '.join(PRESETS)}, got {shown(name)}{_hint(name, PRESETS)}")
        _check_keys(settings)
        return replace(PRESETS[name], **settings)

    def extra_parameters(self, embed_dim: int, num_heads: int, head_dim: int) -> int:
        """Number of parameters that the mechanism adds to one layer."""
        check_sizes(embed_dim, num_heads, head_dim)
        alpha = embed_dim * num_heads if self.has_alpha else 0
        gate = embed_dim * num_heads * head_dim if self.gate else 0
        return alpha + gate + (num_heads if self.sink == "learned" else 0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Mechanism:
        if not isinstance(settings, dict):
            raise TypeError(f"settings must be a dict of mechanism settings, got {type(settings).__name__}")
        _check_keys(settings)
        return cls(**settings)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Mechanism:
        if not isinstance(text, str | bytes | bytearray):
            raise TypeError(f"text must be the JSON of a mechanism's settings, got {type(text).__name__}")
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"text must be the JSON of a mechanism's settings, as written by to_json, got {shown(text)}: {error}"
            ) from error
        return cls.from_dict(settings)


def as_mechanism(mechanism: Mechanism | str) -> Mechanism:
    """Converts the name of a preset to its Mechanism; returns a Mechanism unchanged."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    if isinstance(mechanism, str):
        return Mechanism.named(mechanism)
    raise TypeError(f"mechanism must be a Mechanism or the name of a preset, got {type(mechanism).__name__}")


def _check_keys(settings: dict[str, Any]) -> None:
    known = [field.name for field in fields(Mechanism)]
    for key in settings:
        if key not in known:
            raise ValueError(
                f"a mechanism has no setting {shown(key)}{_hint(key, known)}; its settings are {', '.join(known)}"
            )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and not (isinstance(value, str) and value in choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be None or one of {known}, got {shown(value)}{_hint(value, choices)}")


def _hint(value: Any, known: Iterable[str]) -> str:
    near = get_close_matches(value, list(known), n=1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_bias_length(value: Any) -> None:
    rule = 'bias_length must be an integer of at least 1, "visible" or "keys"'
    if isinstance(value, str):
        if value not in BIAS_LENGTH_WORDS:
            raise ValueError(f"{rule}, got {shown(value)}")
    elif isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{rule}, got {shown(value)}")
    elif value < 1:
        raise ValueError(f"{rule}, got {shown(value)}")
    elif value > MAX_BIAS_LENGTH:
        raise ValueError(f"bias_length must be at most {MAX_BIAS_LENGTH}, got {shown(value)}; use the training length")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not low <= value <= high:  # NaN fails too
        raise ValueError(f"{name} must be a finite number from {low:g} to {high:g}, got {shown(value)}")


PRESETS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism("softmax"),
        Mechanism("off_by_one", sink="zero"),
        Mechanism("sink", sink="learned"),
        Mechanism("gated", gate=True),
        Mechanism("affine", activation="linear_clipping", bias=True),
        Mechanism("affine_gated", activation="linear_clipping", bias=True, gate=True),
        Mechanism("head_gated", activation="sigmoid"),
        Mechanism("affine_no_bias", activation="linear_clipping"),
    )
}
