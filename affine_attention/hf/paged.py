"""Runs the operator on one packed batch of transformers' continuous batching.

A batch of continuous batching is one row of tokens [1, T]: those of the first request, then those of the second, and so
on. Their keys and values belong into a paged cache that all requests share. Requests differ in what they need, so a
batch is served in up to three kinds of calls for each layer:

| kind | tokens of the request in this batch | call |
|---|---|---|
| decoding | one, after cached keys | all of them in one `decode_attention` |
| fresh | the start of its prompt | all of them in one `attention` over packed documents |
| continued | several, after cached keys (a prompt in chunks, a shared prefix) | one `attention` each |

A batch in which every request decodes comes with a block table: it needs no value on the host, so that transformers can
capture it in a CUDA graph. Other batches read the lengths of their requests once per forward.

The cache has one interface in transformers 5.17 and another since 5.20; `_store_of` reads both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn import Mechanism
from ..ops import attention, decode_attention

# What continuous batching passes to a model in addition to tokens and positions; `PagedBatch` reads it.
BATCH_KEYWORDS = frozenset(
    (
        "cache", "block_table", "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q",
        "max_seqlen_k", "max_length_q", "max_length_k", "logits_indices", "logits_processor_args",
    )
)  # fmt: skip


class Request(NamedTuple):
    """The tokens of one request in a packed batch, and its keys among those of all requests."""

    first: int
    tokens: int
    first_key: int
    keys: int


@dataclass(frozen=True)
class Store:
    """Where the keys of one layer are, whatever the version of transformers."""

    group: int  # layers with the same group share their pages and indices
    kind: str  # "full_attention" or "sliding_attention"
    window: int | None
    page_size: int
    pages: tuple[Tensor, Tensor] | None  # keys and values [pages, page_size, G, D]; None in a sliding group
    trash: int  # a token slot that is never read
    heads: int
    head_dim: int


class PagedBatch:
    """One forward of continuous batching; created before the decoder and passed to its layers.

    Args:
        config: the configuration of the decoder.
        given: the keyword arguments of the decoder.
    """

    def __init__(self, config: Any, given: dict[str, Any]):
        if torch.compiler.is_compiling():
            raise ValueError(
                "torch.compile is not served in continuous batching of a model on the operator; leave the compile "
                "settings of ContinuousBatchingConfig at their defaults"
            )
        self.config = config
        self.cache: Any = given.get("cache")
        if self.cache is None or given.get("position_ids") is None:
            raise ValueError(
                "a forward outside of continuous batching needs another attention, got "
                f"attn_implementation={config._attn_implementation!r} and no paged cache; stop the manager of "
                "continuous batching first"
            )
        self.position_ids: Tensor = given["position_ids"]
        self.block_table: Tensor | None = given.get("block_table")
        self.read_index: Any = given.get("read_index")  # a tensor of slots for each group of layers
        self.write_index: Any = given.get("write_index")
        self.key_ends = given["cu_seq_lens_k"]
        self.query_ends: Tensor = given["cu_seq_lens_q"]
        self._query_ends_on_host: list[int] | None = None
        self._made: dict[tuple[Any, ...], Any] = {}  # what layers of one group share

    def divisor(self, mechanism: Mechanism, layer: int) -> Tensor | int | None:
        """N of Eq. 8 for every token [1, 1, T], from the visible keys of its own request; an integer if it is one."""
        if not mechanism.bias:
            return None
        store, length = self.store(layer), mechanism.bias_length
        assert length != "keys", "refused before the first batch"
        if isinstance(length, int) and self._most_keys(store) <= length:
            return length
        name = ("divisor", length, store.window)
        if name not in self._made:
            visible = (self.position_ids + 1)[:, None]
            if store.window is not None:
                visible = visible.clamp(max=store.window)
            self._made[name] = visible.clamp(min=length) if isinstance(length, int) else visible
        found: Tensor = self._made[name]
        return found

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: dict[str, Any],
        softmax_scale: float | None,
    ) -> Tensor:
        """Writes the new keys and values of a layer into the cache and returns the output [1, T, H, D].

        Args:
            layer: the index of the layer.
            query, key, value: [1, H or G, T, D], of the tokens of this batch.
            rows: the arguments of the operator that a mechanism computes: alpha, beta, sink, gate, ..
            softmax_scale: as in `attention`.
        """
        store = self.store(layer)
        if (key.shape[1], key.shape[3]) != (store.heads, store.head_dim):
            raise ValueError(
                f"key of layer {layer} must have the {store.heads} heads of {store.head_dim} channels that the paged "
                f"cache was made for, got {key.shape[1]} heads of {key.shape[3]}; use generate for this model"
            )
        if self.block_table is not None:
            out = self._decode_all(store, query, key, value, rows, softmax_scale)
        else:
            out = self._mixed(store, layer, query, key, value, rows, softmax_scale)
        return out.transpose(1, 2).contiguous()

    def store(self, layer: int) -> Store:
        name = ("store", layer)
        if name not in self._made:
            self._made[name] = store_of(self.cache, layer)
        found: Store = self._made[name]
        return found

    def requests(self, store: Store) -> list[Request]:
        """The requests of a batch with prefill. Reads their lengths on the host, once per forward and kind of layer."""
        name = ("requests", store.kind)
        if name not in self._made:
            if self._query_ends_on_host is None:
                self._query_ends_on_host = self.query_ends.tolist()
            starts, key_starts = self._query_ends_on_host, self._key_ends(store).tolist()
            ends = zip(starts[1:], key_starts[1:], strict=True)
            self._made[name] = [
                Request(first, end - first, first_key, key_end - first_key)
                for first, first_key, (end, key_end) in zip(starts, key_starts, ends, strict=False)
                if end > first  # padding adds requests without tokens
            ]
        found: list[Request] = self._made[name]
        return found

    def _key_ends(self, store: Store) -> Tensor:
        ends: Tensor = self.key_ends[store.kind] if isinstance(self.key_ends, dict) else self.key_ends
        return ends

    def _most_keys(self, store: Store) -> int:
        """A bound on the keys of a request, known without reading a value on the device."""
        if store.window is not None:
            return store.window
        if self.block_table is not None:
            return self.block_table.shape[2] * store.page_size
        return max((request.keys for request in self.requests(store)), default=0)

    def _decode_all(
        self, store: Store, query: Tensor, key: Tensor, value: Tensor, rows: dict[str, Any], softmax_scale: float | None
    ) -> Tensor:
        """Every request has one token: writes it at the end of its pages and attends to them. Padding has length 0."""
        assert store.pages is not None
        assert self.block_table is not None
        name = ("slots", store.group)
        if name not in self._made:
            ends, table = self._key_ends(store), self.block_table[store.group].clamp(min=0)
            lengths = (ends[1:] - ends[:-1]).to(torch.int32)
            last = (lengths - 1).clamp(min=0).long()
            page = table.gather(1, (last // store.page_size)[:, None])[:, 0].long()
            page = torch.where(lengths > 0, page, store.trash // store.page_size)
            slot = torch.where(lengths > 0, last % store.page_size, store.trash % store.page_size)
            self._made[name] = lengths, table, (page, slot)
        lengths, table, slots = self._made[name]
        for pages, new in zip(store.pages, (key, value), strict=True):
            pages.index_put_(slots, new[0].transpose(0, 1))
        out = decode_attention(
            query.transpose(0, 2), *store.pages, **_one_per_sequence(rows), lengths=lengths, block_table=table,
            softmax_scale=softmax_scale,
        )  # fmt: skip
        return out.transpose(0, 2)

    def _mixed(
        self,
        store: Store,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: dict[str, Any],
        softmax_scale: float | None,
    ) -> Tensor:
        """Requests of all kinds. Tokens of padding belong to no request; their output is zero."""
        kinds = self._kinds(store)
        cached = self._write(store, layer, key, value, kinds)
        out = query.new_zeros(query.shape)
        if kinds.fresh is not None:
            tokens, segments = kinds.fresh
            out[:, :, tokens] = attention(
                query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], **_of_tokens(rows, tokens),
                segment_ids=segments, is_causal=True, window=store.window, softmax_scale=softmax_scale,
            )  # fmt: skip
        if kinds.decoding is not None:
            tokens, lengths, index = kinds.decoding
            if store.pages is not None:
                where: dict[str, Any] = {"block_table": index, "lengths": lengths}
                keys, values = store.pages
            else:
                where = {"lengths": lengths}
                keys, values = (x[0][:, index].transpose(0, 1) for x in cached)  # [requests, G, window, D]
            answer = decode_attention(
                query[:, :, tokens].transpose(0, 2), keys, values, **_one_per_sequence(_of_tokens(rows, tokens)),
                **where, softmax_scale=softmax_scale,
            )  # fmt: skip
            out[:, :, tokens] = answer.transpose(0, 2)
        for request, first_key in kinds.continued:
            own = slice(request.first, request.first + request.tokens)
            keys, values = (x[:, :, first_key : first_key + request.keys] for x in cached)
            out[:, :, own] = attention(
                query[:, :, own], keys, values, **_of_tokens(rows, own), is_causal=True, window=store.window,
                softmax_scale=softmax_scale,
            )  # fmt: skip
        return out

    def _kinds(self, store: Store) -> _Kinds:
        name = ("kinds", store.group)
        if name not in self._made:
            self._made[name] = self._sort(store)
        found: _Kinds = self._made[name]
        return found

    def _sort(self, store: Store) -> _Kinds:
        requests, device = self.requests(store), self.query_ends.device
        fresh = [r for r in requests if r.tokens == r.keys]
        decoding = [r for r in requests if r.tokens == 1 < r.keys]
        continued = [r for r in requests if 1 < r.tokens < r.keys]
        packed = None
        if fresh:
            tokens = torch.tensor([i for r in fresh for i in range(r.first, r.first + r.tokens)], device=device)
            number = torch.tensor([n for n, r in enumerate(fresh) for _ in range(r.tokens)], device=device)
            packed = tokens, number[None] if len(fresh) > 1 else None
        all_keys: Tensor = self.read_index[store.group]
        one_token = None
        if decoding:
            first = torch.tensor([r.first for r in decoding], device=device)
            key_of = torch.tensor([r.first_key for r in decoding], device=device)[:, None]
            lengths = torch.tensor([r.keys for r in decoding], device=device, dtype=torch.int32)
            step = 1 if store.pages is None else store.page_size
            columns = torch.arange(0, max(r.keys for r in decoding), step, device=device)
            index = key_of + torch.minimum(columns, lengths[:, None] - 1)
            if store.pages is not None:
                index = all_keys[index] // store.page_size  # the page of every page_size-th key
            one_token = first, lengths, index
        if store.pages is None:
            total = max((r.first_key + r.keys for r in requests), default=0)
            read = all_keys[:total] if decoding or continued else all_keys[:0]
            return _Kinds(packed, one_token, [(r, r.first_key) for r in continued], read)
        # Only chunks of prompts are copied out of the cache; decoding requests read their pages in place.
        parts = [all_keys[r.first_key : r.first_key + r.keys] for r in continued]
        starts = [sum(len(part) for part in parts[:n]) for n in range(len(parts))]
        read = torch.cat(parts) if parts else all_keys[:0]
        return _Kinds(packed, one_token, list(zip(continued, starts, strict=True)), read)

    def _write(self, store: Store, layer: int, key: Tensor, value: Tensor, kinds: _Kinds) -> tuple[Tensor, Tensor]:
        """Updates the cache; returns the keys and values [1, G, n, D] at `kinds.read`, which it reads in the order
        that the kind of layer needs: the new tokens of a sliding layer overwrite keys that they still see."""
        index = [kinds.read if n == store.group else x for n, x in enumerate(self.read_index)]
        if hasattr(self.cache, "layer_to_allocator"):
            lengths = {store.kind: self._key_ends(store)}
            given = {"read_index": index, "write_index": self.write_index, "cu_seq_lens_k": lengths,
                     "max_length_k": {store.kind: 0}}  # fmt: skip
            keys, values = self.cache.update(key, value, layer, given)
            return keys, values
        keys, values = self.cache.update(key, value, layer, index, self.write_index)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


class _Kinds(NamedTuple):
    """The requests of a batch by kind, the same for all layers of a group."""

    fresh: tuple[Tensor, Tensor | None] | None  # their tokens, and the number of each token's request if several
    decoding: tuple[Tensor, Tensor, Tensor] | None  # their tokens, lengths, and pages or keys
    continued: list[tuple[Request, int]]  # with the place of their first key among those that were read
    read: Tensor  # slots of the cache


def store_of(cache: Any, layer: int) -> Store:
    """Finds the pages of a layer in the cache of transformers 5.17 (groups of layers) or newer (allocators)."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        window = getattr(allocator, "sliding_window", None)
        pages = allocator.get_cache_for_block_table(layer) if window is None else None
        return Store(
            allocator.index, allocator.layer_type, window, allocator.tokens_per_page, pages,
            allocator.write_trash_index, allocator.num_key_value_heads, allocator.head_dim,
        )  # fmt: skip
    group, place = cache.layer_index_to_group_indices[layer]
    heads, head_dim, page_size = cache.num_key_value_heads, cache.head_dim, cache.block_size
    window = cache.sliding_windows[layer]
    if window != 1:  # 1 marks full attention
        kind, pages = "sliding_attention", None
    else:
        kind, window = "full_attention", None
        shape = (-1, page_size, heads, head_dim)
        pages = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    return Store(group, kind, window, page_size, pages, cache.write_trash_index, heads, head_dim)


def _of_tokens(rows: dict[str, Any], tokens: Tensor | slice) -> dict[str, Any]:
    """The rows of some tokens; what has no dimension of tokens, a sink [H] for one, stays as it is."""
    return {name: x[:, :, tokens] if _has_tokens(x) else x for name, x in rows.items()}


def _one_per_sequence(rows: dict[str, Any]) -> dict[str, Any]:
    """[1, H, n, ..] as [n, H, 1, ..]: n sequences of one token instead of one of n."""
    return {name: x.transpose(0, 2) if _has_tokens(x) else x for name, x in rows.items()}


def _has_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 3
