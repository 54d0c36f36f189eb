"""`SelfAttention`: a causal self-attention layer with rotary positions and a cache, for any mechanism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.api import IMPLEMENTATIONS
from ..ops.validation import MAX_HEAD_DIM, check_one_of, check_window
from .arguments import (
    check_fits_weights,
    check_hidden,
    check_padding,
    check_place,
    check_positions,
    check_rope_theta,
    check_segment_ids,
    check_size,
)
from .attention import AttentionMechanism, check_shared_values
from .key_value_cache import KeyValueCache
from .mechanism import Mechanism, as_mechanism
from .rotary import angle_dtype, apply_rotation, cos_sin, cos_sin_table


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
        rope_theta: base of the rotary frequencies; None disables rotary positions.
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
        if mechanism.differential:
            check_shared_values(num_heads, num_kv_heads)
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
        """Maps hidden states [B, T, M] to [B, T, M].

        Args:
            mask: boolean [B, S], True for real tokens; S counts the cached tokens too.
            segment_ids: [B, T] ids of the documents packed into one row; cannot be used with a cache.
            positions: [B, T] rotary positions; by default the real tokens of each segment are numbered from 0.
            cache: keys and values of earlier calls, to which the new ones are appended.
        """
        check_hidden(hidden, self.mechanism.embed_dim)
        check_fits_weights(hidden, self.q_proj)
        batch, queries = hidden.shape[:2]
        past = 0
        if cache is not None:
            if not isinstance(cache, KeyValueCache):
                raise TypeError(f"cache must be a KeyValueCache or None, got {type(cache).__name__}")
            if segment_ids is not None:
                raise ValueError("segment_ids cannot be used with a cache; decode one document per row")
            if self.mechanism.sequence is not None:
                raise ValueError(
                    "cache cannot be used under sequence parallelism; remove() the handle of sequence_parallel first"
                )
            self.mechanism.check_can_generate()
            cache.check_holds(batch, self.num_kv_heads, self.head_dim)
            past = cache.length
        note = f" ({past} cached and {queries} new tokens)"
        check_padding("mask", mask, "[B, S]", (batch, past + queries), hidden, note)
        check_segment_ids(segment_ids, hidden)
        check_positions(positions, hidden)
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope_theta is not None:
            if positions is None and self.mechanism.sequence is not None:
                positions = self.mechanism.sequence.positions(query, mask, segment_ids)
            cos, sin = self._cos_sin(query, mask, segment_ids, positions, past)
            query, key = apply_rotation(query, cos, sin), apply_rotation(key, cos, sin)
        if cache is not None:
            key, value = cache.append(key, value)
        out = self.mechanism(
            hidden, query, key, value, mask=mask, is_causal=True, window=self.window, segment_ids=segment_ids,
            impl=self.impl,
        )  # fmt: skip
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _cos_sin(
        self, query: Tensor, mask: Tensor | None, segment_ids: Tensor | None, positions: Tensor | None, past: int
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, which broadcast to [B, H, T, D/2]."""
        assert self.rope_theta is not None
        dtype, end = angle_dtype(query), past + query.shape[2]
        if positions is not None or torch.compiler.is_compiling():  # a compiled graph fuses the computation
            positions = default_positions(query, mask, segment_ids, past) if positions is None else positions
            return cos_sin(positions[:, None], self.head_dim, self.rope_theta, dtype)
        cos, sin = cos_sin_table(end, self.head_dim, self.rope_theta, query.device, dtype)
        if mask is None and segment_ids is None:
            return cos[past:end], sin[past:end]
        positions = default_positions(query, mask, segment_ids, past)
        return cos[positions][:, None], sin[positions][:, None]


def default_positions(query: Tensor, mask: Tensor | None, segment_ids: Tensor | None, past: int) -> Tensor:
    """Positions [B, T] or [1, T] that number the real tokens from 0, restarting in each run of equal segment ids."""
    if mask is not None:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
    positions = torch.arange(past, past + query.shape[2], device=query.device)[None]
    if segment_ids is None:
        return positions
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return positions - torch.where(starts, positions, 0).cummax(-1).values
