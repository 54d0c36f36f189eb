"""The rules that turn a layer's parameters into alpha and beta: one entry each, as data and one function.

A mechanism names one rule for alpha (`activation`) and one for beta (`bias`). To add a rule, add an entry to
ALPHA_RULES or BETA_RULES; all else (parameters, starts, counts, checkpoints, tensor parallelism) follows from it.
CONTRIBUTING.md has a worked example. The functions use methods of tensors, so that settings do not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AlphaRule:
    """alpha = function(scores, start).

    Attributes:
        formula: for tables; s is W_a x, c the start.
        source: who defined it or uses it.
        scores: what the function receives: "token", W_a x [B, T, H]; "head", one parameter per head [H]; "constant",
            zeros.
        function: (scores, start) -> alpha, elementwise, differentiable. It returns `start` for scores of 0 ("token"
            and "constant") or for scores that equal it ("head").
        start: initial alpha, where W_a x is 0; the setting `alpha_start` replaces it.
        limits: the open interval of values that `alpha_start` may have.
        nonnegative: True if alpha >= 0 for all scores.
        is_exact: True if alpha equals every start bitwise; False if that holds for the default start only.
    """

    formula: str
    source: str
    scores: Literal["token", "head", "constant"]
    function: Callable[[Tensor, float], Tensor]
    start: float
    limits: tuple[float, float]
    nonnegative: bool
    is_exact: bool = False


@dataclass(frozen=True)
class BetaRule:
    """beta = function(alpha, term, num_keys), with N = num_keys according to `bias_length`.

    Attributes:
        formula, source: as for alpha.
        term: what the function receives after alpha: "average", running_alpha [H, 1]; "head", one parameter per head
            [H, 1], which starts at 0; "token", W_b x [B, H, T].
        function: (alpha, term, num_keys) -> beta. It returns 0 where a term of the kinds "head" and "token" is 0.
    """

    formula: str
    source: str
    term: Literal["average", "head", "token"]
    function: Callable[[Tensor, Tensor, Any], Tensor]


def _linear_clipping(scores: Tensor, start: float) -> Tensor:
    return (0.1 * scores + start).clamp(0.0, 1.0)


def _sigmoid(scores: Tensor, start: float) -> Tensor:
    return _shifted(scores, math.log(start / (1 - start))).sigmoid()


def _double_sigmoid(scores: Tensor, start: float) -> Tensor:
    return 2 * _sigmoid(scores, start / 2)


def _softplus(scores: Tensor, start: float) -> Tensor:
    from torch.nn.functional import softplus

    return softplus(_shifted(scores, math.log(math.expm1(start))))


def _shifted(scores: Tensor, shift: float) -> Tensor:
    return scores + shift if shift else scores  # the default starts have a shift of 0


LARGEST = 3.4e38  # largest initial value of a parameter, finite in fp32

ALPHA_RULES: dict[str, AlphaRule] = {
    "linear_clipping": AlphaRule(
        formula="clip(0.1 s + c, 0, 1)",
        source="Affine-Scaled Attention, Eq. 11 (arXiv 2602.23057)",
        scores="token", function=_linear_clipping, start=0.5, limits=(0.0, 1.0), nonnegative=True, is_exact=True,
    ),
    "sigmoid": AlphaRule(
        formula="σ(s + logit(c))",
        source="Affine-Scaled Attention, Table 3; head gates of Qiu et al. 2025 (arXiv 2505.06708)",
        scores="token", function=_sigmoid, start=0.5, limits=(0.0, 1.0), nonnegative=True,
    ),
    "double_sigmoid": AlphaRule(
        formula="2σ(s + logit(c/2))",
        source="a sigmoid gate that starts as softmax; ours",
        scores="token", function=_double_sigmoid, start=1.0, limits=(0.0, 2.0), nonnegative=True,
    ),
    "softplus": AlphaRule(
        formula="softplus(s + softplus⁻¹(c))",
        source="head gate of Laguna: transformers, models/laguna/modeling_laguna.py, gating=\"per-head\"",
        scores="token", function=_softplus, start=math.log(2), limits=(0.0, LARGEST), nonnegative=True,
    ),
    "per_head": AlphaRule(
        formula="a_h",
        source="gain of the attention matrix in shaped attention (He and Hofmann, arXiv 2311.01906)",
        scores="head", function=lambda scores, start: scores, start=1.0, limits=(-LARGEST, LARGEST), nonnegative=False,
        is_exact=True,
    ),
    "constant": AlphaRule(
        formula="c",
        source="control: the scale of the output without anything that learns; ours",
        scores="constant", function=lambda scores, start: scores + start, start=0.5, limits=(0.0, LARGEST),
        nonnegative=True, is_exact=True,
    ),
}  # fmt: skip

BETA_RULES: dict[str, BetaRule] = {
    "running_average": BetaRule(
        formula="(α_ma − α) / N",
        source="Affine-Scaled Attention, Eq. 8 (arXiv 2602.23057)",
        term="average",
        function=lambda alpha, term, num_keys: (term - alpha) / num_keys,
    ),
    "centred": BetaRule(
        formula="−c_h α / N",
        source="centred attention, A − 1/n, with a gain per head (arXiv 2306.17759; He and Hofmann, arXiv 2311.01906)",
        term="head",
        function=lambda alpha, term, num_keys: -term * alpha / num_keys,
    ),
    "per_head": BetaRule(
        formula="b_h",
        source="bias of a head in normalised attention (arXiv 2005.09561)",
        term="head",
        function=lambda alpha, term, num_keys: term.expand_as(alpha),
    ),
    "free": BetaRule(
        formula="W_b x / N",
        source="beta without a tie to alpha; ours",
        term="token",
        function=lambda alpha, term, num_keys: term / num_keys,
    ),
}
