"""`AttentionMechanism`: the parameters of a mechanism in one layer, and attention with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..messages import shown
from ..ops import attention, count_visible_keys
from ..ops.validation import (
    check_query_key,
    check_visibility,
)
from .arguments import (
    check_fits_weights,
    check_hidden,
    check_no_context_parallel,
    check_padding,
    check_place,
    check_sizes,
)
from .mechanism import Mechanism, as_mechanism
from .scaling import AffineScale, Start, own_heads, wide

PLAIN_CAUSAL: dict[str, Any] = {"is_causal": True}  # the visibility arguments of plain causal attention


class Coefficients(NamedTuple):
    """The arguments that a mechanism passes to the operator; None for those that the mechanism does not have."""

    alpha: Tensor | None  # [B, H, T]
    beta: Tensor | None  # [B, H, T]
    sink: Tensor | None  # [H], or [B, H, T] for a sink of each token
    gate: Tensor | None  # [B, H, T, D]
    exclusion: Tensor | float | None = None  # [B, H, T] or a number
    norm_weight: Tensor | None = None  # [H, D]
    weights: str = "softmax"  # the function of the scores


class AttentionMechanism(nn.Module):
    """The parameters and state of one layer's mechanism: computes alpha, beta, sink and gate from hidden states.

    `is_plain` is True for plain softmax attention, which has none of them.

    >>> layer = AttentionMechanism("affine", embed_dim=64, num_heads=4, head_dim=16)
    >>> hidden = torch.randn(2, 10, 64); q = k = v = torch.randn(2, 4, 10, 16)
    >>> layer(hidden, q, k, v, is_causal=True).shape
    torch.Size([2, 4, 10, 16])
    """

    sink: Tensor | None
    sink_proj: nn.Linear | None  # W_s
    difference_proj: nn.Linear | None  # W_d
    head_exclusion: nn.Parameter | None  # e_h, [H]
    norm_weight: nn.Parameter | None  # of the norm of each head, [H * D]
    # Called with (query, key, value, **arguments) before each operator call.
    observer: Callable[..., None] | None = None
    sequence: Any = None  # the SequenceGroup whose ranks hold the parts of each sequence, under sequence parallelism

    def __init__(
        self,
        mechanism: Mechanism | str,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.mechanism = as_mechanism(mechanism)
        check_sizes(embed_dim, num_heads, head_dim)
        check_place(device, dtype)
        _check_starts(self.mechanism, dtype)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.nonnegative_alpha = self.mechanism.nonnegative_alpha
        settings = self.mechanism
        later = settings.differential or settings.head_norm or settings.exclusion is not None
        later = later or settings.weights != "softmax"
        # The node that joins W_a and the operator has no sink of each token, and nothing that follows the softmax.
        self.joins = settings.has_alpha and settings.sink != "token" and not later
        self.is_plain = not (settings.has_alpha or settings.gate or settings.sink or later)
        # N of causal calls with at most `longest_simple` keys (None: any number), which need no count of visible keys.
        has_length = settings.bias and isinstance(settings.bias_length, int)
        self.simple_divisor = settings.bias_length if has_length else None
        self.longest_simple = None if not settings.bias else settings.bias_length if has_length else 0
        self.scale = (
            AffineScale(self.mechanism, embed_dim, num_heads, device=device, dtype=dtype)
            if self.mechanism.has_alpha
            else None
        )
        self.gate_proj = (
            nn.Linear(embed_dim, num_heads * head_dim, bias=False, device=device, dtype=dtype)
            if self.mechanism.gate
            else None
        )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        by_token = {"sink_proj": self.mechanism.sink == "token", "difference_proj": self.mechanism.differential}
        for name, exists in by_token.items():
            setattr(self, name, nn.Linear(embed_dim, num_heads, bias=False, **like) if exists else None)
        by_head = {"head_exclusion": settings.exclusion == "learned", "norm_weight": settings.head_norm}
        for name, exists in by_head.items():
            # A vector, also for the weights of the norm: optimizers decay matrices.
            size = num_heads * head_dim if name == "norm_weight" else num_heads
            self.register_parameter(name, nn.Parameter(torch.empty(size, **like)) if exists else None)
        empty = torch.empty(num_heads, **like)
        if self.mechanism.sink == "learned":
            self.sink = nn.Parameter(empty)
        elif self.mechanism.sink == "zero":
            self.register_buffer("sink", empty, persistent=False)
        else:
            self.sink = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.scale is not None:
            self.scale.reset_parameters()
        for start in self._own_starts():
            start.fill()

    def starts(self, identity: bool = False) -> Iterator[Start]:
        """The initial values of all parameters and buffers of the layer, in the order in which they are drawn.

        Args:
            identity: for a start that scales softmax attention by `mechanism.identity_scale` and changes nothing else.
        """
        if self.scale is not None:
            yield from self.scale.starts(identity)
        yield from self._own_starts(identity)

    def _own_starts(self, identity: bool = False) -> Iterator[Start]:
        if self.gate_proj is not None:
            yield Start(self.gate_proj.weight, 0.0, 0.0 if identity else self.mechanism.init_std)
        for proj in (self.sink_proj, self.difference_proj):
            if proj is not None:
                yield Start(proj.weight, 0.0, self.mechanism.init_std)
        if self.head_exclusion is not None:
            yield Start(self.head_exclusion, 0.0)
        if self.norm_weight is not None:
            yield Start(self.norm_weight, 1.0)
        if self.sink is not None:
            yield Start(self.sink, self.mechanism.sink_start if self.mechanism.sink == "learned" else 0.0)

    def check_can_generate(self) -> None:
        """Raises if the mechanism cannot run with cached keys."""
        self.mechanism.check_can_generate()

    def coefficients(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        window: int | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        token_mask: Tensor | None = None,
    ) -> Coefficients:
        """Computes alpha, beta, sink and gate of a call; of query and key only the shapes are used.

        `token_mask` [B, T] marks the queries that are real tokens; None means the last T columns of a [B, S] mask.
        """
        visible: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
        return self.rows(hidden, *self._prepare(hidden, query, key, visible, token_mask))

    def _prepare(
        self, hidden: Tensor, query: Tensor, key: Tensor, visible: dict[str, Any], token_mask: Tensor | None
    ) -> tuple[Tensor | int | None, Tensor | None]:
        """Validates the arguments; returns N of Eq. 8 and the mask of real tokens."""
        self._check(hidden, query, key, visible, token_mask)
        num_keys = self._bias_divisor(query, key, **visible) if self.mechanism.bias else None
        return num_keys, real_tokens(visible["mask"], query.shape[2]) if token_mask is None else token_mask

    def rows(self, hidden: Tensor, num_keys: Tensor | int | None, token_mask: Tensor | None) -> Coefficients:
        """`coefficients` for a known N of Eq. 8 (from `bias_divisor`) and a known mask of real tokens [B, T]."""
        alpha = beta = None
        scale = self.scale
        if scale is not None:
            alpha, beta = scale(hidden, num_keys, token_mask)
        sink_proj: Any = self._modules.get("sink_proj")
        sink = self.sink if sink_proj is None else self._token_sink(sink_proj(hidden))
        parameters: Any = self._parameters
        exclusion: Tensor | float | None = 1.0 if self.mechanism.exclusion == "full" else None
        norm_weight = parameters.get("norm_weight")
        if self.mechanism.exclusion == "learned":
            by_head = torch.tanh(wide(own_heads(parameters["head_exclusion"])))
            exclusion = by_head[:, None].expand(hidden.shape[0], -1, hidden.shape[1])
        if norm_weight is not None:
            norm_weight = own_heads(norm_weight).view(-1, self.head_dim)
        return Coefficients(alpha, beta, sink, self._gate(hidden), exclusion, norm_weight, self.mechanism.weights)

    def scored(self, query: Tensor, key: Tensor, softmax_scale: float | None) -> tuple[Tensor, Tensor, float | None]:
        """query, key and softmax_scale as the weights of the mechanism need them.

        Softplus weights are a function of log(D) cos(q, k) (arXiv 2501.13428), which replaces the scale of the layer.
        """
        if self.mechanism.weights != "softplus":
            return query, key, softmax_scale
        query, key = (nn.functional.normalize(wide(x), dim=-1).to(x.dtype) for x in (query, key))
        return query, key, math.log(self.head_dim)

    def _token_sink(self, scores_BTH: Tensor) -> Tensor:
        scores = wide(scores_BTH).transpose(1, 2)
        return scores + self.mechanism.sink_start if self.mechanism.sink_start else scores

    def difference(self, hidden: Tensor, num_kv_heads: int) -> Tensor | None:
        """How much of the next head each head subtracts, [B, H, T]; None if the mechanism is not differential."""
        proj: Any = self._modules.get("difference_proj")
        if proj is None:
            return None
        check_shared_values(self.num_heads, num_kv_heads)
        return torch.sigmoid(wide(proj(hidden))).transpose(1, 2)

    def _gate(self, hidden: Tensor) -> Tensor | None:
        gate_proj: Any = self._modules.get("gate_proj")
        if gate_proj is None:
            return None
        gate: Tensor = torch.sigmoid(gate_proj(hidden)).unflatten(-1, (self.num_heads, self.head_dim))
        return gate.transpose(1, 2)

    def attend(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        num_keys: Tensor | int | None,
        token_mask: Tensor | None,
        sink: Tensor | None,
        softmax_scale: float | None,
        visible: dict[str, Any],
    ) -> Tensor | None:
        """The operator with the coefficients of `rows` in one autograd node; None if that does not support the call.

        `sink` is the sink of the layer, or this rank's part of it; `visible` are the visibility arguments of the call.
        """
        if not self.joins or visible != PLAIN_CAUSAL:
            return None
        scale: Any = self._modules["scale"]
        gate_of = self._gate if "gate_proj" in self._modules else None
        arguments = (num_keys, token_mask, sink, gate_of, softmax_scale)
        out: Tensor | None = scale.attend(hidden, query, key, value, *arguments)
        return out

    def forward(
        self,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        window: int | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
        token_mask: Tensor | None = None,
        softmax_scale: float | None = None,
        impl: str = "auto",
    ) -> Tensor:
        """Runs the operator with this layer's coefficients; returns [B, H, T, D]."""
        visible: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
        check_no_context_parallel()
        if self.sequence is not None:
            self._check(hidden, query, key, visible, token_mask)
            part: Tensor = self.sequence.attend(
                self, hidden, query, key, value, visible, token_mask, softmax_scale, impl
            )
            return part
        num_keys, tokens = self._prepare(hidden, query, key, visible, token_mask)
        if query.is_cuda and self.observer is None and type(impl) is str and impl == "auto":
            given = {name: each for name, each in visible.items() if each is not None}
            out = self.attend(hidden, query, key, value, num_keys, tokens, self.sink, softmax_scale, given)
            if out is not None:
                return out
        rows = self.rows(hidden, num_keys, tokens)._asdict()
        query, key, softmax_scale = self.scored(query, key, softmax_scale)
        difference = self.difference(hidden, key.shape[1])
        if self.observer is not None:
            self.observer(
                query, key, value, **rows, difference=difference, softmax_scale=softmax_scale, token_mask=token_mask,
                **visible,
            )  # fmt: skip
        result: Tensor = attention(
            query, key, value, **rows, **visible, softmax_scale=softmax_scale,
            nonnegative_alpha=self.nonnegative_alpha, impl=impl,
        )  # fmt: skip
        return result if difference is None else subtract_next(result, difference, key.shape[1])

    def bias_divisor(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        window: int | None = None,
        segment_ids: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | int:
        """N of Eq. 8 according to `bias_length`: an integer, or a tensor that broadcasts to [B, H, T].

        It depends only on the shapes and the visible keys, so layers with the same shapes and masks can share it.
        """
        visible: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
        check_query_key(query, key)
        check_visibility(query, key, **visible)
        return self._bias_divisor(query, key, **visible)

    def _bias_divisor(self, query: Tensor, key: Tensor, *, mask: Tensor | None, **visible: Any) -> Tensor | int:
        length, num_keys = self.mechanism.bias_length, key.shape[2]
        if length == "keys":
            if mask is not None and mask.dim() == 2:
                return mask.sum(-1)[:, None, None].clamp(min=1)
            return max(num_keys, 1)
        if isinstance(length, int) and num_keys <= length:
            return length  # no query sees more keys
        visible_keys = count_visible_keys(query, key, mask=mask, **visible)
        return visible_keys.clamp(min=length if isinstance(length, int) else 1)

    def _check(
        self, hidden: Tensor, query: Tensor, key: Tensor, visible: dict[str, Any], token_mask: Tensor | None
    ) -> None:
        check_hidden(hidden, self.embed_dim)
        scale = self.scale
        of_scale = () if scale is None else (scale.proj, scale.beta_proj)
        for proj in (*of_scale, self.gate_proj, self.sink_proj, self.difference_proj):
            if proj is not None:
                check_fits_weights(hidden, proj)
        check_query_key(query, key)
        batch, queries = hidden.shape[:2]
        expected = (batch, self.num_heads, queries, self.head_dim)
        if tuple(query.shape) != expected:
            raise ValueError(
                f"query must have shape [B, H, T, D] = {list(expected)} to fit hidden {list(hidden.shape)} and the "
                f"layer's heads, got {list(query.shape)}"
            )
        check_visibility(query, key, **visible)
        check_padding("token_mask", token_mask, "[B, T]", (batch, queries), hidden)


def _check_starts(mechanism: Mechanism, dtype: torch.dtype | None) -> None:
    """Raises if an initial value overflows the dtype of its parameter."""
    largest = torch.finfo(torch.get_default_dtype() if dtype is None else dtype).max
    for name, value in (("sink_start", mechanism.sink_start), ("init_std", mechanism.init_std)):
        if abs(value) > largest:
            raise ValueError(f"{name} of the mechanism must be at most {largest:g} in {dtype}, got {shown(value)}")


def check_shared_values(num_heads: int, num_kv_heads: int) -> None:
    if num_heads == num_kv_heads:
        raise ValueError(
            "a differential mechanism needs at least two query heads for each key-value head, because it subtracts "
            f"weights of the same values, got {num_heads} heads of both kinds; use fewer key-value heads or another "
            "mechanism"
        )


def subtract_next(of_heads: Tensor, difference_BHT: Tensor, num_kv_heads: int) -> Tensor:
    """Each head of [B, H, T, ..] minus `difference` times the next head of its key-value head, cyclically."""
    following = of_heads.unflatten(1, (num_kv_heads, -1)).roll(-1, 2).flatten(1, 2)
    subtracted: Tensor = of_heads - difference_BHT[..., None] * following
    return subtracted.to(of_heads.dtype)


def real_tokens(mask: Tensor | None, num_queries: int) -> Tensor | None:
    """The queries that are real tokens [B, T] according to a key mask [B, S]; None without such a mask."""
    if mask is None or mask.dim() != 2 or mask.shape[1] < num_queries:
        return None
    return mask[:, mask.shape[1] - num_queries :]
