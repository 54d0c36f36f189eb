"""The modules of one layer: `AttentionMechanism` owns W_a, W_g and the sink, `SelfAttention` is the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import attention, count_visible_keys
from ..ops.api import IMPLEMENTATIONS
from ..ops.validation import (
    MAX_HEAD_DIM,
    check_layout,
    check_one_of,
    check_query_key,
    check_visibility,
    check_window,
    shown,
)
from .arguments import (
    check_fits_weights,
    check_hidden,
    check_no_context_parallel,
    check_padding,
    check_place,
    check_positions,
    check_rope_theta,
    check_segment_ids,
    check_size,
    check_sizes,
)
from .mechanism import Mechanism, as_mechanism
from .rotary import rotate
from .scaling import AffineScale

PLAIN_CAUSAL = {"is_causal": True}  # the arguments of a call that only the order of the tokens restricts


class Coefficients(NamedTuple):
    """What a mechanism hands to the operator; each is None where the mechanism has none."""

    alpha: Tensor | None  # [B, H, T]
    beta: Tensor | None  # [B, H, T]
    sink: Tensor | None  # [H]
    gate: Tensor | None  # [B, H, T, D]


class AttentionMechanism(nn.Module):
    """The parameters and state of one layer's mechanism: hidden states to alpha, beta, sink and gate.

    `is_plain` is True for plain softmax attention, which has none of the four.

    >>> layer = AttentionMechanism("affine", embed_dim=64, num_heads=4, head_dim=16)
    >>> hidden = torch.randn(2, 10, 64); q = k = v = torch.randn(2, 4, 10, 16)
    >>> layer(hidden, q, k, v, is_causal=True).shape
    torch.Size([2, 4, 10, 16])
    """

    sink: Tensor | None
    observer: Callable[..., None] | None = None  # sees (query, key, value, **arguments) of each call of the operator
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
        self.is_plain = not (self.mechanism.has_alpha or self.mechanism.gate or self.mechanism.sink)
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
        empty = torch.empty(num_heads, device=device, dtype=dtype)
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
        if self.gate_proj is not None:
            nn.init.normal_(self.gate_proj.weight, std=self.mechanism.init_std)
        if self.sink is not None:
            self.sink.fill_(self.mechanism.sink_start if self.mechanism.sink == "learned" else 0.0)

    def check_can_generate(self) -> None:
        """Raises where the mechanism cannot run with cached keys."""
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
        """alpha, beta, sink and gate of a call; query and key only tell the visible keys, their values do not matter.

        `token_mask` [B, T] says which queries are real tokens; None takes the last T columns of a [B, S] mask.
        """
        visible: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
        return self.rows(hidden, *self._prepare(hidden, query, key, visible, token_mask))

    def _prepare(
        self, hidden: Tensor, query: Tensor, key: Tensor, visible: dict[str, Any], token_mask: Tensor | None
    ) -> tuple[Tensor | int | None, Tensor | None]:
        """N of Eq. 8 and the mask of real tokens, of checked arguments."""
        self._check(hidden, query, key, visible, token_mask)
        num_keys = self._bias_divisor(query, key, **visible) if self.mechanism.bias else None
        return num_keys, real_tokens(visible["mask"], query.shape[2]) if token_mask is None else token_mask

    def rows(self, hidden: Tensor, num_keys: Tensor | int | None, token_mask: Tensor | None) -> Coefficients:
        """`coefficients` where N of Eq. 8, from `bias_divisor`, and the mask of real tokens [B, T] are known."""
        alpha = beta = None
        scale = self.scale
        if scale is not None:
            alpha, beta = scale(hidden, num_keys, token_mask)
        return Coefficients(alpha, beta, self.sink, self._gate(hidden))

    def _gate(self, hidden: Tensor) -> Tensor | None:
        gate_proj: Any = self._modules.get("gate_proj")
        if gate_proj is None:
            return None
        return torch.sigmoid(gate_proj(hidden)).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

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
        """The operator with the coefficients of `rows`, in one autograd node; None where that is not served.

        `sink` is the layer's, or a rank's part of it; `visible` are the arguments of the operator for visible keys.
        """
        scale: Any = self._modules.get("scale")
        if scale is None or visible != PLAIN_CAUSAL:
            return None
        return scale.attend(hidden, query, key, value, num_keys, token_mask, sink, self._gate, softmax_scale)

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
        """The operator with this layer's coefficients: [B, H, T, D]."""
        visible: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "segment_ids": segment_ids}
        check_no_context_parallel()
        if self.sequence is not None:
            self._check(hidden, query, key, visible, token_mask)
            return self.sequence.attend(self, hidden, query, key, value, visible, token_mask, softmax_scale, impl)
        num_keys, tokens = self._prepare(hidden, query, key, visible, token_mask)
        if self.observer is None and impl == "auto" and query.is_cuda:
            given = {name: each for name, each in visible.items() if each is not None}
            out = self.attend(hidden, query, key, value, num_keys, tokens, self.sink, softmax_scale, given)
            if out is not None:
                return out
        alpha, beta, sink, gate = self.rows(hidden, num_keys, tokens)
        if self.observer is not None:
            self.observer(
                query, key, value, alpha=alpha, beta=beta, sink=sink, gate=gate, softmax_scale=softmax_scale,
                token_mask=token_mask, **visible,
            )  # fmt: skip
        return attention(
            query, key, value, alpha=alpha, beta=beta, sink=sink, gate=gate, **visible,
            softmax_scale=softmax_scale, nonnegative_alpha=True, impl=impl,
        )  # fmt: skip

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
        """N of Eq. 8, as `bias_length` says: an integer, or a tensor that can be broadcast to [B, H, T].

        It depends on the shapes and the visible keys only: layers that share both can share it.
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
            return length  # no query can see more
        visible_keys = count_visible_keys(query, key, mask=mask, **visible)
        return visible_keys.clamp(min=length if isinstance(length, int) else 1)

    def _check(
        self, hidden: Tensor, query: Tensor, key: Tensor, visible: dict[str, Any], token_mask: Tensor | None
    ) -> None:
        check_hidden(hidden, self.embed_dim)
        for proj in (None if self.scale is None else self.scale.proj, self.gate_proj):
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
    """The start values of parameters are numbers of their dtype."""
    largest = torch.finfo(torch.get_default_dtype() if dtype is None else dtype).max
    for name, value in (("sink_start", mechanism.sink_start), ("init_std", mechanism.init_std)):
        if abs(value) > largest:
            raise ValueError(f"{name} of the mechanism must be at most {largest:g} in {dtype}, got {shown(value)}")


def real_tokens(mask: Tensor | None, num_queries: int) -> Tensor | None:
    """The queries that are real tokens [B, T] by a key mask [B, S]; None where a mask is absent or of another form."""
    if mask is None or mask.dim() != 2 or mask.shape[1] < num_queries:
        return None
    return mask[:, mask.shape[1] - num_queries :]


class SelfAttention(nn.Module):
    """A causal self-attention layer with rotary positions and a key-value cache, for any mechanism.

    >>> layer = SelfAttention(64, num_heads=4, num_kv_heads=2, mechanism="affine")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Args:
        embed_dim: M, the model width.
        num_heads, num_kv_heads: H and G; G defaults to H.
        mechanism: a `Mechanism` or the name of a preset.
        head_dim: D, embed_dim // num_heads by default.
        window: a query sees its last `window` keys only.
        rope_theta: base of the rotary frequencies; None means no positions.
        impl: implementation of the operator, see `affine_attention.attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        mechanism: Mechanism | str = "affine",
        *,
        head_dim: int | None = None,
        window: int | None = None,
        rope_theta: float | None = 10000.0,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_size("embed_dim", embed_dim)
        check_size("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_size("num_kv_heads", num_kv_heads)
        check_window(window)
        check_rope_theta(rope_theta)
        check_one_of("impl", impl, IMPLEMENTATIONS)
        check_place(device, dtype)
        mechanism = as_mechanism(mechanism)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim must be a multiple of num_heads when head_dim is not given, got embed_dim={embed_dim}, "
                    f"num_heads={num_heads}; pass head_dim"
                )
            head_dim = embed_dim // num_heads
        check_size("head_dim", head_dim, MAX_HEAD_DIM)
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}; pass rope_theta=None")
        self.head_dim, self.window, self.rope_theta, self.impl = head_dim, window, rope_theta, impl
        self.num_kv_heads = num_kv_heads
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=False, **like)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False, **like)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False, **like)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=False, **like)
        self.mechanism = AttentionMechanism(mechanism, embed_dim, num_heads, head_dim, **like)

    def forward(
        self,
        hidden: Tensor,
        *,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """[B, T, M] to [B, T, M].

        Args:
            mask: boolean [B, S], True for real tokens; S counts the cached tokens too.
            segment_ids: [B, T] documents packed into one row; cannot be used with a cache.
            positions: [B, T] rotary positions; by default they count the real tokens of a row, from 0 in each segment.
            cache: keys and values of earlier calls; the new ones are appended.
        """
        check_hidden(hidden, self.mechanism.embed_dim)
        check_fits_weights(hidden, self.q_proj)
        batch, queries = hidden.shape[:2]
        past = 0
        if cache is not None:
            if not isinstance(cache, KeyValueCache):
                raise TypeError(f"cache must be a KeyValueCache or None, got {type(cache).__name__}")
            if segment_ids is not None:
                raise ValueError("segment_ids cannot be used with a cache: decode one document a row")
            if self.mechanism.sequence is not None:
                raise ValueError(
                    "cache cannot be used under sequence parallelism: remove() the handle of sequence_parallel first"
                )
            self.mechanism.check_can_generate()
            cache.check_holds(batch, self.num_kv_heads, self.head_dim)
            past = cache.length
        told = f" ({past} cached and {queries} new tokens)"
        check_padding("mask", mask, "[B, S]", (batch, past + queries), hidden, told)
        check_segment_ids(segment_ids, hidden)
        check_positions(positions, hidden)
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope_theta is not None:
            if positions is None:
                sequence = self.mechanism.sequence
                if sequence is None:
                    positions = default_positions(hidden, mask, segment_ids, past)
                else:
                    positions = sequence.positions(hidden, mask, segment_ids)
            query, key = rotate(query, positions, self.rope_theta), rotate(key, positions, self.rope_theta)
        if cache is not None:
            key, value = cache.append(key, value)
        out = self.mechanism(
            hidden, query, key, value, mask=mask, is_causal=True, window=self.window, segment_ids=segment_ids,
            impl=self.impl,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).flatten(2))


class KeyValueCache:
    """Keys and values of one layer's earlier tokens. It can be cropped and reordered, for beams and rollbacks."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds [B, G, T, D] and returns all that is held."""
        for name, x, held in (("key", key, self.key), ("value", value, self.value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor [B, G, T, D], got {type(x).__name__}")
            check_layout(name, x)
            if x.dim() != 4:
                raise ValueError(f"{name} must have 4 dimensions [B, G, T, D], got {x.dim()}: {list(x.shape)}")
            if held is None:
                continue
            if x.shape[:2] != held.shape[:2] or x.shape[3] != held.shape[3]:
                batch, groups, _, dim = held.shape
                raise ValueError(
                    f"{name} must have shape [B, G, T, D] = [{batch}, {groups}, T, {dim}] to follow what the cache "
                    f"holds, got {list(x.shape)}; use a new KeyValueCache for another batch"
                )
            if x.dtype != held.dtype or x.device != held.device:
                raise TypeError(
                    f"{name} must have dtype and device of what the cache holds ({held.dtype}, {held.device}), got "
                    f"({x.dtype}, {x.device}); use a new KeyValueCache"
                )
        if value.shape != key.shape:
            raise ValueError(f"value must have the shape of key {list(key.shape)}, got {list(value.shape)}")
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value = key, value
        return key, value

    def check_holds(self, batch: int, groups: int, dim: int) -> None:
        """Raises where the cache cannot be that of a layer with these sizes; a new cache fits all."""
        if self.key is None and self.value is None:
            return
        for name, x in (("keys", self.key), ("values", self.value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"cache must hold {name} as a tensor [B, G, S, D], got {type(x).__name__}")
            fits = x.dim() == 4 and (x.shape[0], x.shape[1], x.shape[3]) == (batch, groups, dim)
            if not fits or (isinstance(self.key, Tensor) and x.shape != self.key.shape):
                raise ValueError(
                    f"cache must hold {name} [B, G, S, D] = [{batch}, {groups}, S, {dim}], got {list(x.shape)}; use a "
                    "new KeyValueCache for another batch or layer"
                )

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(
                f"length must be an integer from 0 to {self.length}, the cached tokens, got {shown(length)}"
            )
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be 0 to {self.length}, the cached tokens, got {shown(length)}")
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:, :, :length], self.value[:, :, :length]

    def reorder(self, rows: Tensor) -> None:
        """Makes row i of the batch what row rows[i] was."""
        rule = "rows must be a tensor [B] of int32 or int64"
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{rule}, got {rows.dtype if isinstance(rows, Tensor) else shown(rows)}")
        check_layout("rows", rows)
        if rows.dim() != 1:
            raise ValueError(f"{rule}, got shape {list(rows.shape)}")
        if self.key is not None and self.value is not None:
            batch = self.key.shape[0]
            # On a GPU looking at the numbers would wait for the device.
            if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
                raise ValueError(
                    f"rows must be 0 to {batch - 1}, the rows of the cache, got {int(rows.min())} to {int(rows.max())}"
                )
            self.key, self.value = self.key[rows], self.value[rows]


def default_positions(hidden: Tensor, mask: Tensor | None, segment_ids: Tensor | None, past: int) -> Tensor:
    """Positions [B, T] that count real tokens from 0, anew in each run of equal segment ids."""
    batch, queries = hidden.shape[:2]
    if mask is not None:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
    positions = torch.arange(past, past + queries, device=hidden.device).expand(batch, queries)
    if segment_ids is None:
        return positions
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return positions - torch.where(starts, positions, 0).cummax(-1).values
