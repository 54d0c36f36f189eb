"""Defines mechanisms: which of alpha, beta, sink and gate they have, and the settings saved in a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from ..messages import check_flag, did_you_mean, shown
from .coefficients import ALPHA_RULES, BETA_RULES, LARGEST, AlphaRule, BetaRule

WEIGHTS = ("softmax", "signed", "sigmoid", "softplus", "normalized")  # NAMES of ops/weights, which imports torch
EXCLUSIONS = ("full", "learned")
SINKS = ("zero", "learned", "token")
BIAS_LENGTH_WORDS = ("visible", "keys")
PAPER_TRAINING_LENGTH = 2048
MAX_BIAS_LENGTH = 2**31 - 1
BIASES = tuple(name for name in BETA_RULES if name != "running_average")  # the rules other than True
# Settings that `to_dict` writes only if they differ from their defaults: files of a mechanism without them stay as they
# were before the setting existed, bitwise.
LATER_SETTINGS = ("alpha_start", "differential", "exclusion", "head_norm", "weights")


@dataclass(frozen=True)
class Mechanism:
    """The settings of one attention mechanism.

    >>> Mechanism.named("affine").bias_length
    2048
    >>> Mechanism.named("affine", activation="sigmoid", bias_length=4096).activation
    'sigmoid'

    Attributes:
        name: its name in tables and checkpoints.
        activation: the rule of alpha, one of ALPHA_RULES in coefficients.py: phi of alpha = phi(W_a x),
            "linear_clipping" (the paper), "sigmoid", "double_sigmoid", "softplus"; or "per_head" (one learned number
            per head), "constant"; None for no alpha.
        bias: the rule of beta: True for beta = (running_alpha - alpha) / N (Eq. 8), "centred" for -c_h alpha / N with a
            learned c_h, "per_head" for a learned b_h, "free" for W_b x / N, False for no beta.
        sink: "learned" (one logit per head), "zero" (off by one), "token" (a logit of each head and token,
            W_s x + sink_start), or None.
        gate: True for an output gate sigmoid(W_g x) per head and channel.
        bias_length: N of Eq. 8. An integer L means max(L, visible keys), which is the paper's N if L is the training
            length; "visible" means the visible keys of the query; "keys" means the keys of the call (for comparison
            only, since it cannot generate).
        momentum: rho of the running average (Eq. 9).
        running_alpha_start: initial value of the running average (the paper: 0).
        init_std: standard deviation of all initial projections: W_a, W_b, W_g, W_s, W_d.
        sink_start: initial value of the learned sink, and of a token's sink where W_s x is 0.
        alpha_start: initial value of alpha, where W_a x is 0; None: that of the rule (0.5 for the paper's).
        differential: True subtracts the output of the next head, sigmoid(W_d x) times, among the query heads of one
            key-value head; every second head is that of DIFF V2 (docs/decisions/0035).
        exclusion: "full" subtracts the part of the output along the token's own value (XSA), "learned" subtracts it
            tanh(e_h) times, with a learned e_h that starts at 0; None does not.
        head_norm: True normalises the output of each head by its root mean square, with learned weights, before the
            gate.
        weights: "softmax", or the function of the scores that takes its place: "signed", "sigmoid", "softplus" (which
            normalises the lengths of queries and keys) or "normalized".
    """

    name: str = "softmax"
    activation: str | None = None
    bias: bool | Literal["centred", "per_head", "free"] = False
    sink: Literal["zero", "learned", "token"] | None = None
    gate: bool = False
    bias_length: int | Literal["visible", "keys"] = PAPER_TRAINING_LENGTH
    momentum: float = 0.9
    running_alpha_start: float = 0.0
    init_std: float = 0.02
    sink_start: float = 0.0
    alpha_start: float | None = None
    differential: bool = False
    exclusion: Literal["full", "learned"] | None = None
    head_norm: bool = False
    weights: str = "softmax"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string, got {shown(self.name)}")
        _check_choice("activation", self.activation, tuple(ALPHA_RULES))
        _check_choice("sink", self.sink, SINKS)
        if not isinstance(self.weights, str) or self.weights not in WEIGHTS:
            hint = did_you_mean(self.weights, WEIGHTS)
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {shown(self.weights)}{hint}")
        if self.weights != "softmax" and self.sink is not None:
            raise ValueError(
                f"sink={self.sink!r} cannot be combined with weights={self.weights!r}: a sink is a term of the "
                'softmax; use weights="softmax" or sink=None'
            )
        _check_choice("exclusion", self.exclusion, EXCLUSIONS)
        for flag in ("gate", "differential", "head_norm"):
            check_flag(flag, getattr(self, flag))
        finish = {"gate": self.gate, "exclusion": self.exclusion, "head_norm": self.head_norm}
        given = [f"{name}={value!r}" for name, value in finish.items() if value]
        if self.differential and given:
            raise ValueError(
                f"differential=True cannot be combined with {given[0]}: the operator applies that to each head before "
                "the difference is taken; use one of them"
            )
        _check_bias(self.bias, self.activation)
        _check_bias_length(self.bias_length)
        _check_alpha_start(self.alpha_start, self.activation)
        _check_number("momentum", self.momentum, 0.0, 1.0)
        largest_alpha = 1.0 if self.alpha_rule is None else max(1.0, self.alpha_rule.limits[1])
        _check_number("running_alpha_start", self.running_alpha_start, 0.0, largest_alpha)
        _check_number("init_std", self.init_std, 0.0, LARGEST)
        _check_number("sink_start", self.sink_start, -LARGEST, LARGEST)

    @property
    def has_alpha(self) -> bool:
        return self.activation is not None

    @property
    def alpha_rule(self) -> AlphaRule | None:
        return None if self.activation is None else ALPHA_RULES[self.activation]

    @property
    def beta_rule(self) -> BetaRule | None:
        return BETA_RULES[self.beta_name] if self.bias else None

    @property
    def beta_name(self) -> str:
        """The name of the rule of beta in BETA_RULES, "" for no beta."""
        return "running_average" if self.bias is True else self.bias or ""

    @property
    def has_running_alpha(self) -> bool:
        """True for Eq. 8's beta, the only one with a running average."""
        return self.beta_rule is not None and self.beta_rule.term == "average"

    @property
    def initial_alpha(self) -> float:
        """alpha of a new layer with W_a = 0: `alpha_start`, or the start of the rule; 1 for no alpha."""
        if self.alpha_rule is None:
            return 1.0
        return self.alpha_rule.start if self.alpha_start is None else float(self.alpha_start)

    @property
    def nonnegative_alpha(self) -> bool:
        """True if alpha >= 0 whatever the parameters are, which the operator's backward can use."""
        return self.alpha_rule is None or self.alpha_rule.nonnegative

    @property
    def has_kernels(self) -> bool:
        """True if the GPU kernels of ops/fused compute alpha and beta; the others run as PyTorch formulas there too."""
        return (
            self.activation in ("linear_clipping", "sigmoid")
            and self.initial_alpha == ALPHA_RULES[self.activation].start
            and (not self.bias or self.has_running_alpha)
        )

    @property
    def identity_scale(self) -> float | None:
        """The factor by which a new layer with zero gates scales attention, if it is an exact power of 2; else None.

        Then the inverse factor on the output projection gives the outputs of softmax attention bitwise. A constant
        alpha other than 1 has no such factor either: a checkpoint without parameters of the mechanism does not tell
        whether the projection was scaled.
        """
        alpha, rule = self.initial_alpha, self.alpha_rule
        changes = self.sink is not None or self.differential or self.head_norm or self.exclusion == "full"
        if changes or self.weights != "softmax" or math.frexp(alpha)[0] != 0.5:
            return None
        if rule is not None and not (rule.is_exact or alpha == rule.start):
            return None
        if rule is not None and rule.scores == "constant" and alpha != 1.0:
            return None
        return alpha * (0.5 if self.gate else 1.0)

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
            hint = did_you_mean(name, PRESETS)
            raise ValueError(f"mechanism must be one of {', '.join(PRESETS)}, got {shown(name)}{hint}")
        _check_keys(settings)
        return replace(PRESETS[name], **settings)

    def extra_parameters(self, embed_dim: int, num_heads: int, head_dim: int) -> int:
        """Number of parameters that the mechanism adds to one layer."""
        from .arguments import check_sizes  # imports torch, which the settings of a mechanism do not need

        check_sizes(embed_dim, num_heads, head_dim)
        sizes = {"token": embed_dim * num_heads, "head": num_heads}
        alpha = 0 if self.alpha_rule is None else sizes.get(self.alpha_rule.scores, 0)
        beta = 0 if self.beta_rule is None else sizes.get(self.beta_rule.term, 0)
        gate = embed_dim * num_heads * head_dim if self.gate else 0
        sink = {"learned": sizes["head"], "token": sizes["token"]}.get(self.sink or "", 0)
        difference = sizes["token"] if self.differential else 0
        exclusion = sizes["head"] if self.exclusion == "learned" else 0
        norm = num_heads * head_dim if self.head_norm else 0
        return alpha + beta + gate + sink + difference + exclusion + norm

    def to_dict(self) -> dict[str, Any]:
        """All settings; those of LATER_SETTINGS only where they differ from their defaults."""
        usual = {field.name: field.default for field in fields(self)}
        later = {name for name in LATER_SETTINGS if getattr(self, name) == usual[name]}
        return {name: value for name, value in asdict(self).items() if name not in later}

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
            hint = did_you_mean(key, known)
            raise ValueError(f"a mechanism has no setting {shown(key)}{hint}; its settings are {', '.join(known)}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and not (isinstance(value, str) and value in choices):
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be None or one of {known}, got {shown(value)}{did_you_mean(value, choices)}")


def _check_bias(bias: Any, activation: str | None) -> None:
    if isinstance(bias, str):
        if bias not in BIASES:
            known = ", ".join(map(repr, BIASES))
            hint = did_you_mean(bias, BIASES)
            raise ValueError(f"bias must be True (Eq. 8), False or one of {known}, got {shown(bias)}{hint}")
    else:
        check_flag("bias", bias)
    if bias and activation is None:
        raise ValueError(
            f"bias={bias!r} needs an alpha, which its formula contains or which it is a control for, got "
            'activation=None; set activation="linear_clipping", activation="constant" or bias=False'
        )
    if bias is True and activation is not None and ALPHA_RULES[activation].scores != "token":
        raise ValueError(
            "bias=True needs an alpha that depends on the token: the running average of any other alpha is that alpha, "
            f"so that beta = (running_alpha - alpha) / N tends to 0, got activation={activation!r}; "
            'set bias="centred", bias="free" or bias=False'
        )


def _check_alpha_start(value: Any, activation: str | None) -> None:
    if value is None:
        return
    if activation is None:
        raise ValueError(f"alpha_start needs an alpha, got alpha_start={shown(value)} with activation=None")
    low, high = ALPHA_RULES[activation].limits
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"alpha_start must be a number or None, got {shown(value)}")
    if not low < value < high:  # NaN fails too
        raise ValueError(
            f"alpha_start must be above {low:g} and below {high:g} for activation={activation!r}, got {shown(value)}"
        )


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
        Mechanism("affine_low_start", activation="linear_clipping", bias=True, alpha_start=0.25),
        Mechanism("affine_centred", activation="linear_clipping", bias="centred", bias_length="visible"),
        Mechanism("affine_free", activation="linear_clipping", bias="free", bias_length="visible"),
        Mechanism("head_gated_double", activation="double_sigmoid"),
        Mechanism("head_gated_softplus", activation="softplus"),
        Mechanism("per_head_alpha", activation="per_head"),
        Mechanism("constant_alpha", activation="constant"),
        Mechanism("token_sink", sink="token"),
        Mechanism("exclusive", exclusion="full"),
        Mechanism("exclusive_gated", exclusion="learned", gate=True),
        Mechanism("normed_gated", head_norm=True, gate=True),
        Mechanism("differential", differential=True),
        Mechanism("signed_weights", weights="signed"),
        Mechanism("sigmoid_weights", weights="sigmoid"),
        Mechanism("softplus_weights", weights="softplus"),
        Mechanism("normalized_weights", weights="normalized", activation="per_head", bias="per_head", head_norm=True),
    )
}
