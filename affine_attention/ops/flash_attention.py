"""The operator with flash-attention's function names and arguments: [B, T, H, D], `s_aux` for sinks, `window_size`.

Trainers, servers and transformers call attention kernels by this interface (`attn_implementation="org/repository"`).
What the operator does not compute (dropout, softcap, alibi slopes, the log-sum-exp) is refused by name. alpha, beta and
gate are additional keyword arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..messages import shown
from .api import attention
from .decoding import decode_attention
from .validation import check_cu_seqlens
from .varlen import attention_varlen

EVERYWHERE = (-1, -1)  # a window_size without limits


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention with flash-attention's arguments, forward and backward.

    Args:
        q: [B, T, H, D].
        k, v: [B, S, G, D].
        causal: bottom-right aligned, as in flash-attention 2.1 and newer.
        window_size: (left, right): a query sees so many keys before and after its own position; -1 means all.
        s_aux: [H], the sinks; not multiplied by softmax_scale.
        alpha, beta: [B, T, H]. gate: [B, T, H, D].
        dropout_p, softcap, alibi_slopes, return_attn_probs: refused unless they have their defaults.
        deterministic: needs torch.use_deterministic_algorithms(True), which chooses the kernels.

    Returns:
        [B, T, H, D].
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    _check_deterministic(deterministic)
    _check_rank("[B, T, H, D]", 4, q=q, k=k, v=v)
    is_causal, window = _visible(causal, window_size)
    out = attention(
        _heads_first(q), _heads_first(k), _heads_first(v), alpha=_heads_first(alpha), beta=_heads_first(beta),
        sink=s_aux, gate=_heads_first(gate), is_causal=is_causal, window=window, softmax_scale=softmax_scale,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention for packed documents with flash-attention's arguments, forward and backward.

    Args:
        q: [total_q, H, D].
        k, v: [total_k, G, D].
        cu_seqlens_q, cu_seqlens_k: cumulative lengths [documents + 1]; pass the same tensor where both are equal,
            which saves a copy of the queries.
        max_seqlen_q, max_seqlen_k: accepted and not needed.
        alpha, beta: [total_q, H]. gate: [total_q, H, D].
        block_table: refused; use flash_attn_with_kvcache for a paged cache.

    The other arguments are those of `flash_attn_func`.

    Returns:
        [total_q, H, D].
    """
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    _refuse(block_table=block_table)
    _check_deterministic(deterministic)
    _check_rank("[total, H, D]", 3, q=q, k=k, v=v)
    for name, ends, total in (("cu_seqlens_q", cu_seqlens_q, q.shape[0]), ("cu_seqlens_k", cu_seqlens_k, k.shape[0])):
        check_cu_seqlens(name, ends, q, total)
    is_causal, window = _visible(causal, window_size)
    if _is_same(cu_seqlens_q, cu_seqlens_k) and q.shape[0] == k.shape[0]:
        cu_seqlens_k = cu_seqlens_q
    out = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, alpha=alpha, beta=beta, sink=s_aux, gate=gate, is_causal=is_causal,
        window=window, softmax_scale=softmax_scale,
    )  # fmt: skip
    return out.contiguous()


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of new queries to a cache with flash-attention's arguments; writes k and v into the cache first.

    Args:
        q: [B, T, H, D], the last T tokens of each sequence.
        k_cache, v_cache: [B, S, G, D], or pages [pages, page_size, G, D] with a block table.
        k, v: [B, T, G, D], new keys and values, written in place from position cache_seqlens on; None: the cache holds
            them.
        cache_seqlens: the number of keys in the cache before k and v, an integer or integers [B]; None means all of it.
        block_table: integers [B, n], the pages of each sequence.
        causal: several queries are served only with causal=True; for one query it makes no difference.
        num_splits, rotary_interleaved: accepted and not needed.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad: refused; rotate q and k, and select rows of the cache.

    The other arguments are those of `flash_attn_func`. No gradient.

    Returns:
        [B, T, H, D].
    """
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    _refuse(softcap=softcap, alibi_slopes=alibi_slopes, return_softmax_lse=return_softmax_lse)
    _check_rank("[B, T, H, D]", 4, q=q, k_cache=k_cache, v_cache=v_cache)
    is_causal, window = _visible(causal, window_size)
    if not is_causal and (q.shape[1] > 1 or window is not None):
        raise ValueError(
            f"causal must be True for several queries or a window_size in flash_attn_with_kvcache, got causal=False "
            f"with {q.shape[1]} queries and window_size = {window_size}; use flash_attn_func for full attention"
        )
    lengths = _lengths(cache_seqlens, q)
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, got only one of them")
    with torch.no_grad():
        if k is not None and v is not None:
            if lengths is None:
                raise ValueError("cache_seqlens must be given with k and v: it says where they are written, got None")
            _append(k_cache, v_cache, k, v, lengths, block_table, q)
            lengths = lengths + k.shape[1]
        if block_table is not None and lengths is None:
            lengths = _lengths(block_table.shape[1] * k_cache.shape[1], q)
        cache = (k_cache, v_cache) if block_table is not None else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        out = decode_attention(
            _heads_first(q), *cache, alpha=_heads_first(alpha), beta=_heads_first(beta), sink=s_aux,
            gate=_heads_first(gate), lengths=lengths, block_table=block_table, window=window,
            softmax_scale=softmax_scale,
        )  # fmt: skip
    return out.transpose(1, 2).contiguous()


_INSTEAD = {
    "dropout_p": "set the attention dropout of the model to 0, or drop elements of the output",
    "softcap": "use a kernel that has it; dropping it would change the model",
    "alibi_slopes": "use a kernel that has them; dropping them would change the model",
    "return_attn_probs": "call affine_attention.attention_weights for the weights",
    "return_softmax_lse": "call affine_attention.attention_weights for the weights",
    "block_table": "use flash_attn_with_kvcache for a paged cache",
    "rotary_cos": "rotate q and k before the call",
    "rotary_sin": "rotate q and k before the call",
    "cache_batch_idx": "pass k_cache[cache_batch_idx] and v_cache[cache_batch_idx]",
    "cache_leftpad": "align the sequences to the start of the cache",
}


def _refuse(**arguments: Any) -> None:
    """Raises for each argument that the operator does not compute, unless it is None, 0 or False."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{name} is not served by this kernel, got {shown(value)}; {_INSTEAD[name]}")


def _check_deterministic(deterministic: bool) -> None:
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic=True needs torch.use_deterministic_algorithms(True), which chooses deterministic kernels; "
            "call it before the first forward"
        )


def _check_rank(letters: str, rank: int, **tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor {letters}, got {type(x).__name__}")
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions {letters}, got {x.dim()}: {list(x.shape)}")


def _visible(causal: bool, window_size: Any) -> tuple[bool, int | None]:
    """`is_causal` and `window` of the operator for `causal` and `window_size` of flash-attention."""
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), -1 for no limit, got {shown(window_size)}")
    left, right = (None if limit is None or limit < 0 else limit for limit in window_size)
    if causal or right == 0:
        return True, None if left is None else left + 1
    if left != right:
        raise ValueError(
            f"window_size must be symmetric (left = right) without causal, or have right = 0, got {window_size}; other "
            "windows are not served: pass a mask to affine_attention.attention"
        )
    return False, None if left is None else left + 1


def _heads_first(x: Any) -> Any:
    """[B, T, H, ..] as a view [B, H, T, ..]."""
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() >= 3 else x


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of lengths are known to be equal without reading a GPU's memory."""
    if first is second:
        return True
    if first.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.equal(first.long(), second.long())


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor) -> Tensor | None:
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int):
        raise TypeError(f"cache_seqlens must be an integer or integers [B], got {shown(cache_seqlens)}")
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None, q: Tensor
) -> None:
    """Writes k and v [B, T, G, D] into the cache, in place, at positions lengths .. lengths + T - 1."""
    _check_rank("[B, T, G, D]", 4, k=k, v=v)
    if k.shape[:2] != q.shape[:2] or k.shape[2:] != k_cache.shape[2:] or v.shape != k.shape:
        raise ValueError(
            f"k and v must have shape [B, T, G, D] = {[*q.shape[:2], *k_cache.shape[2:]]}, got {list(k.shape)} and "
            f"{list(v.shape)}"
        )
    if lengths.shape != (q.shape[0],):
        raise ValueError(f"cache_seqlens must have shape [B] = [{q.shape[0]}], got {list(lengths.shape)}")
    page_size = k_cache.shape[1]
    room = page_size if block_table is None else page_size * block_table.shape[1]
    if lengths.device.type == "cpu" and lengths.numel() and not 0 <= int(lengths.min()) <= room - k.shape[1]:
        raise ValueError(
            f"cache_seqlens must leave room for {k.shape[1]} new keys in a cache of {room}, got {lengths.tolist()}"
        )
    position_BT = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    if block_table is None:
        page_BT, slot_BT = torch.arange(k.shape[0], device=k.device)[:, None].expand_as(position_BT), position_BT
    else:
        page_BT, slot_BT = block_table.long().gather(1, position_BT // page_size), position_BT % page_size
    k_cache[page_BT, slot_BT] = k
    v_cache[page_BT, slot_BT] = v
